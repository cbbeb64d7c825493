//! A connection that vanishes during a sweep or a search: nothing is refused and nothing is answered, and TCP may never
//! notice. The loops take their error path, a shutdown gets through, and new connections are used.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use pg_idempotency::lease::{Lease, LeaseOptions, Policy, Resumer};
use pg_idempotency::{Error, Janitor};
use rig::gate::PATIENCE;
use rig::proxy::Proxy;
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// With one place, which a connection that never answers would keep.
async fn behind(server: &PgConnectOptions) -> anyhow::Result<(Proxy, PgPool)> {
    let proxy = Proxy::before(server).await?;
    let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(PATIENCE).test_before_acquire(false);
    let pool = pool.connect_with(proxy.options.clone()).await?;
    Ok((proxy, pool))
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
async fn a_sweep_ends_and_the_next_one_works(_: PgPoolOptions, server: PgConnectOptions) -> anyhow::Result<()> {
    let (proxy, pool) = behind(&server).await?;
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
async fn a_janitor_hears_a_shutdown(_: PgPoolOptions, server: PgConnectOptions) -> anyhow::Result<()> {
    let (proxy, pool) = behind(&server).await?;
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
async fn a_resumer_hears_a_shutdown_during_its_search(
    _: PgPoolOptions,
    server: PgConnectOptions,
) -> anyhow::Result<()> {
    let (proxy, pool) = behind(&server).await?;
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
