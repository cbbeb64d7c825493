//! Claims whose COMMIT got no answer, or whose future was dropped meanwhile. The caller knows that the work has not
//! begun, so the key is free again, and the claim does not count. The COMMIT waits for the test, in a deferred trigger.

use std::num::NonZeroU32;
use std::thread;
use std::time::Duration;

use pg_idempotency::lease::{Lease, LeaseOptions, Policy};
use pg_idempotency::operator::{Shown, State, show};
use pg_idempotency::{Error, Outcome};
use rig::database::until_blocked;
use rig::gate::PATIENCE;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS};
use rig::proxy::Proxy;
use sqlx::{PgConnection, PgPool};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::lease::leases::WorkError;
use crate::support::{connect, key, pool_of, records, until};

/// One release that finds the key held needs three round trips, and the first needs a connection. So there were two.
const ROUND_TRIPS_OF_TWO_TRIES: usize = 12;

/// A service behind a network, and a test that holds each COMMIT of a claim.
struct Held {
    /// The test's own way to the database.
    direct: PgPool,
    service: PgPool,
    proxy: Proxy,
    gate: PgConnection,
}

impl Held {
    async fn new(direct: PgPool) -> anyhow::Result<Self> {
        sqlx::raw_sql(
            "create function held() returns trigger language plpgsql as
             $$ begin perform pg_advisory_xact_lock_shared(4711); return null; end $$;
             create constraint trigger held after insert or update on idempotency.record
             deferrable initially deferred for each row execute function held()",
        )
        .execute(&direct)
        .await?;
        let proxy = Proxy::before(&direct.connect_options()).await?;
        let service = pool_of(3, &proxy.options).await;
        let gate = connect(&direct).await;
        Ok(Self { direct, service, proxy, gate })
    }

    async fn hold(&mut self) -> anyhow::Result<()> {
        sqlx::query("select pg_advisory_lock(4711)").execute(&mut self.gate).await?;
        Ok(())
    }

    async fn let_go(&mut self) -> anyhow::Result<()> {
        sqlx::query("select pg_advisory_unlock(4711)").execute(&mut self.gate).await?;
        Ok(())
    }

    /// A call whose COMMIT is held, and whose work must not begin.
    async fn committing(&self, leasing: LeaseOptions) -> anyhow::Result<JoinHandle<Result<Outcome<i64>, Error>>> {
        let pool = self.service.clone();
        let call = tokio::spawn(async move {
            leasing.run(&pool, &key("a"), "body", async |_| panic!("its claim was given up")).await
        });
        until_blocked(&self.direct, 1).await?;
        Ok(call)
    }

