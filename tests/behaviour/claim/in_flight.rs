//! Concurrent duplicates where the interleavings cannot see them: limits in real time, plans, a storm, two keys.

use std::time::{Duration, Instant};

use pg_idempotency::testing::Gate;
use pg_idempotency::{Error, Idempotency, InFlight, Outcome, ensure_idempotent};
use sqlx::Connection as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{PgConnection, PgPool};
use tokio::task::JoinHandle;

use crate::support::{
    WAYS, clear, connect, create_effects, effects, key, leave_effect, once, rejecting, setting, waiting, wide_pool,
};

/// An owner in a task of its own. It stops behind its effect, and fails if `fails`.
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
async fn a_statement_timeout_of_the_callers_stays_their_error(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let gate = Gate::new();
    let owner = owner(connect(&pool).await, &gate, false);
    gate.reached().await;
    let mut tx = pool.begin().await?;
    sqlx::query("set local statement_timeout = '20ms'").execute(&mut *tx).await?;
    let error = ensure_idempotent(&mut tx, &key("a"), "body", async |conn| leave_effect(conn, "duplicate").await)
        .await
        .expect_err("their own limit");
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
