//! A concurrent duplicate: the owner commits, rolls back, is killed; the caller waits or is told.

use std::time::{Duration, Instant};

use pg_idempotency::testing::{Gate, backend, kill_backend, until_blocked};
use pg_idempotency::{Error, Idempotency, InFlight, Outcome, ensure_idempotent};
use sqlx::Connection as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{PgConnection, PgPool};
use tokio::task::JoinHandle;

use crate::support::{
    WAYS, clear, connect, create_effects, create_open_effects, effects, key, leave_effect, once, rejecting, setting,
    waiting, wide_pool,
};

/// An owner in a task of its own: it stops behind its effect, and fails if it is told to.
fn owner(mut conn: PgConnection, gate: &Gate, fails: bool) -> JoinHandle<Result<Outcome<i64>, Error>> {
    let gate = gate.clone();
    tokio::spawn(async move {
        let mut tx = conn.begin().await?;
        let outcome = ensure_idempotent(&mut tx, &key("a"), "body", async |conn| {
            let id = leave_effect(conn, "owner").await?;
            gate.pass().await;
            if fails { Err(Error::Database(sqlx::Error::RowNotFound)) } else { Ok(id) }
        })
        .await;
        match outcome {
            Ok(_) => tx.commit().await?,
            Err(_) => tx.rollback().await?,
        }
        outcome
    })
}

