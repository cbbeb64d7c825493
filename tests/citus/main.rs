//! Every public operation on a table that Citus distributes, on the cluster whose coordinator `CITUS_DATABASE_URL`
//! names. Without it each test says that it is skipped. `script/citus` runs them.

mod deadlocks;
mod leases;
mod marks;
mod operators;
mod protect;
mod settings;
mod transactions;

use std::sync::Once;
use std::time::Duration;

use pg_idempotency::{Deployment, Error, Idempotency, Key, OnDuplicate, Outcome, distribute, migrate};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

const DISTRIBUTED: Deployment = Deployment::new().distributed(true);

/// Tests that count what the whole server does run alone.
static TURN: RwLock<()> = RwLock::const_new(());

/// A table in a database that the tests share: each test has scopes of its own.
struct Citus {
    pool: PgPool,
    _turn: Turn,
}

#[allow(dead_code, reason = "held")]
enum Turn {
    Shared(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

async fn citus() -> Option<Citus> {
    let turn = Turn::Shared(TURN.read().await);
    Some(Citus { pool: pool().await?, _turn: turn })
}

async fn citus_alone() -> Option<Citus> {
    let turn = Turn::Alone(TURN.write().await);
    Some(Citus { pool: pool().await?, _turn: turn })
}

fn options() -> Option<PgConnectOptions> {
    let Ok(url) = std::env::var("CITUS_DATABASE_URL") else {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| eprintln!("skipped: the tests on Citus need CITUS_DATABASE_URL"));
        return None;
    };
    Some(url.parse().expect("a URL"))
}

async fn pool() -> Option<PgPool> {
    let pool = PgPoolOptions::new().max_connections(12).connect_with(options()?).await.expect("a coordinator");
    let mut conn = pool.acquire().await.expect("a connection");
    migrate(&pool).await.expect("migrated");
    distribute(&pool).await.expect("distributed");
    let mut tx = conn.begin().await.expect("begun");
    tx.execute("select pg_advisory_xact_lock(1)").await.expect("locked");
    let there: bool = sqlx::query_scalar("select to_regclass('citus_effect') is not null")
        .fetch_one(&mut *tx)
        .await
        .expect("an answer");
    if !there {
        // Beside the keys: the same type and collation.
        sqlx::raw_sql(
            "create table citus_effect (scope text collate \"C\" not null, note text not null);
             select create_distributed_table('citus_effect', 'scope', colocate_with => 'idempotency.record')",
        )
        .execute(&mut *tx)
        .await
        .expect("a table of effects");
    }
    tx.commit().await.expect("committed");
    drop(conn);
    Some(pool)
}

/// Time for a caller to begin its wait. The coordinator does not show whose wait it is, and the answers are the same if
/// it comes later.
async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(100)).await;
}

/// A key of a new scope.
fn key(operation: &str) -> Key {
    key_of(&scope(), operation)
}

fn key_of(scope: &str, operation: &str) -> Key {
    Key::new(scope, operation, "value").expect("a key")
}

fn scope() -> String {
    uuid::Uuid::new_v4().to_string()
}

fn calls() -> Idempotency {
    Idempotency::new().deployment(DISTRIBUTED)
}

fn rejecting() -> Idempotency {
    calls().on_duplicate(OnDuplicate::Reject)
}

fn waiting(limit: Duration) -> Idempotency {
    calls().on_duplicate(OnDuplicate::Wait(limit))
}

/// Leaves an effect beside the key, and counts those of its scope.
async fn effect(conn: &mut PgConnection, key: &Key) -> Result<i64, Error> {
    sqlx::query("insert into citus_effect (scope, note) values ($1, 'effect')")
        .bind(key.scope())
        .execute(&mut *conn)
        .await?;
    effects(conn, key).await
}

async fn effects(conn: &mut PgConnection, key: &Key) -> Result<i64, Error> {
    let count = sqlx::query_scalar("select count(*) from citus_effect where scope = $1").bind(key.scope());
    Ok(count.fetch_one(conn).await?)
}

async fn once(pool: &PgPool, key: &Key, body: &str) -> Result<Outcome<i64>, Error> {
    calls().run(pool, key, body, async |conn| effect(conn, key).await).await
}
