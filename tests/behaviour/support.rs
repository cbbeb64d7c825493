//! What several tests need: effects to count, gates to stop inside `perform`, time moved by SQL.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pg_idempotency::{Error, Idempotency, InFlight, Key, Outcome};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgConnection, PgPool};
use tokio::sync::Semaphore;

/// Long past anything that works; a test that hangs fails by it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn key(value: &str) -> Key {
    Key::new("tenant", "operation", value).expect("a valid key")
}

pub(crate) fn rejecting() -> Idempotency {
    Idempotency::new().with_in_flight(InFlight::Reject).expect("Reject has no duration")
}

pub(crate) fn waiting(limit: Duration) -> Idempotency {
    Idempotency::new().with_in_flight(InFlight::Wait(limit)).expect("a sensible wait")
}

/// A table of effects without a unique constraint: nothing but the crate keeps a second one out.
pub(crate) async fn create_effects(pool: &PgPool) {
    sqlx::raw_sql("create table effect (id bigint generated always as identity, note text not null)")
        .execute(pool)
        .await
        .expect("a table of effects");
}

/// The usual `perform`: leaves an effect, answers with its id.
pub(crate) async fn leave_effect(conn: &mut PgConnection, note: &str) -> Result<i64, Error> {
    Ok(sqlx::query_scalar("insert into effect (note) values ($1) returning id").bind(note).fetch_one(conn).await?)
}

pub(crate) async fn effects(pool: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from effect").fetch_one(pool).await.expect("a count")
}

/// Runs the usual operation once, in a transaction of the crate's.
pub(crate) async fn once(pool: &PgPool, key: &Key, body: &str) -> Result<Outcome<i64>, Error> {
    Idempotency::new().run(pool, key, body, async |conn| leave_effect(conn, body).await).await
}

/// A pool of more connections than `#[sqlx::test]` gives, on the same database.
pub(crate) async fn wide_pool(options: &PgConnectOptions, connections: u32) -> PgPool {
    PgPoolOptions::new().max_connections(connections).connect_with(options.clone()).await.expect("a pool")
}

pub(crate) async fn connect(pool: &PgPool) -> PgConnection {
    PgConnection::connect_with(&pool.connect_options()).await.expect("a connection")
}

/// Moves a record's end to this far from now, by the database's clock.
pub(crate) async fn expire_in(pool: &PgPool, key: &Key, interval: &str) {
    let moved =
        sqlx::query("update idempotency.record set expires_at = clock_timestamp() + $1::interval where key = $2")
            .bind(interval_text(interval))
            .bind(key.value())
            .execute(pool)
            .await
            .expect("an update");
    assert_eq!(moved.rows_affected(), 1, "there is a record to move");
}

/// sqlx has no text form of an interval: bind it as one that PostgreSQL parses.
fn interval_text(text: &str) -> sqlx::postgres::types::PgInterval {
    let milliseconds: i64 = text.strip_suffix("ms").and_then(|n| n.trim().parse().ok()).expect("an interval in ms");
    sqlx::postgres::types::PgInterval { months: 0, days: 0, microseconds: milliseconds * 1000 }
}

pub(crate) async fn backend(conn: &mut PgConnection) -> i32 {
    sqlx::query_scalar("select pg_backend_pid()").fetch_one(conn).await.expect("a process id")
}

pub(crate) async fn setting(conn: &mut PgConnection, name: &str) -> String {
    sqlx::query_scalar("select current_setting($1)").bind(name).fetch_one(conn).await.expect("a setting")
}

/// Waits until the database answers `true`, by asking again: the database decides, not a clock.
pub(crate) async fn until(pool: &PgPool, question: &'static str) {
    let started = Instant::now();
    loop {
        if sqlx::query_scalar::<_, bool>(question).fetch_one(pool).await.expect("an answer") {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "never true: {question}");
    }
}

/// Waits until this many statements of this database wait for another's transaction.
pub(crate) async fn until_blocked(pool: &PgPool, count: i64) {
    let started = Instant::now();
    loop {
        let blocked: i64 = sqlx::query_scalar(
            "select count(*) from pg_stat_activity
             where datname = current_database() and wait_event_type = 'Lock'",
        )
        .fetch_one(pool)
        .await
        .expect("a count");
        if blocked == count {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "{blocked} blocked, {count} expected");
    }
}

/// Stops inside `perform`: the operation [`pass`](Self::pass)es, the test waits until it is [`reached`](Self::reached) and
/// then [`open`](Self::open)s.
#[derive(Clone)]
pub(crate) struct Gate {
    reached: Arc<Semaphore>,
    opened: Arc<Semaphore>,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self { reached: Arc::new(Semaphore::new(0)), opened: Arc::new(Semaphore::new(0)) }
    }

    pub(crate) async fn pass(&self) {
        self.reached.add_permits(1);
        self.opened.acquire().await.expect("never closed").forget();
    }

    pub(crate) async fn reached(&self) {
        tokio::time::timeout(PATIENCE, self.reached.acquire()).await.expect("reached").expect("never closed").forget();
    }

    pub(crate) fn open(&self) {
        self.opened.add_permits(1);
    }
}

/// Polls a future at most `polls` times, then drops it. `None` where it was dropped.
pub(crate) async fn cancel_after<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut polled = 0;
    poll_fn(move |context| {
        if polled == polls {
            return std::task::Poll::Ready(None);
        }
        polled += 1;
        let result = future.as_mut().poll(context).map(Some);
        if result.is_pending() && polled == polls {
            return std::task::Poll::Ready(None);
        }
        result
    })
    .await
}
