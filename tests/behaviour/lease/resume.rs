//! Resuming: which operations a resumer takes, and what becomes of them.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Acquired, Lease, LeaseOptions, LeaseOwner, Resumer};
use pg_idempotency::testing::{age, expire, lapse};
use pg_idempotency::{Error, Fingerprint, InvalidStep, Key, Misuse, Outcome};
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS, owner};
use sqlx::{Executor as _, PgPool};

use crate::lease::leases::WorkError;
use crate::support::{create_effects, effects, key, leave_effect, pool_of, records};

const ATTEMPTS: NonZeroU32 = NonZeroU32::new(4).expect("four");
pub(crate) const MINUTE: Duration = Duration::from_secs(60);

pub(crate) fn leasing() -> LeaseOptions {
    LeaseOptions::new(IN_STEPS).store_request(true).max_attempts(ATTEMPTS)
}

async fn acquired(pool: &PgPool, value: &str) -> LeaseOwner {
    owner(pool, leasing(), &key(value)).await
}

/// An operation whose caller died in its work, long enough ago.
pub(crate) async fn abandoned(pool: &PgPool, value: &str) {
    drop(acquired(pool, value).await);
    lapse(pool, &key(value)).await.expect("lapsed");
    age(pool, &key(value), MINUTE).await.expect("older");
}

async fn work(lease: &Lease, body: String) -> Result<String, Error> {
    lease.step("effect", async |conn| leave_effect(conn, &body).await).await?;
    Ok(format!("{}: {body}", lease.key().value()))
}

