//! Renewal: a lease lives as long as its owner works and can say so, and its owner stops before it lapses.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions, Policy};
use pg_idempotency::{Error, Outcome};
use sqlx::{Executor as _, PgPool};

use crate::support::{janitor, key, pool_of, recorded, until};

/// Short, since these tests wait for real renewals.
const LEASE: Duration = Duration::from_millis(1_500);
const POLICY: Policy = Policy::AtMostOnce { lease: LEASE };

/// Until the claim has been renewed well past its first end: the database's clock decides.
async fn outlive(pool: &PgPool) {
    until(pool, "select clock_timestamp() > claimed_at + interval '5 s' from idempotency.record").await;
}

/// A heartbeat changes no indexed column, so it stays a heap-only update where its page has room.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn heartbeats_are_heap_only_updates(pool: PgPool) -> anyhow::Result<()> {
    let outcome = LeaseOptions::new(POLICY)
        .run(&pool, &key("a"), "body", async |_| {
            outlive(&pool).await;
            Ok::<_, Error>(())
        })
        .await?;
    assert_eq!(outcome, Outcome::Performed(()));
    pool.close().await;
    let pool = pool_of(1, &pool.connect_options()).await;
    // Only the completion sets `expires_at`, which is indexed.
    until(
        &pool,
        "select n_tup_upd >= 8 and n_tup_hot_upd = n_tup_upd - 1 from pg_stat_user_tables
         where schemaname = 'idempotency' and relname = 'record'",
    )
    .await;
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn a_lease_and_a_retention_that_would_end_under_the_work_are_prolonged(pool: PgPool) -> anyhow::Result<()> {
    let leasing = LeaseOptions::new(POLICY).retention(LEASE * 2);
    let outcome = leasing
        .run(&pool, &key("a"), "body", async |_| {
            outlive(&pool).await;
            let live = "select lease_until > clock_timestamp() from idempotency.record";
            assert!(sqlx::query_scalar::<_, bool>(live).fetch_one(&pool).await.map_err(Error::from)?);
            assert_eq!(janitor(&pool).sweep_once(10).await?.rows(), 0);
            Ok::<_, Error>(())
        })
        .await?;
    assert_eq!(outcome, Outcome::Performed(()));
    Ok(())
}

/// A worker that dies when its work has outlived the retention: at most once must not do it again at the moment it
/// lapses.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn a_claim_that_lapses_is_remembered_for_another_lease(pool: PgPool) -> anyhow::Result<()> {
    let leasing = LeaseOptions::new(POLICY).retention(LEASE * 2);
    let Acquired::Owner(lease) = leasing.acquire::<i64, _>(&pool, &key("a"), "body").await? else { panic!() };
    outlive(&pool).await;
    drop(lease);
    let protected: bool = recorded(&pool, "expires_at >= lease_until + interval '1400 ms'").await;
    assert!(protected);
    until(&pool, "select clock_timestamp() > lease_until from idempotency.record").await;
    let error = leasing.acquire::<i64, _>(&pool, &key("a"), "body").await.expect_err("not done again");
    assert!(matches!(error, Error::Indeterminate { .. }), "{error:?}");
    Ok(())
}

/// A leaked transaction of other code in the pool must cost neither the lease nor the result.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn leases_close_a_connection_with_a_transaction_on_it(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(1, &pool.connect_options()).await;
    let leak = async || pool.acquire().await?.execute("begin").await.map(drop);
    leak().await?;
    let Acquired::Owner(lease) = LeaseOptions::new(POLICY).acquire::<String, _>(&pool, &key("a"), "body").await? else {
        panic!()
    };
    leak().await?;
    outlive(&pool).await;
    assert!(!lease.is_lost() && lease.remaining() > Duration::ZERO);
    leak().await?;
    lease.complete(&"done".to_owned()).await?;
    leak().await?;
    assert_eq!(janitor(&pool).sweep_once(10).await?.rows(), 0);
    Ok(())
}

/// A heartbeat without the token would prolong the next owner's claim, and the first owner would never learn that the
/// claim is lost.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn work_that_was_overtaken_stops_and_prolongs_nothing(pool: PgPool) -> anyhow::Result<()> {
    let error = LeaseOptions::new(POLICY)
        .run(&pool, &key("a"), "body", async |_| {
            // What a take-over does, with an end that can be told apart.
            pool.execute("update idempotency.record set token = token + 1, lease_until = now() + interval '1 hour'")
                .await?;
            std::future::pending::<()>().await;
            Ok::<_, Error>(())
        })
        .await
        .expect_err("lost");
    assert!(matches!(error, Error::LeaseLost), "{error:?}");
    let untouched: bool = recorded(&pool, "lease_until > now() + interval '59 minutes'").await;
    assert!(untouched);
    Ok(())
}

/// No connection to be had: the owner stops by its own clock, and before the database's ends the lease.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn an_owner_without_a_connection_stops_before_its_lease_lapses(observer: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(1, &observer.connect_options()).await;
    // A busy machine may stop this process at the deadline, so only the third lease that has lapsed by then is a
    // failure.
    for value in ["a", "b", "c"] {
        let error = LeaseOptions::new(POLICY)
            .run(&pool, &key(value), "body", async |_| {
                let _held = pool.acquire().await?;
                std::future::pending::<()>().await;
                Ok::<_, Error>(())
            })
            .await
            .expect_err("lost");
        let live = "select lease_until > clock_timestamp() from idempotency.record where value = $1";
        let live: bool = sqlx::query_scalar(live).bind(value).fetch_one(&observer).await?;
        assert!(matches!(error, Error::LeaseLost), "{error:?}");
        if live {
            return Ok(());
        }
    }
    panic!("the owner's clock ran ahead of the database's");
}

/// A commit whose answer was lost: the second try finds the result stored under its own token, and says so.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn storing_the_same_result_twice_is_storing_it_once(pool: PgPool) -> anyhow::Result<()> {
    let Acquired::Owner(lease) = LeaseOptions::new(POLICY).acquire::<String, _>(&pool, &key("a"), "body").await? else {
        panic!()
    };
    pool.execute("update idempotency.record set completed_at = now(), lease_until = null, response_body = '\"done\"'")
        .await?;
    lease.complete(&"done".to_owned()).await?;
    Ok(())
}
