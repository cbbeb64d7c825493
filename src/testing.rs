//! Tools for the tests of your service (feature `testing`). The tools move the times of records, and race calls. The
//! guide's page `testing` is a tutorial.
//!
//! **Make each record with a real call: the call that leaves a record in the state that you want to test.** Then move
//! the record's times in the database, so that no test sleeps. With `#[sqlx::test]`, which gives each test a database
//! of its own, [`MIGRATOR`](crate::MIGRATOR) creates the table:
//!
//! ```no_run,test_harness
//! # use pg_idempotency::{Error, Idempotency, Key, testing};
//! # use std::time::Duration;
//! #[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
//! async fn a_key_is_remembered_for_a_day(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//!     let key = Key::new("user:1", "POST /orders", "abc")?;
//!     let order = async |_: &mut sqlx::PgConnection| -> Result<i32, Error> { Ok(17) };
//!     assert!(!Idempotency::new().run(&pool, &key, "tea", order).await?.is_replayed());
//!
//!     testing::age(&pool, &key, Duration::from_secs(23 * 3600)).await?;
//!     assert!(Idempotency::new().run(&pool, &key, "tea", order).await?.is_replayed());
//!     Ok(())
//! }
//! ```
//!
//! | to test | use |
//! |---|---|
//! | a retry | the call itself, twice |
//! | a call a day later, a worker that has died | [`age`], [`expire`], [`lapse`] |
//! | a duplicate of a call in flight | a transaction of the test |
//! | a storm of duplicates | [`race`] and [`assert_performed_once`] |
//! | the SQL functions for other languages | [`ANY_LANGUAGE_MIGRATOR`] |
//! | a write that does not go through the transaction of the call | [`protect`](crate::protect()) |
//! | the record that remains | [`operator::show`](crate::operator::show()) |

use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

use sqlx::postgres::{PgArguments, PgPoolOptions};
use sqlx::query::Query;
use sqlx::{PgExecutor, PgPool, Postgres};
use tokio::time::timeout;

pub use crate::migrate::ANY_LANGUAGE_MIGRATOR;
use crate::record::{Record, changes_a_row, interval};
use crate::{Error, Key, Outcome};

/// The maximum time for which a race waits until its connections are open, and later until they are closed.
const PATIENCE: Duration = Duration::from_secs(30);

/// Lets time pass for the record. The function subtracts `by` from the times of the claim and the completion, and from
/// the ends of the lease and the retention. The function takes a pool or a connection. The function cannot change a
/// record that another transaction has not committed yet.
///
/// # Errors
///
/// [`Error::Database`], with [`sqlx::Error::RowNotFound`] if there is no record.
pub async fn age(executor: impl PgExecutor<'_>, key: &Key, by: Duration) -> Result<(), Error> {
    let update = record(key).query(
        "
        update /* pg_idempotency: move time */ idempotency.record
        -- In UTC, because a time with a zone minus an interval depends on the session, and Citus refuses that.
        set claimed_at = (claimed_at at time zone 'UTC' - $4::interval) at time zone 'UTC',
            completed_at = (completed_at at time zone 'UTC' - $4::interval) at time zone 'UTC',
            lease_until = (lease_until at time zone 'UTC' - $4::interval) at time zone 'UTC',
            expires_at = (expires_at at time zone 'UTC' - $4::interval) at time zone 'UTC'
        where scope = $1::text and operation = $2::text and value = $3::text
        ",
    );
    moved(executor, update.bind(interval(by))).await
}

/// Moves the ends of the retention and of a live lease to a moment ago. The key is then new, although its record still
/// exists.
///
/// # Errors
///
/// The errors are those of [`age`].
pub async fn expire(executor: impl PgExecutor<'_>, key: &Key) -> Result<(), Error> {
    let update = record(key).query(
        "
        update /* pg_idempotency: move time */ idempotency.record
        set expires_at = least(expires_at, pg_catalog.statement_timestamp() - interval '1 ms'),
            lease_until = least(
                lease_until,
                -- Null without a lease. Citus takes a CASE only without the clock.
                pg_catalog.statement_timestamp() - interval '1 ms' + case when lease_until is not null then interval '0' end
            )
        where scope = $1::text and operation = $2::text and value = $3::text
        ",
    );
    moved(executor, update).await
}

