//! The claim that never waits, and the one wait: which locks they take and keep, what they leave behind in the caller's
//! transaction, and that of many who wait one claims.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use pg_idempotency::dedup::mark;
use pg_idempotency::testing::{Gate, cancel_after, until_blocked};
use pg_idempotency::{Error, Idempotency, Outcome, ensure_idempotent};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};
use tokio::time::timeout;

use crate::support::{
    connect, create_effects, effects, key, leave_effect, once, rejecting, setting, waiting, wide_pool,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// The advisory locks that this connection's transaction holds.
async fn locks(conn: &mut PgConnection) -> i64 {
    sqlx::query_scalar("select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()")
        .fetch_one(conn)
        .await
        .expect("a count")
}

async fn xid(conn: &mut PgConnection) -> Option<String> {
    sqlx::query_scalar("select pg_current_xact_id_if_assigned()::text").fetch_one(conn).await.expect("an answer")
}

/// An open transaction that has claimed the key and performed.
async fn owner(pool: &PgPool, value: &str) -> sqlx::PgTransaction<'static> {
    let mut tx = pool.begin().await.expect("a transaction");
    let _ = ensure_idempotent(&mut tx, &key(value), "body", async |conn| leave_effect(conn, "owner").await)
        .await
        .expect("the first call");
    tx
}

