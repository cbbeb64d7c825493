//! What several tests need: effects to count, and connections. What users need too is in `testing`.

use std::time::Duration;

use pg_idempotency::operator::{Shown, show};
use pg_idempotency::{Error, Idempotency, Janitor, Key, OnDuplicate, OnEscape, Outcome, SettleError, protect};
use rig::database::backend;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

pub(crate) use rig::database::{effects, options, outside, pool_of, recorded, records, until};

pub(crate) fn key(value: &str) -> Key {
    Key::new("tenant", "operation", value).expect("a valid key")
}

/// The record of this key.
pub(crate) async fn shown(pool: &PgPool, key: &Key) -> Shown {
    show(pool, key).await.expect("a database").expect("a record")
}

/// The names of all steps in doubt.
pub(crate) fn steps_in_doubt(shown: &Shown) -> Vec<&str> {
    let mut names: Vec<_> = shown.steps.iter().filter(|step| step.in_doubt).map(|step| &*step.name).collect();
    names.sort_unstable();
    names
}

pub(crate) fn assert_changed<T: std::fmt::Debug>(result: Result<T, SettleError>, why: &str) {
    let error = result.expect_err(why);
    assert!(matches!(error, SettleError::Changed) && !error.is_transient(), "{why}: {error:?}");
}

pub(crate) fn rejecting() -> Idempotency {
    Idempotency::new().on_duplicate(OnDuplicate::Reject)
}

pub(crate) fn waiting(limit: Duration) -> Idempotency {
    Idempotency::new().on_duplicate(OnDuplicate::Wait(limit))
}

/// Between two cases of a test.
pub(crate) async fn clear(pool: &PgPool) {
    outside(pool, "truncate idempotency.record, effect").await;
}

/// A table of effects without a unique constraint: nothing but the crate keeps a second one out. It is protected, so a
/// call of the crate that leaves no mark on its transaction fails.
pub(crate) async fn create_effects(pool: &PgPool) {
    create_open_effects(pool).await;
    protect(pool, "effect", OnEscape::Refuse).await.expect("protected");
}

/// For a test that also writes effects outside its calls.
pub(crate) async fn create_open_effects(pool: &PgPool) {
    sqlx::raw_sql("create table effect (id bigint generated always as identity, note text not null)")
        .execute(pool)
        .await
        .expect("a table of effects");
}

/// The usual `perform`: leaves an effect, answers with its id.
pub(crate) async fn leave_effect(conn: &mut PgConnection, note: &str) -> Result<i64, Error> {
    Ok(sqlx::query_scalar("insert into effect (note) values ($1) returning id").bind(note).fetch_one(conn).await?)
}

/// Sets the rest of the retention. `testing::expire` also ends a live lease; this does not.
pub(crate) async fn expire_in(pool: &PgPool, key: &Key, left: Duration) -> Result<(), Error> {
    sqlx::query(
        "update idempotency.record set expires_at = statement_timestamp() + $4 * interval '1 s'
         where scope = $1 and operation = $2 and value = $3",
    )
    .bind(key.scope())
    .bind(key.operation())
    .bind(key.value())
    .bind(left.as_secs_f64())
    .execute(pool)
    .await?;
    Ok(())
}

/// Deletes what is expired at once.
pub(crate) fn janitor(pool: &PgPool) -> Janitor {
    Janitor::new(pool.clone()).grace(Duration::ZERO)
}

/// Runs the usual operation once, in a transaction of the crate's.
pub(crate) async fn once(pool: &PgPool, key: &Key, body: &str) -> Result<Outcome<i64>, Error> {
    Idempotency::new().run(pool, key, body, async |conn| leave_effect(conn, body).await).await
}

pub(crate) async fn connect(pool: &PgPool) -> PgConnection {
    PgConnection::connect_with(&pool.connect_options()).await.expect("a connection")
}

/// Does the work in a database whose language is Turkish, in which the lower case of I has no dot. Returns `None` if
/// the server has no such database: before PostgreSQL 15, or built without ICU.
pub(crate) async fn in_turkish<T>(pool: &PgPool, work: impl AsyncFnOnce(&PgPool) -> T) -> Option<T> {
    let mut admin = connect(pool).await;
    let name = format!("turkish_{}", backend(&mut admin).await.expect("a number"));
    let create =
        format!("create database {name} template template0 encoding 'UTF8' locale_provider icu icu_locale 'tr'");
    if let Err(error) = admin.execute(AssertSqlSafe(create)).await {
        let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default().into_owned();
        assert!(["42601", "0A000"].contains(&&*code), "{error}");
        println!("skipped: {error}");
        return None;
    }
    let turkish = pool_of(2, &options(pool).database(&name)).await;
    let done = work(&turkish).await;
    turkish.close().await;
    admin.execute(AssertSqlSafe(format!("drop database {name}"))).await.expect("nobody else is there");
    Some(done)
}

pub(crate) async fn setting(conn: &mut PgConnection, name: &str) -> String {
    sqlx::query_scalar("select current_setting($1)").bind(name).fetch_one(conn).await.expect("a setting")
}