/// Lets the lease lapse, as if its owner had died and the lease had then ended.
///
/// A living owner continues. The owner's next renewal prolongs the lease again, unless another call has taken the claim
/// over.
///
/// Over HTTP, a retry through the same router gets 409 `in-flight`, because the layer of this router knows that the run
/// of the first request is alive. **Use a second router with a layer of its own as the other process.** The guide's
/// page `testing` explains this.
///
/// # Errors
///
/// The errors are those of [`age`]. `RowNotFound` also means that the record is completed or released, or never had a
/// lease.
pub async fn lapse(executor: impl PgExecutor<'_>, key: &Key) -> Result<(), Error> {
    let update = record(key).query(
        "
        update /* pg_idempotency: move time */ idempotency.record
        set lease_until = least(lease_until, pg_catalog.statement_timestamp() - interval '1 ms')
        where scope = $1::text and operation = $2::text and value = $3::text
            and completed_at is null
            and lease_until > '-infinity'
        ",
    );
    moved(executor, update).await
}

fn record(key: &Key) -> Record<'_> {
    Record { key, persistent: true }
}

async fn moved(executor: impl PgExecutor<'_>, update: Query<'_, Postgres, PgArguments>) -> Result<(), Error> {
    let moved = changes_a_row(executor, update).await?;
    if moved { Ok(()) } else { Err(Error::Database(sqlx::Error::RowNotFound)) }
}

/// Makes `calls` calls at once, and returns all results.
///
/// The race opens a pool of its own to the same database, with a connection for each call, before the first call
/// begins. On the five connections of `#[sqlx::test]` most calls would queue.
///
/// ```no_run
/// # use pg_idempotency::{Error, Idempotency, Key, testing::{assert_performed_once, race}};
/// # async fn f(pool: sqlx::PgPool, key: Key) -> Result<(), Error> {
/// let answers = race(&pool, 20, async |pool| {
///     Idempotency::new().run(pool, &key, "tea", async |_| -> Result<i32, Error> { Ok(17) }).await
/// })
/// .await?;
/// assert_eq!(assert_performed_once(answers), 17);
/// # Ok(()) }
/// ```
///
/// All calls run in the caller's task. A call that blocks its thread blocks all other calls.
///
/// # Errors
///
/// Errors of the database, for instance if it has too few connections.
pub async fn race<T>(pool: &PgPool, calls: u32, call: impl AsyncFn(&PgPool) -> T) -> Result<Vec<T>, Error> {
    let options = PgPoolOptions::new().max_connections(calls.max(1)).acquire_timeout(PATIENCE);
    let wide = options.connect_with(pool.connect_options().as_ref().clone()).await?;
    let mut open = Vec::new();
    for _ in 0..calls {
        open.push(wide.acquire().await?);
    }
    drop(open);

    let answers = all((0..calls).map(|_| call(&wide))).await;
    // A run of the HTTP layer may outlive its call and hold a connection. `close` waits for this connection.
    let _ = timeout(PATIENCE, wide.close()).await;
    Ok(answers)
}

/// Polls all calls until the last call is ready. The answers are in the order of the calls.
async fn all<F: Future>(calls: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut calls: Vec<_> = calls.map(|call| (Box::pin(call), None)).collect();
    poll_fn(|context| {
        let mut pending = false;
        for (call, answer) in calls.iter_mut().filter(|(_, answer)| answer.is_none()) {
            match call.as_mut().poll(context) {
                Poll::Ready(ready) => *answer = Some(ready),
                Poll::Pending => pending = true,
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    calls.into_iter().filter_map(|(_, answer)| answer).collect()
}

/// Asserts that exactly one of these calls performed the operation, and that all other calls replayed the same
/// response. Returns the response.
///
/// Under [`OnDuplicate::Reject`](crate::OnDuplicate::Reject) a duplicate may get [`Error::InFlight`]. Filter these
/// errors out before you call this function.
///
/// # Panics
///
/// Panics if the number of calls that performed the operation is not one, if a call failed, or if the responses differ.
#[track_caller]
pub fn assert_performed_once<T, E>(answers: impl IntoIterator<Item = Result<Outcome<T>, E>>) -> T
where
    T: PartialEq + Debug,
    E: Debug,
{
    let (mut performed, mut replayed) = (Vec::new(), Vec::new());
    for answer in answers {
        match answer {
            Ok(Outcome::Performed(answer)) => performed.push(answer),
            Ok(Outcome::Replayed(answer)) => replayed.push(answer),
            Err(error) => panic!("a call failed: {error:?}"),
        }
    }
    assert!(performed.len() <= 1, "performed {} times, with {performed:?}", performed.len());
    let Some(first) = performed.pop() else { panic!("no call performed; replayed {replayed:?}") };
    for answer in replayed {
        assert_eq!(answer, first, "a replay gave another answer than the call that performed");
    }
    first
}