async fn replays(conn: &mut PgConnection, options: Idempotency, value: &str) -> Result<bool, Error> {
    let perform = async |conn: &mut PgConnection| leave_effect(conn, "another").await;
    options.ensure(conn, &key(value), "body", perform).await.map(|outcome| outcome.is_replayed())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_replay_a_reused_key_and_another_mode_hold_no_lock(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("a"), "body").await?;
    for plan in ["force_generic_plan", "force_custom_plan"] {
        for options in [Idempotency::new(), rejecting()] {
            let mut tx = pool.begin().await?;
            sqlx::query("select set_config('plan_cache_mode', $1, true)").bind(plan).execute(&mut *tx).await?;
            assert!(replays(&mut tx, options, "a").await?);
            let reused = options.ensure(&mut tx, &key("a"), "other", async |_| Ok::<i64, Error>(1)).await;
            assert!(matches!(reused, Err(Error::KeyReused { .. })), "{reused:?}");
            let other_mode = mark(&mut tx, &key("a"), Duration::from_secs(60)).await;
            assert!(matches!(other_mode, Err(Error::OtherMode { .. })), "{other_mode:?}");
            assert_eq!(locks(&mut tx).await, 0, "{plan}");
            assert_eq!(xid(&mut tx).await, None, "{plan}: it wrote nothing");
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn an_owner_keeps_its_lock_when_it_replays_its_own_key(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let mut tx = owner(&pool, "a").await;
    assert_eq!(locks(&mut tx).await, 1);
    assert!(replays(&mut tx, Idempotency::new(), "a").await?);
    assert_eq!(locks(&mut tx).await, 1);
    Ok(())
}

/// What waited and then replays holds nothing either.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_replay_after_a_wait_holds_no_lock(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let first = owner(&pool, "a").await;
    let duplicate = tokio::spawn({
        let pool = pool.clone();
        async move {
            let mut tx = pool.begin().await?;
            assert!(replays(&mut tx, Idempotency::new(), "a").await?);
            Ok::<_, Error>((locks(&mut tx).await, xid(&mut tx).await))
        }
    });
    until_blocked(&pool, 1).await?;
    first.commit().await?;
    assert_eq!(duplicate.await??, (0, None), "no lock, and no id, not even a subtransaction's");
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_key_swept_behind_an_open_replay_is_free_at_once(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("a"), "body").await?;
    let mut replayer = pool.begin().await?;
    assert!(replays(&mut replayer, Idempotency::new(), "a").await?);
    sqlx::query("delete from idempotency.record").execute(&pool).await?;
    let mut tx = pool.begin().await?;
    assert!(!replays(&mut tx, rejecting(), "a").await?);
    tx.commit().await?;
    Ok(())
}

/// The trigger deletes the record after the claim's snapshot was taken, as a sweep at that moment would.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_record_swept_between_claim_and_look_is_claimed(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("a"), "body").await?;
    sqlx::raw_sql(
        "create function sweep() returns trigger language plpgsql as $$ begin delete from idempotency.record; return null; end $$;
         create trigger sweep before insert on idempotency.record for each statement execute function sweep()",
    )
    .execute(&pool)
    .await?;
    let mut tx = pool.begin().await?;
    assert!(!replays(&mut tx, rejecting(), "a").await?);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn after_a_wait_that_expired_the_transaction_is_usable_and_its_lock_timeout_is_back(
    pool: PgPool,
) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let first = owner(&pool, "a").await;
    let (short, hour) = (Duration::from_millis(30), Duration::from_secs(3600));
    for (limit, callers) in
        [(Duration::from_millis(1), "0"), (short, "0"), (short, "7min"), (short, "1d"), (short, "10ms"), (hour, "20ms")]
    {
        let mut tx = pool.begin().await?;
        sqlx::query("select set_config('lock_timeout', $1, true)").bind(callers).execute(&mut *tx).await?;
        let error = replays(&mut tx, waiting(limit), "a").await.expect_err("in flight");
        assert!(matches!(error, Error::InFlight { .. }), "{callers}: {error:?}");
        assert_eq!(setting(&mut tx, "lock_timeout").await, callers, "{limit:?}");
        assert_eq!(locks(&mut tx).await, 0, "{callers}");
        assert!(!replays(&mut tx, waiting(limit), "of another key").await?, "the transaction is usable");
        tx.rollback().await?;
    }
    first.rollback().await?;
    assert_eq!(effects(&pool).await, 0);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_wait_can_be_dropped_at_every_poll(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let first = owner(&pool, "a").await;
    for polls in 0..40 {
        let mut tx = pool.begin().await?;
        sqlx::query("set local lock_timeout = '7min'").execute(&mut *tx).await?;
        let _ = cancel_after(polls, replays(&mut tx, waiting(Duration::from_millis(20)), "a")).await;
        assert_eq!(setting(&mut tx, "lock_timeout").await, "7min", "{polls} polls");
        leave_effect(&mut tx, &polls.to_string()).await?;
        tx.commit().await?;
        let seen: bool = sqlx::query_scalar("select exists (select from effect where note = $1)")
            .bind(polls.to_string())
            .fetch_one(&pool)
            .await?;
        assert!(seen, "{polls} polls: what was written after it is there");
    }
    first.rollback().await?;
    Ok(())
}

/// 120 calls of one key, of which the first 20 to perform fail: one heir each, and nobody starves. A trigger counts the
/// claims: a sequence is not rolled back.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn of_many_who_wait_one_claims_when_an_owner_rolls_back(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    const CALLS: i64 = 120;
    const FAILURES: i64 = 20;
    let pool = wide_pool(&options, 122).await;
    create_effects(&pool).await;
    sqlx::raw_sql(
        "create sequence claims;
         create function count_claim() returns trigger language plpgsql as $$ begin perform nextval('claims'); return null; end $$;
         create trigger count before insert on idempotency.record for each statement execute function count_claim()",
    )
    .execute(&pool)
    .await?;
    let performed = Arc::new(AtomicI64::new(0));
    let gate = Gate::new();
    let calls: Vec<_> = (0..CALLS)
        .map(|_| {
            let (pool, performed, gate) = (pool.clone(), performed.clone(), gate.clone());
            tokio::spawn(async move {
                let options = waiting(PATIENCE);
                options
                    .run(&pool, &key("a"), "body", async |conn| -> Result<i64, Error> {
                        let id = leave_effect(conn, "effect").await?;
                        let number = performed.fetch_add(1, Ordering::SeqCst);
                        if number == 0 {
                            gate.pass().await;
                        }
                        if number < FAILURES { Err(Error::Database(sqlx::Error::RowNotFound)) } else { Ok(id) }
                    })
                    .await
            })
        })
        .collect();
    gate.reached().await;
    until_blocked(&pool, CALLS - 1).await?;
    gate.open();
    let (mut first, mut replayed, mut failed) = (0, 0, 0);
    for call in calls {
        match call.await? {
            Ok(Outcome::Performed(_)) => first += 1,
            Ok(Outcome::Replayed(_)) => replayed += 1,
            Err(Error::Database(sqlx::Error::RowNotFound)) => failed += 1,
            Err(error) => return Err(error.into()),
        }
    }
    assert_eq!((first, replayed, failed), (1, CALLS - FAILURES - 1, FAILURES));
    assert_eq!(effects(&pool).await, 1);
    let claims: i64 = sqlx::query_scalar("select last_value from claims").fetch_one(&pool).await?;
    let wins = FAILURES + 1;
    assert!(claims <= CALLS + wins + 10, "{claims} claims by {CALLS} calls with {wins} wins");
    pool.close().await;
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn of_many_who_take_over_behind_an_owner_one_wins(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = wide_pool(&options, 32).await;
    create_effects(&pool).await;
    for owner_commits in [false, true] {
        sqlx::raw_sql("truncate idempotency.record, effect").execute(&pool).await?;
        let _ = once(&pool, &key("a"), "body").await?;
        sqlx::query("update idempotency.record set expires_at = clock_timestamp()").execute(&pool).await?;
        let first = owner(&pool, "a").await;
        let takers: Vec<_> = (0..25)
            .map(|_| {
                let pool = pool.clone();
                tokio::spawn(async move { once(&pool, &key("a"), "body").await })
            })
            .collect();
        until_blocked(&pool, 25).await?;
        let mut tx = pool.begin().await?;
        let rejected = replays(&mut tx, rejecting(), "a").await.expect_err("somebody takes it over");
        assert!(matches!(rejected, Error::InFlight { .. }), "{rejected:?}");
        assert_eq!(locks(&mut tx).await, 0);
        tx.rollback().await?;
        if owner_commits {
            first.commit().await?
        } else {
            first.rollback().await?
        }
        let mut performed = 0;
        for taker in takers {
            performed += u32::from(!taker.await??.is_replayed());
        }
        assert_eq!(performed, u32::from(!owner_commits));
        assert_eq!(effects(&pool).await, 2, "the one that has expired, and one more");
    }
    pool.close().await;
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn no_claim_waits_for_an_uncommitted_update_or_delete_of_the_record(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("a"), "body").await?;
    for statement in ["delete from idempotency.record", "update idempotency.record set last_error = 'x'"] {
        for (options, expired) in [(Idempotency::new(), false), (rejecting(), false), (rejecting(), true)] {
            let mut other = pool.begin().await?;
            if expired {
                sqlx::query("update idempotency.record set expires_at = clock_timestamp()").execute(&pool).await?;
            }
            other.execute(statement).await?;
            let mut tx = pool.begin().await?;
            let answer = timeout(PATIENCE, replays(&mut tx, options, "a")).await?;
            if expired {
                assert!(matches!(answer, Err(Error::InFlight { .. })), "{statement}: {answer:?}");
                assert_eq!(setting(&mut tx, "lock_timeout").await, "0", "the transaction is usable");
            } else {
                assert!(answer?, "{statement}: what is committed is replayed");
            }
            other.rollback().await?;
            sqlx::query("update idempotency.record set expires_at = now() + interval '1 h'").execute(&pool).await?;
        }
    }
    Ok(())
}

/// Such a wait is for a row, and a sweep's transaction is short.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_take_over_that_may_wait_waits_for_the_sweep(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("a"), "body").await?;
    sqlx::query("update idempotency.record set expires_at = clock_timestamp()").execute(&pool).await?;
    let mut sweep = pool.begin().await?;
    sweep.execute("delete from idempotency.record").await?;
    let taker = tokio::spawn({
        let pool = pool.clone();
        async move { once(&pool, &key("a"), "body").await }
    });
    until_blocked(&pool, 1).await?;
    sweep.commit().await?;
    assert!(!taker.await??.is_replayed());
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn above_read_committed_a_wait_ends_in_a_win_or_a_serialization_failure(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for level in ["begin isolation level repeatable read", "begin isolation level serializable"] {
        for commits in [false, true] {
            let value = format!("{level} {commits}");
            let first = owner(&pool, &value).await;
            let duplicate = tokio::spawn({
                let (mut conn, value) = (connect(&pool).await, value.clone());
                async move {
                    let mut tx = conn.begin_with(level).await?;
                    let replayed = replays(&mut tx, Idempotency::new(), &value).await?;
                    tx.commit().await?;
                    Ok::<_, Error>(replayed)
                }
            });
            until_blocked(&pool, 1).await?;
            if commits {
                first.commit().await?
            } else {
                first.rollback().await?
            }
            match timeout(PATIENCE, duplicate).await?? {
                Ok(replayed) => assert!(!commits && !replayed, "{value}"),
                Err(Error::Retryable(_)) => assert!(commits, "{value}"),
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_prepared_transaction_holds_its_key_until_it_ends(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for commits in [true, false] {
        let value = commits.to_string();
        let mut first = owner(&pool, &value).await;
        first.execute(sqlx::AssertSqlSafe(format!("prepare transaction 'claims {value}'"))).await?;
        drop(first);
        for options in [rejecting(), waiting(Duration::from_millis(30))] {
            let mut tx = pool.begin().await?;
            let error = replays(&mut tx, options, &value).await.expect_err("it has not ended");
            assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
            assert_eq!(locks(&mut tx).await, 0, "the transaction is usable");
        }
        let mut conn = connect(&pool).await;
        let end = if commits { "commit" } else { "rollback" };
        conn.execute(sqlx::AssertSqlSafe(format!("{end} prepared 'claims {value}'"))).await?;
        let mut tx = pool.begin().await?;
        assert_eq!(replays(&mut tx, rejecting(), &value).await?, commits);
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_missing_function_is_a_missing_schema(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    sqlx::raw_sql("drop function idempotency.await_key").execute(&pool).await?;
    let first = owner(&pool, "a").await;
    let error = once(&pool, &key("a"), "body").await.expect_err("no function");
    assert!(matches!(error, Error::SchemaMissing { .. }), "{error:?}");
    first.rollback().await?;
    assert!(!once(&pool, &key("a"), "body").await?.is_replayed(), "a claim that does not wait does not need it");
    Ok(())
}

/// Objects of that name, earlier in the path, must not decide anything.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_hostile_search_path_changes_nothing(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let observer = PgPool::connect_with(options.clone()).await?;
    create_effects(&observer).await;
    sqlx::raw_sql(
        "create schema evil;
         create function evil.now() returns timestamptz language sql as 'select timestamptz ''2000-01-01''';
         create function evil.statement_timestamp() returns timestamptz language sql as 'select timestamptz ''2000-01-01''';
         create function evil.pg_try_advisory_xact_lock(int8) returns bool language sql as 'select true';
         create function evil.pg_advisory_xact_lock(int8) returns void language sql as '';
         create function evil.current_setting(text) returns text language sql as 'select ''evil''';
         create function evil.set_config(text, text, bool) returns text language sql as 'select ''evil''';
         create function evil.pg_current_xact_id_if_assigned() returns xid8 language sql as 'select null::xid8'",
    )
    .execute(&observer)
    .await?;
    let options = options.options([("search_path", "evil, pg_catalog, public")]);
    let pool = PgPoolOptions::new().max_connections(3).connect_with(options).await?;
    for (number, way) in crate::support::WAYS.into_iter().enumerate() {
        let value = number.to_string();
        let run = async || {
            way.run(&pool, &key(&value), "body", async |conn: &mut PgConnection| leave_effect(conn, "effect").await)
                .await
        };
        assert!(!run().await?.is_replayed(), "{way:?}");
        assert!(run().await?.is_replayed(), "{way:?}");
        let keys = [key(&format!("{number} a")), key(&format!("{number} b"))];
        let mut tx = pool.begin().await?;
        let marked = pg_idempotency::dedup::mark_many(&mut tx, &keys, Duration::from_secs(60)).await?;
        assert_eq!(marked, [pg_idempotency::dedup::Marked::First; 2]);
        tx.commit().await?;
    }
    let expired: i64 = sqlx::query_scalar(
        "select count(*) from idempotency.record where expires_at < now() or claimed_at < '2001-01-01'",
    )
    .fetch_one(&observer)
    .await?;
    assert_eq!(expired, 0);
    let first = owner(&observer, "waited for").await;
    let error = waiting(Duration::from_millis(30))
        .run(&pool, &key("waited for"), "body", async |conn: &mut PgConnection| leave_effect(conn, "no").await)
        .await
        .expect_err("in flight");
    assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    first.rollback().await?;
    Ok(())
}
