//! A transaction without an owner, on a connection that a pool gives to a call: a raw BEGIN, which sqlx does not count.

use std::time::Duration;

use pg_idempotency::testing;
use pg_idempotency::{Error, Key};
use rig::database::until_blocked;
use rig::gate::PATIENCE;
use rig::role::with_role;
use sqlx::postgres::PgListener;
use sqlx::{Executor as _, PgConnection, PgPool};
use tokio::time::{Instant, sleep, timeout};

use crate::support::{
    connect, create_effects, create_open_effects, key, leave_effect, once, options, pool_of, setting, waiting,
};

/// After these, PostgreSQL refuses `begin not deferrable`, because a query has run, or a savepoint is there.
const REFUSED: &[&str] = &[
    "select 1",
    "table effect",
    "values (1)",
    "explain select 1",
    "insert into effect (note) values ('foreign')",
    "update effect set note = 'foreign'",
    "delete from effect",
    "truncate effect",
    "create table foreign_table ()",
    "create index on effect (note)",
    "alter table effect add column foreign_column int",
    "drop table effect",
    "comment on table effect is 'foreign'",
    "grant select on effect to public",
    "do $$ begin perform 1; end $$",
    "prepare foreign_plan as select 1",
    "declare foreign_cursor cursor for select 1",
    "analyze effect",
    "reindex table effect",
    "savepoint foreign_savepoint",
    "select 1 / 0",
];

/// After these, it joins the transaction, and only the age of the transaction can tell.
const JOINED: &[&str] = &[
    "begin",
    "set application_name = 'foreign'",
    "set local application_name = 'foreign'",
    "reset application_name",
    "show application_name",
    "set role pg_monitor",
    "set session authorization pg_monitor",
    "set constraints all deferred",
    "set transaction isolation level serializable",
    "set transaction read only",
    "notify foreign_channel",
    "listen foreign_channel",
    "lock table pg_catalog.pg_class in access share mode",
];

/// A call that ends in each of the three ways.
const CALLS: [&str; 3] = ["first call", "take-over", "replay"];

/// The SQLSTATE of a database error.
fn sqlstate(error: &Error) -> Option<String> {
    let Error::Database(cause) = error else { return None };
    Some(cause.as_database_error()?.code()?.into_owned())
}

