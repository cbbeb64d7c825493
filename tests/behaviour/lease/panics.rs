//! Panics under a lease: of the work, and of the code that encodes its response.

use std::time::Duration;

use pg_idempotency::Error;
use pg_idempotency::lease::{Lease, LeaseOptions, Policy, Resumer};
use pg_idempotency::testing::{age, lapse};
use rig::cases::each;
use rig::gate::PATIENCE;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS};
use serde::{Deserialize, Serialize, Serializer};
use sqlx::{Executor as _, PgPool};

use crate::lease::resume::{MINUTE, abandoned, leasing};
use crate::support::{create_effects, effects, key, leave_effect, until};

/// Panics when it is encoded, if it says so.
#[derive(Deserialize)]
struct Response(String);

impl Serialize for Response {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        assert_ne!(self.0, "not encodable", "on purpose");
        self.0.serialize(serializer)
    }
}

async fn work(lease: &Lease, _: String) -> Result<Response, Error> {
    match lease.key().value() {
        "panics" => panic!("on purpose"),
        "panics in a step" => {
            lease
                .step("effect", async |conn| {
                    leave_effect(conn, "undone").await?;
                    panic!("on purpose")
                })
                .await
        }
        value => Ok(Response(value.to_owned())),
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_resumer_survives_a_panic_and_finishes_the_other_operations(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let poison = ["panics", "panics in a step", "not encodable"];
    for value in poison.into_iter().chain(["first", "second", "third"]) {
        abandoned(&pool, value).await;
    }
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let resumer = Resumer::new(leasing(), "operation")?.interval(Duration::from_millis(100));
    let running = tokio::spawn({
        let pool = pool.clone();
        async move {
            let shutdown = async { drop(stopped.await) };
            resumer.run(&pool, shutdown, async |lease: &Lease, body: String| work(lease, body).await).await
        }
    });
    until(
        &pool,
        "select count(*) filter (where completed_at is not null) = 3
            and count(*) filter (where completed_at is null and attempt = 2 and last_error = 'the work panicked') = 2
            and count(*) filter (where value = 'not encodable' and attempt = 2) = 1
        from idempotency.record",
    )
    .await;
    stop.send(()).expect("it still runs");
    tokio::time::timeout(PATIENCE, running).await??;
    assert_eq!(effects(&pool).await, 0, "the step was rolled back");
    // The attempts count: each of these operations waits for twice as long as before.
    lapse(&pool, &key("not encodable")).await?;
    for value in poison {
        age(&pool, &key(value), MINUTE).await?;
    }
    let next = leasing().resume_one(&pool, "operation", async |_: &Lease, _: String| Ok::<_, Error>(())).await?;
    assert!(next.is_none(), "it is too early");
    age(&pool, &key("panics"), MINUTE).await?;
    let resuming = leasing().resume_one(&pool, "operation", async |lease: &Lease, _: String| {
        assert_eq!(lease.key(), &key("panics"));
        Ok::<_, Error>(())
    });
    resuming.await?.expect("it is time");
    Ok(())
}

/// For callers a panic stays a panic.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_panic_of_the_work_ends_the_attempt_as_an_error_does(pool: PgPool) -> anyhow::Result<()> {
    async fn panicking(lease: &Lease) -> Result<(), Error> {
        if lease.key().value() == "in a step" {
            return lease.step_at_most_once("text", async |_| panic!("on purpose")).await;
        }
        panic!("on purpose")
    }
    let cases: [(Policy, &str, &str); 4] = [
        (AT_LEAST_ONCE, "a", "released"),
        (IN_STEPS, "a", "released"),
        (IN_STEPS, "in a step", "indeterminate"),
        (AT_MOST_ONCE, "a", "indeterminate"),
    ];
    each(cases, async |(policy, value, state)| {
        pool.execute("truncate idempotency.record").await?;
        let called = tokio::spawn({
            let pool = pool.clone();
            async move { LeaseOptions::new(policy).run(&pool, &key(value), "body", panicking).await.map(drop) }
        });
        assert!(called.await.is_err_and(|error| error.is_panic()), "{policy:?}");
        let shown = pg_idempotency::operator::show(&pool, &key(value)).await?.expect("a record");
        assert_eq!(
            (&*shown.state.to_string(), shown.last_error.as_deref()),
            (state, Some("the work panicked")),
            "{policy:?}"
        );
        Ok(())
    })
    .await;
    Ok(())
}