async fn resume(pool: &PgPool) -> Option<String> {
    leasing().resume_one(pool, "operation", work).await.expect("a search, and work that succeeds")
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_abandoned_operation_is_finished_and_its_caller_gets_the_response(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    assert!(resume(&pool).await.is_none(), "an empty table");
    abandoned(&pool, "a").await;
    assert_eq!(resume(&pool).await.as_deref(), Some("a: body"));
    assert!(resume(&pool).await.is_none(), "it is finished");
    let again = leasing().run(&pool, &key("a"), "body", async |_| -> Result<String, Error> { panic!("done") }).await?;
    assert_eq!(again, Outcome::Replayed("a: body".to_owned()));
    let left: i64 =
        sqlx::query_scalar("select count(*) from idempotency.record where request is not null or steps is not null")
            .fetch_one(&pool)
            .await?;
    assert_eq!((left, effects(&pool).await), (0, 1));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn only_operations_that_are_free_and_old_enough_are_taken(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let live = acquired(&pool, "live").await;
    pool.execute("update idempotency.record set claimed_at = now() - interval '1 h'").await?;
    drop(acquired(&pool, "young").await);
    lapse(&pool, &key("young")).await?;
    abandoned(&pool, "expired").await;
    expire(&pool, &key("expired")).await?;
    abandoned(&pool, "no request").await;
    pool.execute("update idempotency.record set request = null where value = 'no request'").await?;
    abandoned(&pool, "in doubt").await;
    pool.execute(
        r#"update idempotency.record set steps = '{"text": {"begun": "2026-01-01T00:00:00Z", "attempt": 1}}' where value = 'in doubt'"#,
    )
    .await?;
    abandoned(&pool, "exhausted").await;
    pool.execute(
        "update idempotency.record set attempt = 4, claimed_at = now() - interval '1 h' where value = 'exhausted'",
    )
    .await?;
    let other = Key::new("tenant", "another operation", "a")?;
    let lease = owner(&pool, leasing(), &other).await;
    drop(lease);
    lapse(&pool, &other).await?;
    age(&pool, &other, MINUTE).await?;
    assert!(resume(&pool).await.is_none());
    assert_eq!(effects(&pool).await, 0);
    live.complete(&"done".to_owned()).await?;
    age(&pool, &key("young"), MINUTE).await?;
    assert_eq!(resume(&pool).await.as_deref(), Some("young: body"));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_failed_attempt_doubles_the_time_to_the_next_until_all_are_used(pool: PgPool) -> anyhow::Result<()> {
    abandoned(&pool, "a").await;
    let failing = async |_: &Lease, _: String| -> Result<String, WorkError> { Err(WorkError::Gateway) };
    for attempt in 2..=4_u32 {
        let resumed = leasing().resume_one(&pool, "operation", failing).await;
        assert!(matches!(resumed, Err(WorkError::Gateway)), "attempt {attempt}");
        // An attempt's claim is younger than a minute for each earlier attempt, doubled.
        let wait = MINUTE * 2_u32.pow(attempt - 1);
        age(&pool, &key("a"), wait - Duration::from_secs(20)).await?;
        assert!(leasing().resume_one(&pool, "operation", failing).await?.is_none(), "attempt {attempt}");
        age(&pool, &key("a"), Duration::from_secs(21)).await?;
    }
    assert!(leasing().resume_one(&pool, "operation", failing).await?.is_none(), "the attempts are used up");
    let error = leasing().acquire::<String, _>(&pool, &key("a"), "body").await.expect_err("exhausted");
    assert!(matches!(&error, Error::Exhausted { attempts: 4, last_error: Some(_), .. }), "{error:?}");
    Ok(())
}

/// The key's next operation has a request of its own, or none.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_ends_with_its_operation(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for stored in [true, false] {
        abandoned(&pool, "a").await;
        expire(&pool, &key("a")).await?;
        let next = leasing().store_request(stored).acquire::<String, _>(&pool, &key("a"), "another body").await?;
        assert!(matches!(&next, Acquired::Owner(lease) if lease.attempt() == 1));
        drop(next);
        lapse(&pool, &key("a")).await?;
        age(&pool, &key("a"), MINUTE).await?;
        assert_eq!(resume(&pool).await, stored.then(|| "a: another body".to_owned()));
        pool.execute("truncate idempotency.record").await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn two_resumers_take_different_operations(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let pool = pool_of(12, &pool.connect_options()).await;
    for n in 0..6 {
        abandoned(&pool, &n.to_string()).await;
    }
    let mut done = Vec::new();
    for _ in 0..3 {
        let (first, second) = tokio::join!(resume(&pool), resume(&pool));
        done.extend([first, second].into_iter().flatten());
    }
    done.sort();
    let expected: Vec<_> = (0..6).map(|n| format!("{n}: body")).collect();
    assert_eq!(done, expected);
    assert_eq!(effects(&pool).await, 6);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_that_does_not_decode_is_reported_and_kept(pool: PgPool) -> anyhow::Result<()> {
    abandoned(&pool, "a").await;
    let resumed = leasing()
        .resume_one(&pool, "operation", async |_: &Lease, _: u64| -> Result<u64, Error> { panic!("a text is stored") })
        .await;
    let error = resumed.expect_err("no number");
    assert!(matches!(error, Error::Undecodable { step: None, .. }), "{error:?}");
    let (kept, told): (bool, String) =
        sqlx::query_as("select request is not null, last_error from idempotency.record").fetch_one(&pool).await?;
    assert!(kept && told.starts_with("the stored request does not decode"), "{told}");
    // The request may be confidential. Operators read the record, and the log has the error with its cause.
    let said = format!("{told} {error:?}");
    assert!(!said.contains("body"), "{said}");
    age(&pool, &key("a"), MINUTE * 2).await?;
    create_effects(&pool).await;
    resume(&pool).await.expect("by a resumer that knows the type");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn options_that_cannot_be_resumed_are_refused(pool: PgPool) -> anyhow::Result<()> {
    let problem = |error: Error| match error {
        Error::Misuse(Misuse::Options { problem, .. }) => problem,
        error => panic!("{error:?}"),
    };
    let at_most_once = LeaseOptions::new(AT_MOST_ONCE).store_request(true);
    let refused = at_most_once.max_attempts(ATTEMPTS).resume_one(&pool, "operation", work).await.expect_err("refused");
    assert!(problem(refused).contains("AtMostOnce"));
    let unlimited = LeaseOptions::new(IN_STEPS).store_request(true);
    let refused = unlimited.resume_one(&pool, "operation", work).await.expect_err("refused");
    assert!(problem(refused).contains("max_attempts"));
    let refused = Resumer::new(unlimited, "operation").expect_err("refused");
    assert!(problem(refused).contains("max_attempts"));
    for impossible in [String::new(), "a\0".to_owned(), "x".repeat(256)] {
        let refused = at_least_once().resume_one(&pool, &impossible, work).await.expect_err("refused");
        assert!(problem(refused).contains("the key's operation"), "{impossible:?}");
        let refused = Resumer::new(at_least_once(), &impossible).expect_err("refused");
        assert!(problem(refused).contains("the key's operation"), "{impossible:?}");
    }
    let body = Fingerprint::of_json("body")?;
    let refused = unlimited.acquire::<String, _>(&pool, &key("a"), &body).await.expect_err("refused");
    assert!(problem(refused).contains("no body"));
    assert_eq!(records(&pool).await, 0);
    Ok(())
}

fn at_least_once() -> LeaseOptions {
    LeaseOptions::new(AT_LEAST_ONCE).store_request(true).max_attempts(ATTEMPTS)
}

/// An operation at least once, whose caller died in its work.
async fn abandoned_at_least_once(pool: &PgPool, value: &str) {
    drop(owner(pool, at_least_once(), &key(value)).await);
    lapse(pool, &key(value)).await.expect("lapsed");
    age(pool, &key(value), 2 * MINUTE).await.expect("older");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_operation_at_least_once_is_resumed_without_steps(pool: PgPool) -> anyhow::Result<()> {
    abandoned_at_least_once(&pool, "a").await;
    let without_steps = async |lease: &Lease, body: String| -> Result<String, Error> {
        let step = lease.step_at_least_once("step", async |_| Ok::<_, Error>(())).await;
        assert!(matches!(step, Err(Error::Misuse(Misuse::Step { problem: InvalidStep::Policy, .. }))));
        Ok(body)
    };
    let resumed = at_least_once().resume_one(&pool, "operation", without_steps).await?;
    assert_eq!(resumed.as_deref(), Some("body"));
    Ok(())
}

/// The other service would not recognise the keys of their steps. They are more than one search finds, and older.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_resumer_in_steps_leaves_operations_at_least_once_alone(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for n in 0..17 {
        abandoned_at_least_once(&pool, &n.to_string()).await;
    }
    abandoned(&pool, "in steps").await;
    assert_eq!(resume(&pool).await.as_deref(), Some("in steps: body"));
    assert!(resume(&pool).await.is_none());
    assert_eq!(effects(&pool).await, 1);
    let untouched: i64 =
        sqlx::query_scalar("select count(*) from idempotency.record where attempt = 1 and request is not null")
            .fetch_one(&pool)
            .await?;
    assert_eq!(untouched, 17);
    Ok(())
}