    /// The service has tried to release the claim, and has not given up.
    async fn until_it_has_tried(&self) {
        let mut round_trips = self.proxy.take();
        let tried = async {
            while round_trips < ROUND_TRIPS_OF_TWO_TRIES {
                round_trips += self.proxy.take();
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(PATIENCE, tried).await.expect("it tries to release the claim");
    }

    async fn until_released(&self) -> Shown {
        until(&self.direct, "select exists (select from idempotency.record where lease_until = '-infinity')").await;
        show(&self.direct, &key("a")).await.expect("a database").expect("a record")
    }

    async fn perform(&self, leasing: LeaseOptions, body: &str) -> Result<u32, Error> {
        let work = async |lease: &Lease| Ok::<_, Error>(lease.attempt());
        leasing.run(&self.service, &key("a"), body, work).await.map(Outcome::into_inner)
    }
}

fn assert_lost(result: Result<Outcome<i64>, Error>) {
    assert!(result.as_ref().is_err_and(Error::is_transient), "{result:?}");
}

/// The COMMIT is executed, and its answer is lost. Until it is executed, the release must not give up.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_claim_at_least_once_whose_commit_lost_its_answer_is_released(pool: PgPool) -> anyhow::Result<()> {
    is_released_without_an_answer(pool, AT_LEAST_ONCE).await
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_claim_at_most_once_whose_commit_lost_its_answer_is_released(pool: PgPool) -> anyhow::Result<()> {
    is_released_without_an_answer(pool, AT_MOST_ONCE).await
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_claim_in_steps_whose_commit_lost_its_answer_is_released(pool: PgPool) -> anyhow::Result<()> {
    is_released_without_an_answer(pool, IN_STEPS).await
}

async fn is_released_without_an_answer(pool: PgPool, policy: Policy) -> anyhow::Result<()> {
    let mut held = Held::new(pool).await?;
    let leasing = LeaseOptions::new(policy);
    held.hold().await?;
    let call = held.committing(leasing).await?;
    held.proxy.take();
    held.proxy.cut_connections();
    assert_lost(call.await?);
    held.until_it_has_tried().await;
    assert_eq!(records(&held.direct).await, 0, "the COMMIT is still on its way");
    held.let_go().await?;
    let shown = held.until_released().await;
    assert_eq!((shown.state, shown.attempt, shown.resumable), (State::Released, 0, false));
    // Nothing of the first body has taken effect, so another one may claim.
    assert_eq!(held.perform(leasing, "another body").await?, 1);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_claim_whose_future_was_dropped_during_its_commit_is_released(direct: PgPool) -> anyhow::Result<()> {
    let mut held = Held::new(direct).await?;
    for inside_a_runtime in [true, false] {
        let leasing = LeaseOptions::new(AT_MOST_ONCE);
        held.hold().await?;
        let pool = held.service.clone();
        let mut call = Box::pin(async move {
            leasing.acquire::<i64, _>(&pool, &key("a"), "body").await.map(|_| panic!("its future is dropped"))
        });
        tokio::select! {
            ended = &mut call => ended?,
            blocked = until_blocked(&held.direct, 1) => blocked?,
        }
        held.proxy.take();
        if inside_a_runtime {
            drop(call);
        } else {
            // sqlx panics, because it gives the connection back in a task.
            let _ = thread::spawn(move || drop(call)).join();
        }
        held.until_it_has_tried().await;
        held.let_go().await?;
        assert_eq!(held.until_released().await.attempt, 0, "{inside_a_runtime}");
        assert_eq!(held.perform(leasing, "body").await?, 1, "{inside_a_runtime}");
        sqlx::query("truncate idempotency.record").execute(&held.direct).await?;
    }
    Ok(())
}

/// What earlier attempts have left stays, and the permission of an operator is not used up.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_further_claim_that_never_began_leaves_the_record_as_it_was(direct: PgPool) -> anyhow::Result<()> {
    let mut held = Held::new(direct).await?;
    let leasing = LeaseOptions::new(IN_STEPS).max_attempts(NonZeroU32::MIN).store_request(true);
    let leasing = leasing.resume_after(Duration::ZERO);
    let failing = async |lease: &Lease| -> Result<u32, WorkError> {
        lease.step_at_least_once("ride", async |_| Ok::<_, Error>(1)).await?;
        Err(WorkError::Gateway)
    };
    leasing.run(&held.service, &key("a"), "body", failing).await.expect_err("it fails");
    let exhausted = show(&held.direct, &key("a")).await?.expect("a record");
    let before = exhausted.grant(&held.direct, "the gateway is repaired").await?;

    let (direct, service) = (held.direct.clone(), held.service.clone());
    for resumed in [false, true] {
        held.hold().await?;
        let call = if resumed {
            let pool = service.clone();
            let call = tokio::spawn(async move {
                let work = async |_: &Lease, _: String| -> Result<i64, Error> { panic!("its claim was given up") };
                Ok(Outcome::Performed(leasing.resume_one(&pool, "operation", work).await?.expect("one waits")))
            });
            until_blocked(&direct, 1).await?;
            call
        } else {
            held.committing(leasing).await?
        };
        held.proxy.cut_connections();
        assert_lost(call.await?);
        held.let_go().await?;
        // The record is released before and after, so the token tells.
        until(&direct, "select count(*) = 0 from pg_stat_activity where wait_event_type = 'Lock'").await;
        let after = timeout(PATIENCE, async {
            loop {
                let shown = show(&direct, &key("a")).await.expect("a database").expect("a record");
                if shown.state == State::Released && shown.token != before.token && shown.attempt == 1 {
                    return shown;
                }
            }
        });
        let after = after.await.expect("it is released");
        assert_eq!(after.last_error.as_deref(), Some("the gateway is repaired"));
        assert_eq!((after.granted_attempt, &after.steps, after.resumable), (Some(2), &before.steps, true));
        assert!(!after.is_exhausted(NonZeroU32::MIN), "{resumed}");
    }
    assert_eq!(held.perform(leasing, "body").await?, 2);
    Ok(())
}

/// From the first poll of the work on, it is unknown whether it took effect.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_claim_whose_work_has_begun_is_not_released(pool: PgPool) -> anyhow::Result<()> {
    // One connection, which a release would take in turn between two looks.
    let pool = pool_of(1, &pool.connect_options()).await;
    let leasing = LeaseOptions::new(AT_MOST_ONCE);
    let (first, begun) = (key("a"), Notify::new());
    let work = async |_: &Lease| -> Result<i64, Error> {
        begun.notify_one();
        std::future::pending().await
    };
    tokio::select! {
        ended = leasing.run(&pool, &first, "body", work) => panic!("{ended:?}"),
        () = begun.notified() => {}
    }
    let acquired = leasing.acquire::<i64, _>(&pool, &key("b"), "body").await?;
    drop(acquired);
    for value in ["a", "b"].repeat(20) {
        let shown = show(&pool, &key(value)).await?.expect("a record");
        assert_eq!((shown.state, shown.attempt), (State::InFlight, 1), "{value}");
    }
    Ok(())
}