fn duplicate(pool: &PgPool, options: Idempotency) -> JoinHandle<Result<Outcome<i64>, Error>> {
    let pool = pool.clone();
    tokio::spawn(async move {
        options.run(&pool, &key("a"), "body", async |conn| leave_effect(conn, "duplicate").await).await
    })
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_waiting_duplicate_replays_when_the_owner_commits(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for way in WAYS {
        clear(&pool).await;
        let gate = Gate::new();
        let owner = owner(connect(&pool).await, &gate, false);
        gate.reached().await;
        let duplicate = duplicate(&pool, way);
        until_blocked(&pool, 1).await?;
        gate.open();
        let first = owner.await??.into_inner();
        assert!(matches!(duplicate.await??, Outcome::Replayed(id) if id == first));
        assert_eq!(effects(&pool).await, 1);
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_waiting_duplicate_performs_when_the_owner_rolls_back(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for way in WAYS {
        clear(&pool).await;
        let gate = Gate::new();
        let owner = owner(connect(&pool).await, &gate, true);
        gate.reached().await;
        let duplicate = duplicate(&pool, way);
        until_blocked(&pool, 1).await?;
        gate.open();
        owner.await?.expect_err("the owner fails");
        assert!(!duplicate.await??.is_replayed());
        assert_eq!(effects(&pool).await, 1);
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_waiting_duplicate_performs_when_the_owner_is_killed(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for way in WAYS {
        clear(&pool).await;
        let gate = Gate::new();
        let mut conn = connect(&pool).await;
        let pid = backend(&mut conn).await?;
        let owner = owner(conn, &gate, false);
        gate.reached().await;
        let duplicate = duplicate(&pool, way);
        until_blocked(&pool, 1).await?;
        kill_backend(&pool, pid).await?;
        assert!(!duplicate.await??.is_replayed());
        gate.open();
        let error = owner.await?.expect_err("the owner was killed");
        assert!(matches!(error, Error::Database(_)), "{error:?}");
        assert_eq!(effects(&pool).await, 1);
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_wait_ends_at_its_limit(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for way in WAYS {
        clear(&pool).await;
        let gate = Gate::new();
        let owner = owner(connect(&pool).await, &gate, false);
        gate.reached().await;
        let limit = Duration::from_millis(300);
        let started = Instant::now();
        let error = duplicate(&pool, way.with_in_flight(InFlight::Wait(limit))?).await?.expect_err("in flight");
        assert!(matches!(error, Error::InFlight { retry_after, .. } if retry_after > Duration::ZERO), "{error:?}");
        assert!(started.elapsed() >= limit, "{:?}", started.elapsed());
        assert!(started.elapsed() < limit + Duration::from_secs(2), "{:?}", started.elapsed());
        gate.open();
        let _ = owner.await??;
        assert!(once(&pool, &key("a"), "body").await?.is_replayed());
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn reject_answers_at_once_and_leaves_the_transaction_usable(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    let gate = Gate::new();
    let owner = owner(connect(&pool).await, &gate, false);
    gate.reached().await;

    let mut tx = pool.begin().await?;
    let error = rejecting()
        .ensure(&mut tx, &key("a"), "body", async |conn| leave_effect(conn, "duplicate").await)
        .await
        .expect_err("in flight");
    assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    leave_effect(&mut tx, "after").await?;
    tx.commit().await?;

    gate.open();
    let _ = owner.await??;
    assert_eq!(effects(&pool).await, 2);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn reject_answers_at_once_where_the_transaction_is_the_crates(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let gate = Gate::new();
    let owner = owner(connect(&pool).await, &gate, false);
    gate.reached().await;
    for way in WAYS {
        let error = duplicate(&pool, way.with_in_flight(InFlight::Reject)?).await?.expect_err("in flight");
        assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    }
    gate.open();
    let _ = owner.await??;
    assert_eq!(effects(&pool).await, 1);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn reject_performs_and_replays_like_wait(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for way in WAYS {
        clear(&pool).await;
        for replayed in [false, true] {
            let outcome = way
                .with_in_flight(InFlight::Reject)?
                .run(&pool, &key("a"), "body", async |conn| leave_effect(conn, "effect").await)
                .await?;
            assert_eq!(outcome.is_replayed(), replayed);
        }
        let error = way
            .with_in_flight(InFlight::Reject)?
            .run(&pool, &key("a"), "other", async |conn| leave_effect(conn, "effect").await)
            .await
            .expect_err("key reused");
        assert!(matches!(error, Error::KeyReused { .. }), "{error:?}");
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn reject_replays_beside_an_open_transaction_that_replayed(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("a"), "body").await?;
    let mut replayer = pool.begin().await?;
    let outcome =
        rejecting().ensure(&mut replayer, &key("a"), "body", async |conn| leave_effect(conn, "no").await).await?;
    assert!(outcome.is_replayed());
    let outcome = rejecting().run(&pool, &key("a"), "body", async |conn| leave_effect(conn, "no").await).await?;
    assert!(outcome.is_replayed());
    Ok(())
}

/// The winner had to wait for the lock's holder; it must hold the lock itself when it performs, or Reject would not see
/// it.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn reject_sees_an_owner_who_won_after_waiting(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let (first_gate, second_gate) = (Gate::new(), Gate::new());
    let first = owner(connect(&pool).await, &first_gate, true);
    first_gate.reached().await;
    let second = owner(connect(&pool).await, &second_gate, false);
    until_blocked(&pool, 1).await?;
    first_gate.open();
    first.await?.expect_err("the first owner fails");
    second_gate.reached().await;

    let mut tx = pool.begin().await?;
    let error = rejecting()
        .ensure(&mut tx, &key("a"), "body", async |conn| leave_effect(conn, "duplicate").await)
        .await
        .expect_err("in flight");
    assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    assert_eq!(setting(&mut tx, "lock_timeout").await, "0", "the transaction is usable, the setting is back");
    second_gate.open();
    let _ = second.await??;
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_callers_lock_timeout_is_back_after_a_win_a_loss_and_a_rejection(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for options in [Idempotency::new(), rejecting()] {
        let key = key(&format!("{options:?}").chars().take(200).collect::<String>());
        for replayed in [false, true] {
            let mut tx = pool.begin().await?;
            sqlx::query("set local lock_timeout = '7min'").execute(&mut *tx).await?;
            let outcome = options
                .ensure(&mut tx, &key, "body", async |conn| -> Result<_, Error> {
                    assert_eq!(setting(conn, "lock_timeout").await, "7min", "inside perform");
                    leave_effect(conn, "effect").await
                })
                .await?;
            assert_eq!(outcome.is_replayed(), replayed);
            assert_eq!(setting(&mut tx, "lock_timeout").await, "7min", "{options:?}, replayed: {replayed}");
            tx.commit().await?;
        }
        let mut tx = pool.begin().await?;
        sqlx::query("set local lock_timeout = '7min'").execute(&mut *tx).await?;
        options
            .ensure(&mut tx, &key, "other", async |conn| leave_effect(conn, "effect").await)
            .await
            .expect_err("key reused");
        assert_eq!(setting(&mut tx, "lock_timeout").await, "7min", "{options:?}, key reused");
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_statement_timeout_of_the_callers_stays_his_error(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let gate = Gate::new();
    let owner = owner(connect(&pool).await, &gate, false);
    gate.reached().await;
    let mut tx = pool.begin().await?;
    sqlx::query("set local statement_timeout = '20ms'").execute(&mut *tx).await?;
    let error = ensure_idempotent(&mut tx, &key("a"), "body", async |conn| leave_effect(conn, "duplicate").await)
        .await
        .expect_err("his own limit");
    let Error::Database(sqlx::Error::Database(error)) = error else { panic!("{error:?}") };
    assert_eq!(error.code().as_deref(), Some("57014"));
    tx.rollback().await?;
    gate.open();
    let _ = owner.await??;
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn waiting_and_rejecting_hold_under_generic_and_custom_plans(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let gate = Gate::new();
    let owner = owner(connect(&pool).await, &gate, false);
    gate.reached().await;
    for plan in ["force_generic_plan", "force_custom_plan"] {
        let mut tx = pool.begin().await?;
        sqlx::query("select set_config('plan_cache_mode', $1, true)").bind(plan).execute(&mut *tx).await?;
        let error = waiting(Duration::from_millis(50))
            .ensure(&mut tx, &key("a"), "body", async |conn| leave_effect(conn, "duplicate").await)
            .await
            .expect_err("in flight");
        assert!(matches!(error, Error::InFlight { .. }), "{plan}: {error:?}");
        tx.rollback().await?;

        let mut tx = pool.begin().await?;
        sqlx::query("select set_config('plan_cache_mode', $1, true)").bind(plan).execute(&mut *tx).await?;
        let error = rejecting()
            .ensure(&mut tx, &key("a"), "body", async |conn| leave_effect(conn, "duplicate").await)
            .await
            .expect_err("in flight");
        assert!(matches!(error, Error::InFlight { .. }), "{plan}: {error:?}");
        assert_eq!(setting(&mut tx, "lock_timeout").await, "0", "{plan}");
        let outcome = waiting(Duration::from_millis(50))
            .ensure(&mut tx, &key(plan), "body", async |conn| leave_effect(conn, "other key").await)
            .await?;
        assert!(!outcome.is_replayed());
        assert_eq!(setting(&mut tx, "lock_timeout").await, "0", "{plan}");
    }
    gate.open();
    let _ = owner.await??;
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_storm_on_one_key_performs_once(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = wide_pool(&options, 32).await;
    create_effects(&pool).await;
    let calls: Vec<_> = (0..200).map(|_| duplicate(&pool, Idempotency::new())).collect();
    let mut performed = 0;
    for call in calls {
        performed += u32::from(!call.await??.is_replayed());
    }
    assert_eq!(performed, 1);
    assert_eq!(effects(&pool).await, 1);
    pool.close().await;
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn two_keys_in_opposite_order_are_a_retryable_deadlock(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let gate = Gate::new();
    let claim_both = |first: &'static str, second: &'static str| {
        let (pool, gate) = (pool.clone(), gate.clone());
        tokio::spawn(async move {
            let mut tx = pool.begin().await?;
            let _ =
                ensure_idempotent(&mut tx, &key(first), "body", async |conn| leave_effect(conn, first).await).await?;
            gate.pass().await;
            let _ =
                ensure_idempotent(&mut tx, &key(second), "body", async |conn| leave_effect(conn, second).await).await?;
            tx.commit().await?;
            Ok::<_, Error>(())
        })
    };
    let (one, two) = (claim_both("a", "b"), claim_both("b", "a"));
    gate.reached().await;
    gate.reached().await;
    gate.open();
    gate.open();
    let results = [one.await?, two.await?];
    let errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    assert!(matches!(errors[..], [Error::Retryable(_)]), "{errors:?}");
    assert_eq!(effects(&pool).await, 2);
    Ok(())
}
