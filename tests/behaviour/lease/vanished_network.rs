//! A network that vanishes after the claim: nothing is refused and nothing is answered, and TCP takes a quarter of an
//! hour to notice.

use std::time::Duration;

use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::testing::lapse;
use pg_idempotency::{Error, Outcome};
use rig::gate::PATIENCE;
use rig::proxy::Proxy;
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::time::timeout;

use crate::lease::leases::{WorkError, acquired};
use crate::support::{key, until, wide_pool};

/// Long enough for a claim on a busy machine.
const LEASE: Duration = Duration::from_secs(3);
const AT_LEAST_ONCE: Policy = Policy::AtLeastOnce { lease: LEASE };
const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: LEASE };

/// Through a network, with a pool that would wait for hours.
async fn behind(server: &PgConnectOptions) -> anyhow::Result<(Proxy, PgPool)> {
    let proxy = Proxy::before(server).await?;
    let pool = PgPoolOptions::new().max_connections(2).acquire_timeout(PATIENCE * 100);
    let pool = pool.connect_with(proxy.options.clone()).await?;
    Ok((proxy, pool))
}

async fn fail_when_it_vanishes(server: &PgConnectOptions, policy: Policy, name: &str) -> anyhow::Result<()> {
    let (proxy, pool) = behind(server).await?;
    let leasing = LeaseOptions::new(policy);
    let key = key(name);
    let call = leasing.run(&pool, &key, "body", async |_| -> Result<i64, WorkError> {
        proxy.vanish();
        Err(WorkError::Gateway)
    });
    let error = timeout(PATIENCE, call).await.expect("within the lease, more or less").expect_err("the work fails");
    assert!(matches!(error, WorkError::Gateway), "{error:?}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_of_the_work_comes_back_within_the_lease(
    _: PgPoolOptions,
    server: PgConnectOptions,
) -> anyhow::Result<()> {
    tokio::try_join!(
        fail_when_it_vanishes(&server, AT_LEAST_ONCE, "at least once"),
        fail_when_it_vanishes(&server, AT_MOST_ONCE, "at most once"),
    )?;
    // Lapsing says what the release could not.
    let pool = wide_pool(&server, 2).await;
    for name in ["at least once", "at most once"] {
        lapse(&pool, &key(name)).await?;
    }
    let again = async |policy, name| {
        LeaseOptions::new(policy).run(&pool, &key(name), "body", async |_| Ok::<_, Error>(7)).await
    };
    assert_eq!(again(AT_LEAST_ONCE, "at least once").await?, Outcome::Performed(7));
    let error = again(AT_MOST_ONCE, "at most once").await.expect_err("nobody could say what became of it");
    assert!(matches!(error, Error::Indeterminate { .. }), "{error:?}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_release_gives_up_within_the_lease(_: PgPoolOptions, server: PgConnectOptions) -> anyhow::Result<()> {
    let (proxy, pool) = behind(&server).await?;
    let lease = acquired(&pool, AT_MOST_ONCE).await;
    proxy.vanish();
    let error = timeout(PATIENCE, lease.release("the gateway is away")).await.expect("within the lease, more or less");
    assert!(error.as_ref().is_err_and(Error::is_transient), "{error:?}");
    Ok(())
}

/// One dead connection in the pool, which no packet has announced, costs one try of the renewal, and not the lease.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_vanished_connection_of_the_pool_does_not_cost_the_lease(
    _: PgPoolOptions,
    server: PgConnectOptions,
) -> anyhow::Result<()> {
    let (proxy, pool) = behind(&server).await?;
    let observer = wide_pool(&server, 1).await;
    // On a busy machine the tries that are left may be too short, so only the third lost lease is a failure.
    for value in ["a", "b", "c"] {
        let policy = Policy::AtLeastOnce { lease: Duration::from_secs(9) };
        let outcome = LeaseOptions::new(policy)
            .run(&pool, &key(value), "body", async |_| -> Result<i64, Error> {
                // The claim's connection returns to the pool in a task of sqlx.
                while pool.num_idle() == 0 {
                    tokio::task::yield_now().await;
                }
                proxy.lose_connections();
                let renewed = "select bool_or(lease_until > claimed_at + interval '9.1 s') from idempotency.record";
                until(&observer, renewed).await;
                Ok(7)
            })
            .await;
        match outcome {
            Ok(outcome) => {
                assert_eq!(outcome, Outcome::Performed(7));
                return Ok(());
            }
            Err(error) => assert!(matches!(error, Error::LeaseLost), "{error:?}"),
        }
    }
    panic!("a heartbeat waited for a dead connection until the lease was lost");
}