async fn begin_raw(conn: &mut PgConnection, statement: &'static str) {
    conn.execute("begin").await.expect("begun");
    // One of them aborts the transaction.
    let _ = conn.execute(statement).await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_opening_is_refused_after_a_query_and_joins_any_other_transaction(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    for (statements, refused) in [(REFUSED, true), (JOINED, false)] {
        for statement in statements {
            let mut conn = connect(&pool).await;
            begin_raw(&mut conn, statement).await;
            let opened = conn.execute("begin not deferrable").await;
            assert_eq!(opened.is_err(), refused, "{statement}: {opened:?}");
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_call_leaves_a_foreign_transaction_without_effect(other: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(1, &other.connect_options()).await;
    create_open_effects(&pool).await;
    let mut listener = PgListener::connect_with(&other).await?;
    listener.listen_all(["foreign_channel", "end"]).await?;
    for statement in REFUSED.iter().chain(JOINED) {
        for call in CALLS {
            let key = key(&format!("{call} {statement}"));
            // If the claim's answer takes longer than the foreign transaction is old, the call joins it. So wait
            // longer.
            let mut pause = Duration::from_millis(20);
            while !is_without_effect(&pool, &other, &key, call, statement, pause).await? {
                assert!(pause < PATIENCE, "{call} after {statement}: the foreign transaction had an effect");
                pause *= 10;
            }
        }
    }
    other.execute("notify \"end\"").await?;
    let heard = timeout(PATIENCE, listener.recv()).await??;
    assert_eq!(heard.channel(), "end", "no foreign notification was sent");
    Ok(())
}

/// Makes the call on a connection with a foreign transaction of this age, and returns whether that one left nothing.
async fn is_without_effect(
    pool: &PgPool,
    other: &PgPool,
    key: &Key,
    call: &str,
    statement: &'static str,
    age: Duration,
) -> anyhow::Result<bool> {
    sqlx::raw_sql("truncate idempotency.record, effect").execute(other).await?;
    if call != "first call" {
        assert!(!once(other, key, "body").await?.is_replayed());
    }
    if call == "take-over" {
        testing::expire(other, key).await?;
    }
    begin_raw(&mut *pool.acquire().await?, statement).await;
    sleep(age).await;
    let outcome = once(pool, key, "body").await?;
    assert_eq!(outcome.is_replayed(), call == "replay");
    let notes: Vec<String> = sqlx::query_scalar("select note from effect").fetch_all(other).await?;
    let expected = vec!["body"; if call == "take-over" { 2 } else { 1 }];
    let mut conn = pool.acquire().await?;
    let unset = setting(&mut conn, "application_name").await != "foreign"
        && sqlx::query_scalar("select current_user = session_user and current_user <> 'pg_monitor'")
            .fetch_one(&mut *conn)
            .await?;
    conn.execute("reset application_name; reset session authorization; reset role; unlisten *").await?;
    Ok(unset && notes == expected)
}

/// The truth after a fail-over: the session itself is read only, or its role has no rights.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_of_the_sessions_own_settings_comes_back(pool: PgPool) -> anyhow::Result<()> {
    for (setting, expected) in [("default_transaction_read_only", "25006"), ("role", "42501")] {
        let value = if setting == "role" { "pg_monitor" } else { "on" };
        let pool = pool_of(1, &options(&pool).options([(setting, value)])).await;
        let error = once(&pool, &key("a"), "body").await.expect_err("refused");
        assert_eq!(sqlstate(&error).as_deref(), Some(expected), "{error:?}");
    }
    Ok(())
}

/// The documented exception: no query has run in the foreign transaction, and the way of the claim's answer takes
/// longer than this transaction was old when the call began. Here a trigger delays the answer after the insert. The
/// settings of the foreign transaction then apply to the call: row security shows the rows of another tenant. The claim
/// and the protection of the table hold all the same.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_younger_transaction_without_a_query_is_joined(other: PgPool) -> anyhow::Result<()> {
    create_effects(&other).await;
    sqlx::raw_sql(
        "create table account (tenant text, balance int);
         insert into account values ('theirs', 7);
         alter table account enable row level security;
         create policy tenant on account using (tenant = current_setting('app.tenant', true));
         create function slow() returns trigger language plpgsql as
             $$ begin perform pg_advisory_xact_lock(1); return new; end $$;
         create trigger slow after insert on idempotency.record for each row execute function slow()",
    )
    .execute(&other)
    .await?;
    let rights = "grant select on account to @role; grant usage on schema idempotency to @role;
        grant select, insert, update on idempotency.record, effect to @role";
    with_role(&other, rights, async |role| {
        let pool = pool_of(1, &options(&other).options([("role", role)])).await;
        let mut gate = other.begin().await?;
        gate.execute("select pg_advisory_xact_lock(1)").await?;

        let begun = Instant::now();
        begin_raw(&mut *pool.acquire().await?, "set local app.tenant = 'theirs'").await;
        let call = tokio::spawn({
            let pool = pool.clone();
            async move {
                let perform = async |conn: &mut PgConnection| -> Result<i32, Error> {
                    leave_effect(&mut *conn, "body").await?;
                    Ok(sqlx::query_scalar("select coalesce(sum(balance), 0)::int from account").fetch_one(conn).await?)
                };
                waiting(PATIENCE).run(&pool, &key("a"), "body", perform).await
            }
        });
        until_blocked(&other, 1).await?;
        // Now the transaction is as old as it will be for the claim, so the claim has to take longer than that.
        sleep(begun.elapsed() + Duration::from_millis(10)).await;
        gate.commit().await?;
        assert_eq!(call.await??.into_inner(), 7, "the balance of the other tenant");
        let another_body = once(&other, &key("a"), "other").await.expect_err("claimed");
        assert!(matches!(another_body, Error::KeyReused { .. }), "{another_body:?}");
        let outside = leave_effect(&mut *pool.acquire().await?, "outside").await.expect_err("the table is protected");
        assert_eq!(sqlstate(&outside).as_deref(), Some("IK006"), "{outside:?}");
        anyhow::Ok(())
    })
    .await
}
