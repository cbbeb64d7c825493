//! A network that vanishes, or a connection of it: nothing is refused and nothing is answered, and TCP takes a quarter
//! of an hour to notice. A lease ends in its time, the loops take their error path, a shutdown gets through, and new
//! connections are used.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use pg_idempotency::lease::{Lease, LeaseOptions, Policy, Resumer};
use pg_idempotency::testing::lapse;
use pg_idempotency::{Error, Janitor, Outcome};
use rig::gate::PATIENCE;
use rig::lease::owner;
use rig::proxy::Proxy;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::lease::leases::{WorkError, acquired};
use crate::support::{key, until};

async fn behind(direct: &PgPool, pool: PgPoolOptions) -> anyhow::Result<(Proxy, PgPool)> {
    let proxy = Proxy::before(&direct.connect_options()).await?;
    let pool = pool.connect_with(proxy.options.clone()).await?;
    Ok((proxy, pool))
}

/// Would wait for hours.
fn patient() -> PgPoolOptions {
    PgPoolOptions::new().max_connections(2).acquire_timeout(PATIENCE * 100)
}

/// Has one place, which a connection that never answers would keep.
fn narrow() -> PgPoolOptions {
    PgPoolOptions::new().max_connections(1).acquire_timeout(PATIENCE).test_before_acquire(false)
}

/// Long enough for a claim on a busy machine.
const LEASE: Duration = Duration::from_secs(3);
const AT_LEAST_ONCE: Policy = Policy::AtLeastOnce { lease: LEASE };
const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: LEASE };

async fn fail_when_it_vanishes(direct: &PgPool, policy: Policy, name: &str) -> anyhow::Result<()> {
    let (proxy, pool) = behind(direct, patient()).await?;
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
async fn an_error_of_the_work_comes_back_within_the_lease(direct: PgPool) -> anyhow::Result<()> {
    tokio::try_join!(
        fail_when_it_vanishes(&direct, AT_LEAST_ONCE, "at least once"),
        fail_when_it_vanishes(&direct, AT_MOST_ONCE, "at most once"),
    )?;
    // Lapsing says what the release could not.
    for name in ["at least once", "at most once"] {
        lapse(&direct, &key(name)).await?;
    }
    let again = async |policy, name| {
        LeaseOptions::new(policy).run(&direct, &key(name), "body", async |_| Ok::<_, Error>(7)).await
    };
    assert_eq!(again(AT_LEAST_ONCE, "at least once").await?, Outcome::Performed(7));
    let error = again(AT_MOST_ONCE, "at most once").await.expect_err("nobody could say what became of it");
    assert!(matches!(error, Error::Indeterminate { .. }), "{error:?}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_release_gives_up_within_the_lease(direct: PgPool) -> anyhow::Result<()> {
    let (proxy, pool) = behind(&direct, patient()).await?;
    let lease = acquired(&pool, AT_MOST_ONCE).await;
    proxy.vanish();
    let error = timeout(PATIENCE, lease.release("the gateway is away")).await.expect("within the lease, more or less");
    assert!(error.as_ref().is_err_and(Error::is_transient), "{error:?}");
    Ok(())
}

/// One dead connection in the pool, which no packet has announced, costs one try of the renewal, and not the lease.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_vanished_connection_of_the_pool_does_not_cost_the_lease(direct: PgPool) -> anyhow::Result<()> {
    let (proxy, pool) = behind(&direct, patient()).await?;
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
                until(&direct, renewed).await;
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

/// The renewal keeps the lease over other connections, so the beginning of the step needs a limit of its own.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_whose_connection_vanishes_before_it_begins_is_not_in_doubt(direct: PgPool) -> anyhow::Result<()> {
    let pool = PgPoolOptions::new().max_connections(3).acquire_timeout(Duration::from_secs(1));
    let (proxy, pool) = behind(&direct, pool.test_before_acquire(false)).await?;
    let policy = Policy::InSteps { lease: Duration::from_secs(9) };
    let lease = owner(&pool, LeaseOptions::new(policy), &key("a")).await;
    until_idle(&pool, 1).await;
    proxy.lose_connections();
    let step = lease.step_at_most_once("text", async |_| -> Result<i64, Error> { panic!("the step has not begun") });
    let error = timeout(PATIENCE, step).await.expect("in time").expect_err("no answer");
    assert!(matches!(error, Error::Unanswered | Error::LeaseLost), "{error:?}");
    let steps: Option<String> =
        sqlx::query_scalar("select steps::text from idempotency.record").fetch_one(&direct).await?;
    assert_eq!(steps, None);
    Ok(())
}

/// The pool pings a connection that comes back, so it is idle a moment later.
async fn until_idle(pool: &PgPool, connections: usize) {
    let reached = async {
        while pool.num_idle() != connections {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, reached).await.expect("in time");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_sweep_ends_and_the_next_one_works(direct: PgPool) -> anyhow::Result<()> {
    let (proxy, pool) = behind(&direct, narrow()).await?;
    let janitor = Janitor::new(pool.clone()).interval(Duration::from_secs(1));
    assert_eq!(janitor.sweep_once(10).await?.rows(), 0);
    // If that ping is lost, sqlx waits for it.
    until_idle(&pool, 1).await;
    proxy.lose_connections();
    let error = timeout(PATIENCE, janitor.sweep_once(10)).await.expect("in time").expect_err("no answer");
    assert!(matches!(error, Error::Unanswered), "{error:?}");
    timeout(PATIENCE, janitor.sweep_once(10)).await.expect("on a new connection")?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_janitor_hears_a_shutdown(direct: PgPool) -> anyhow::Result<()> {
    let (proxy, pool) = behind(&direct, narrow()).await?;
    let (stop, stopped) = oneshot::channel::<()>();
    until_idle(&pool, 1).await;
    proxy.vanish();
    let janitor = Janitor::new(pool.clone()).interval(Duration::from_secs(1));
    let running = tokio::spawn(janitor.run(async { drop(stopped.await) }));
    // The first sweep has begun.
    until_idle(&pool, 0).await;
    let asked = Instant::now();
    drop(stop);
    timeout(PATIENCE, running).await.expect("it ends")?;
    assert!(asked.elapsed() < Duration::from_secs(8), "{:?}", asked.elapsed());
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_resumer_hears_a_shutdown_during_its_search(direct: PgPool) -> anyhow::Result<()> {
    let (proxy, pool) = behind(&direct, narrow()).await?;
    let policy = Policy::AtLeastOnce { lease: Duration::from_secs(3) };
    let leasing = LeaseOptions::new(policy).store_request(true).max_attempts(NonZeroU32::MIN);
    let resumer = Resumer::new(leasing, "operation")?.interval(Duration::from_millis(100));
    until_idle(&pool, 1).await;
    proxy.vanish();
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn({
        let pool = pool.clone();
        async move {
            let work = async |_: &Lease, _: String| Ok::<_, Error>(());
            resumer.run(&pool, async { drop(stopped.await) }, work).await;
        }
    });
    until_idle(&pool, 0).await;
    drop(stop);
    timeout(Duration::from_secs(8), running).await.expect("it ends at once")?;
    Ok(())
}
