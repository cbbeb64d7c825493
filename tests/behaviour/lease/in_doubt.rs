//! Steps in doubt: an operator's decision is about the steps that they saw, and each step is settled for itself.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Acquired, Lease, LeaseOptions};
use pg_idempotency::operator::{Shown, State, show, unsettled};
use pg_idempotency::testing::lapse;
use pg_idempotency::{Error, InvalidStep, Misuse, SettleError};
use rig::fixture::Fixture;
use rig::lease::IN_STEPS;
use sqlx::{Executor as _, PgPool};

use crate::lease::leases::WorkError;
use crate::lease::steps::{Kind, acquire, acquired, after_a_crash, assert_indeterminate};
use crate::support::{assert_changed, key, shown, steps_in_doubt};

fn names_of<const N: usize>(names: [&str; N]) -> Vec<String> {
    names.map(str::to_owned).to_vec()
}

/// All steps in doubt, as a caller learns of them, with the token.
async fn in_doubt(pool: &PgPool) -> (i64, Vec<String>) {
    match acquire(pool, "body").await {
        Err(Error::Indeterminate { token, steps, .. }) => (token, steps),
        other => panic!("{other:?}"),
    }
}

/// Crashes in at-most-once steps of these names, side by side.
async fn crash_in(pool: &PgPool, names: &[&str]) -> i64 {
    let lease = acquired(pool).await;
    let failed = futures_util::future::join_all(names.iter().map(|name| Kind::AtMostOnce.failing(&lease, name))).await;
    assert!(failed.iter().all(Result::is_err), "{failed:?}");
    let token = lease.token();
    drop(lease);
    lapse(pool, &key("a")).await.expect("a lapsed lease");
    token
}

/// The next attempt asks for the steps of these names. Returns those that it performed.
async fn performed_next(pool: &PgPool, names: &[&str]) -> Vec<String> {
    let lease = acquired(pool).await;
    let mut performed = Vec::new();
    for name in names {
        let asked = lease.step_at_most_once(name, async |_| {
            performed.push((*name).to_owned());
            Ok::<_, Error>(8)
        });
        asked.await.expect("it is not in doubt");
    }
    lease.complete(&"done".to_owned()).await.expect("completed");
    performed
}

