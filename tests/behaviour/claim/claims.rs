//! Claims and waits where the interleavings cannot see them: limits in real time, drops at every poll, herds of waiting
//! calls, two keys, a clock that jumps, and other plans.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use pg_idempotency::{Error, Idempotency, Outcome, ensure_idempotent};
use rig::database::until_blocked;
use rig::gate::{Gate, cancel_after};
use sqlx::{Executor as _, PgConnection, PgPool};

use crate::support::{
    create_effects, create_open_effects, effects, key, leave_effect, once, pool_of, rejecting, setting, waiting,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// The advisory locks that this connection's transaction holds.
async fn locks(conn: &mut PgConnection) -> i64 {
    sqlx::query_scalar("select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()")
        .fetch_one(conn)
        .await
        .expect("a count")
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

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
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
        let started = Instant::now();
        let error = replays(&mut tx, waiting(limit), "a").await.expect_err("in flight");
        assert!(
            matches!(error, Error::InFlight { retry_after, .. } if retry_after > Duration::ZERO),
            "{callers}: {error:?}"
        );
        // The shortest limit that the rows have, but for a millisecond.
        let shortest = limit.min(Duration::from_millis(10));
        assert!((shortest..limit.min(short) + Duration::from_secs(30)).contains(&started.elapsed()), "{callers}");
        assert_eq!(setting(&mut tx, "lock_timeout").await, callers, "{limit:?}");
        assert_eq!(locks(&mut tx).await, 0, "{callers}");
        assert!(!replays(&mut tx, waiting(limit), "of another key").await?, "the transaction is usable");
        tx.rollback().await?;
    }
    first.rollback().await?;
    assert_eq!(effects(&pool).await, 0);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_wait_can_be_dropped_at_every_poll(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
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

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_statement_timeout_of_the_caller_stays_their_error(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let first = owner(&pool, "a").await;
    let mut tx = pool.begin().await?;
    tx.execute("set local statement_timeout = '20ms'").await?;
    let error = replays(&mut tx, Idempotency::new(), "a").await.expect_err("their own limit");
    let Error::Database(sqlx::Error::Database(error)) = error else { panic!("{error:?}") };
    assert_eq!(error.code().as_deref(), Some("57014"));
    first.rollback().await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn no_answer_but_performed_holds_a_lock_under_any_plan(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("done"), "body").await?;
    let first = owner(&pool, "a").await;
    for plan in ["force_generic_plan", "force_custom_plan"] {
        for options in [rejecting(), waiting(Duration::from_millis(50))] {
            let mut tx = pool.begin().await?;
            sqlx::query("select set_config('plan_cache_mode', $1, true)").bind(plan).execute(&mut *tx).await?;
            let error = replays(&mut tx, options, "a").await.expect_err("in flight");
            assert!(matches!(error, Error::InFlight { .. }), "{plan}: {error:?}");
            assert!(replays(&mut tx, options, "done").await?, "{plan}");
            let reused = options.ensure(&mut tx, &key("done"), "other", async |_| Ok::<i64, Error>(1)).await;
            assert!(matches!(reused, Err(Error::KeyReused { .. })), "{plan}: {reused:?}");
            assert_eq!(locks(&mut tx).await, 0, "{plan}");
            assert!(!replays(&mut tx, options, "of another key").await?, "{plan}: the transaction is usable");
            assert_eq!(setting(&mut tx, "lock_timeout").await, "0", "{plan}");
            tx.rollback().await?;
        }
    }
    first.rollback().await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn two_keys_in_opposite_order_are_a_retryable_deadlock(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let both_have_one = Arc::new(tokio::sync::Barrier::new(2));
    let claim_both = |first: &'static str, second: &'static str| {
        let (pool, both_have_one) = (pool.clone(), both_have_one.clone());
        tokio::spawn(async move {
            let mut tx = owner(&pool, first).await;
            both_have_one.wait().await;
            let _ = replays(&mut tx, Idempotency::new(), second).await?;
            tx.commit().await?;
            Ok::<_, Error>(())
        })
    };
    let (one, two) = (claim_both("a", "b"), claim_both("b", "a"));
    let errors: Vec<_> = [one.await?, two.await?].into_iter().filter_map(Result::err).collect();
    assert!(matches!(errors[..], [Error::Retryable(_)]), "{errors:?}");
    assert_eq!(effects(&pool).await, 2);
    Ok(())
}

/// 120 calls of one key, of which the first 20 to perform fail. After each failure one other call claims, and no call
/// starves. A trigger counts the claims: a sequence is not rolled back.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn of_many_waiting_calls_one_claims_when_an_owner_rolls_back(pool: PgPool) -> anyhow::Result<()> {
    const CALLS: i64 = 120;
    const FAILURES: i64 = 20;
    let pool = pool_of(122, &pool.connect_options()).await;
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
                waiting(PATIENCE)
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

/// A call that may wait asks again for a row that a sweep has locked, until its limit, and never waits for the row
/// itself.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_wait_for_a_locked_row_ends_at_its_limit(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("a"), "body").await?;
    sqlx::query("update idempotency.record set expires_at = statement_timestamp()").execute(&pool).await?;
    let mut sweep = pool.begin().await?;
    sweep.execute("delete from idempotency.record").await?;

    let mut tx = pool.begin().await?;
    let error = replays(&mut tx, waiting(Duration::from_millis(100)), "a").await.expect_err("it is being deleted");
    assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    assert_eq!(setting(&mut tx, "lock_timeout").await, "0", "the transaction is usable");
    Ok(())
}

/// A clock that has jumped back since the call asked must not end a record before its time.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_time_of_asking_ahead_of_the_clock_ends_nothing_that_is_live(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("a"), "body").await?;
    let mut tx = pool.begin().await?;
    let wait =
        "select idempotency.await_key('tenant', 'operation', 'a', 1, 1000, now() + interval '48 h', 'transaction')";
    let answer: String = sqlx::query_scalar(wait).fetch_one(&mut *tx).await?;
    assert_eq!((answer.as_str(), locks(&mut tx).await), ("look", 0), "it cannot be taken over");
    sqlx::query("update idempotency.record set expires_at = statement_timestamp()").execute(&pool).await?;
    let answer: String = sqlx::query_scalar(wait).fetch_one(&mut *tx).await?;
    assert_eq!((answer.as_str(), locks(&mut tx).await), ("look", 1), "it can, and by one");
    Ok(())
}