async fn record(pool: &PgPool) -> String {
    sqlx::query_scalar("select record::text from idempotency.record").fetch_one(pool).await.expect("a record")
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_operator_settles_a_step_in_doubt(pool: PgPool) -> anyhow::Result<()> {
    for took_effect in [true, false] {
        pool.execute("truncate idempotency.record").await?;
        let lease = acquired(&pool).await;
        Kind::AtLeastOnce.step(&lease, "ride", 1).await?;
        let mut sent = String::new();
        let text = lease.step_at_most_once("text", async |step| -> Result<i64, WorkError> {
            sent = step.downstream_key().to_owned();
            Err(WorkError::Gateway)
        });
        assert!(text.await.is_err());
        let held = lease.token();
        let settle = async |seen: &Shown, step: &str| match took_effect {
            true => seen.clone().step(step).resolve(&pool, &7).await,
            false => seen.clone().step(step).release(&pool, "not sent").await,
        };
        assert_changed(settle(&shown(&pool, &key("a")).await, "text").await, "under a live lease");
        drop(lease);
        lapse(&pool, &key("a")).await?;
        let shown = shown(&pool, &key("a")).await;
        assert_eq!(shown.state, State::Indeterminate);
        let names: Vec<_> = shown.steps.iter().map(|step| (step.name.as_str(), step.in_doubt, step.attempt)).collect();
        assert_eq!(names, [("ride", false, 1), ("text", true, 1)]);
        assert!(shown.steps.iter().all(|step| step.at.is_some()));
        assert_eq!(shown.steps[1].downstream_key, sent, "what the gateway saw");
        let waiting = unsettled(&pool, 10, None, None).await?;
        assert_eq!(waiting.len(), 1);
        assert_eq!((waiting[0].state, steps_in_doubt(&waiting[0])), (State::Indeterminate, vec!["text"]));
        for other in ["ride", "no step"] {
            assert_changed(settle(&shown, other).await, &format!("{other} is not in doubt"));
        }
        let settled = settle(&shown, "text").await?;
        assert_ne!(settled.token, held, "an owner that was suspended is fenced");
        assert_changed(settle(&shown, "text").await, "settled before");
        let now = show(&pool, &key("a")).await?.expect("a record");
        assert_eq!((settled.state, now.version()), (State::Released, settled.version()));
        assert!(unsettled(&pool, 10, None, None).await?.is_empty());

        let lease = acquired(&pool).await;
        assert_eq!(lease.attempt(), 2);
        assert_eq!(Kind::AtLeastOnce.step(&lease, "ride", 2).await?, 1, "finished steps stay");
        assert_eq!(Kind::AtMostOnce.step(&lease, "text", 8).await?, if took_effect { 7 } else { 8 });
        lease.complete(&"done".to_owned()).await?;
    }
    Ok(())
}

/// The owner's clock stood still while the machine slept. The quiet time counts from the lapse, and would be over at
/// once. In the record of another owner, or of an operator, the step would be in doubt.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn no_step_begins_without_the_lease(pool: PgPool) -> anyhow::Result<()> {
    for since in ["lapsed", "overtaken", "resolved"] {
        let lease = acquired(&pool).await;
        lapse(&pool, &key("a")).await?;
        let overtaking = if since == "overtaken" { Some(acquired(&pool).await) } else { None };
        if since == "resolved" {
            shown(&pool, &key("a")).await.resolve(&pool, &"done".to_owned(), Duration::from_secs(3600)).await?;
        }
        let lost =
            lease.step_at_most_once("text", async |_| -> Result<i64, Error> { panic!("the lease is lost") }).await;
        assert!(matches!(lost, Err(Error::LeaseLost)), "{since}: {lost:?}");
        assert!(show(&pool, &key("a")).await?.expect("a record").steps.is_empty(), "{since}");
        drop(overtaking);
        pool.execute("delete from idempotency.record").await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_owners_release_keeps_the_doubt(pool: PgPool) -> anyhow::Result<()> {
    let lease = acquired(&pool).await;
    assert!(Kind::AtMostOnce.failing(&lease, "text").await.is_err());
    lease.release("by mistake").await?;
    assert_indeterminate(&pool, 1).await;
    assert_eq!(unsettled(&pool, 10, None, None).await?.len(), 1);
    let shown = shown(&pool, &key("a")).await;
    assert_eq!(shown.state, State::Indeterminate);
    shown.resolve(&pool, &"sent".to_owned(), Duration::from_secs(3600)).await?;
    assert!(matches!(acquire(&pool, "body").await?, Acquired::Replayed(_)));
    Ok(())
}

/// Not in the order of `jsonb`, in which the shorter name is first.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_caller_and_an_operator_learn_of_all_steps_in_doubt_in_the_order_of_their_names(
    pool: PgPool,
) -> anyhow::Result<()> {
    let token = crash_in(&pool, &["email", "text"]).await;
    assert_eq!(in_doubt(&pool).await, (token, names_of(["email", "text"])));
    let error = acquire(&pool, "body").await.expect_err("in doubt").to_string();
    assert!(error.contains(r#"["email", "text"]"#), "{error}");
    assert_eq!(steps_in_doubt(&unsettled(&pool, 10, None, None).await?[0]), ["email", "text"]);
    let released = shown(&pool, &key("a")).await.release(&pool, "neither was sent").await?;
    assert_eq!((released.state, released.steps.len()), (State::Released, 0));
    assert_eq!(performed_next(&pool, &["email", "text"]).await, ["email", "text"]);
    Ok(())
}

/// An operator settles each of several steps by its name, and what happened to it. Nothing happens twice.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_of_several_steps_in_doubt_is_settled_by_its_name(pool: PgPool) -> anyhow::Result<()> {
    for email_first in [true, false] {
        pool.execute("truncate idempotency.record").await?;
        crash_in(&pool, &["email", "text"]).await;
        let looked_up = shown(&pool, &key("a")).await;
        let email = async |seen: &Shown| seen.clone().step("email").resolve(&pool, &7).await;
        let text = async |seen: &Shown| seen.clone().step("text").release(&pool, "the gateway has no text").await;
        let after_first = if email_first { email(&looked_up).await? } else { text(&looked_up).await? };
        assert_ne!(after_first.token, looked_up.token, "an owner that was suspended is fenced");
        assert_eq!(after_first.state, State::Indeterminate);
        let left = names_of([if email_first { "text" } else { "email" }]);
        assert_eq!(in_doubt(&pool).await, (after_first.token, left));
        // Another operator looked before this decision.
        for stale in [email(&looked_up).await, text(&looked_up).await] {
            assert_changed(stale, "settled by another operator");
        }
        let again = if email_first { email(&after_first).await } else { text(&after_first).await };
        assert_changed(again, "settled before");
        let after_second = if email_first { text(&after_first).await? } else { email(&after_first).await? };
        let shown = shown(&pool, &key("a")).await;
        assert_eq!((shown.state, shown.token), (State::Released, after_second.token));
        assert_eq!(shown.last_error.as_deref(), Some("the gateway has no text"));
        assert_eq!(shown.steps.len(), 1, "{:?}", shown.steps);
        assert!(unsettled(&pool, 10, None, None).await?.is_empty());
        assert_eq!(performed_next(&pool, &["email", "text"]).await, ["text"]);
    }
    Ok(())
}

/// An operator that settles a step wants the operation to go on. One attempt follows each decision, and not more.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_attempt_after_a_settled_step_is_permitted(pool: PgPool) -> anyhow::Result<()> {
    let most = NonZeroU32::new(2).expect("two");
    let key = key("a");
    let leasing = LeaseOptions::new(IN_STEPS).max_attempts(most).resume_after(Duration::ZERO);
    let next = async || leasing.acquire::<String, _>(&pool, &key, "body").await;
    for way in ["resolve_step", "release_step", "release"] {
        let settle_all = async || -> anyhow::Result<()> {
            let (_, names) = in_doubt(&pool).await;
            let mut shown = shown(&pool, &key).await;
            if way == "release" {
                shown.release(&pool, "not sent").await?;
                return Ok(());
            }
            for name in &names {
                shown = match way {
                    "resolve_step" => shown.step(name).resolve(&pool, &7).await?,
                    _ => shown.step(name).release(&pool, "not sent").await?,
                };
            }
            Ok(())
        };
        let waiting = async || unsettled(&pool, 10, Some(most), None).await.map(|list| list.len());
        Fixture::lapsed(&key, "body", IN_STEPS)?
            .with_attempt(2)
            .with_step_in_doubt("email")
            .with_step_in_doubt("text")
            .with_stored_request("body")
            .write(&pool)
            .await?;
        assert_eq!(waiting().await?, 1, "{way}");
        settle_all().await?;
        assert_eq!(waiting().await?, 0, "{way}");
        let Acquired::Owner(lease) = next().await? else { panic!("not completed") };
        assert_eq!(lease.attempt(), 3, "{way}");
        assert!(Kind::AtMostOnce.failing(&lease, "more").await.is_err());
        drop(lease);
        lapse(&pool, &key).await?;
        settle_all().await?;
        // A resumer may make this attempt, too. It fails, and no operator settles a step of it.
        let failing = leasing.resume_one(&pool, key.operation(), async |lease: &Lease, _: String| {
            assert_eq!(lease.attempt(), 4, "{way}");
            Err::<String, _>(WorkError::Gateway)
        });
        assert!(matches!(failing.await, Err(WorkError::Gateway)), "{way}");
        assert!(matches!(next().await, Err(Error::Exhausted { attempts: 4, .. })), "{way}");
        assert_eq!(waiting().await?, 1, "{way}");
        let none = leasing.resume_one(&pool, key.operation(), async |_: &Lease, _: String| -> Result<(), Error> {
            panic!("exhausted")
        });
        assert!(none.await?.is_none(), "{way}");
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_operators_result_keeps_the_limits(pool: PgPool) -> anyhow::Result<()> {
    let lease = acquired(&pool).await;
    let largest = "x".repeat(64 * 1024 - 2);
    for n in 0..4 {
        let value = if n < 3 { largest.clone() } else { largest[10..].to_owned() };
        Kind::AtLeastOnce.step(&lease, &n.to_string(), value).await?;
    }
    assert!(Kind::AtMostOnce.failing(&lease, "text").await.is_err());
    drop(lease);
    lapse(&pool, &key("a")).await?;
    let before = record(&pool).await;
    let shown = shown(&pool, &key("a")).await;
    for result in [largest.clone(), largest.clone() + "x", "123456789".to_owned()] {
        let error = shown.clone().step("text").resolve(&pool, &result).await.expect_err("too large");
        let SettleError::Other(Error::Misuse(Misuse::Step { problem: InvalidStep::TooLarge, .. })) = error else {
            panic!("{error:?}")
        };
        assert_eq!(record(&pool).await, before);
    }
    shown.step("text").resolve(&pool, &"12345678".to_owned()).await?;
    let lease = acquired(&pool).await;
    let lease = after_a_crash(&pool, lease).await;
    assert_eq!(Kind::AtMostOnce.step(&lease, "text", String::new()).await?, "12345678");
    Ok(())
}
