//! The fixtures of the feature `testing`, used as in the tests of a service.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Lease, Leasing, Policy, ensure_leased};
use pg_idempotency::mark::{Marked, mark};
use pg_idempotency::operator::show;
use pg_idempotency::testing::{self, Fixture, age, expire, lapse};
use pg_idempotency::{Error, Idempotency, Key, Mode, Outcome};
use sqlx::PgPool;

use crate::lease::leases::{AT_LEAST_ONCE, AT_MOST_ONCE};
use crate::lease::steps::IN_STEPS;
use crate::support::{create_effects, effects, expire_in, key, once, rejecting};

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn completed_is_replayed(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = pool.acquire().await?;
    Fixture::completed(&key("a"), "body", &7)?.write(&mut *conn).await?;
    assert_eq!(once(&pool, &key("a"), "body").await?, Outcome::Replayed(7));
    Fixture::completed(&key("a"), "another", &8)?.write(&mut *conn).await?;
    assert_eq!(once(&pool, &key("a"), "another").await?, Outcome::Replayed(8), "whatever stood there before");
    assert!(matches!(once(&pool, &key("a"), "body").await, Err(Error::KeyReused { .. })));
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn expired_is_performed_again(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    Fixture::completed(&key("a"), "body", &7)?.expired().write(&pool).await?;
    assert_eq!(once(&pool, &key("a"), "another").await?, Outcome::Performed(1));
    assert_eq!(effects(&pool).await, 1);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn in_flight_is_in_flight_until_it_completes_or_is_dropped(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let reject = async |name: &str| {
        let key = key(name);
        rejecting().run(&pool, &key, "body", async |_| -> Result<i64, Error> { panic!("not performed") }).await
    };
    let call = testing::in_flight(&pool, &key("a"), "body").await?;
    assert!(matches!(reject("a").await, Err(Error::InFlight { .. })));
    call.complete(&7).await?;
    assert_eq!(reject("a").await?, Outcome::Replayed(7));

    let call = testing::in_flight(&pool, &key("b"), "body").await?;
    assert!(matches!(reject("b").await, Err(Error::InFlight { .. })));
    drop(call);
    let outcome: Outcome<i64> = Idempotency::new().run(&pool, &key("b"), "body", async |_| Ok::<_, Error>(8)).await?;
    assert_eq!(outcome, Outcome::Performed(8));
    Ok(())
}

async fn state(pool: &PgPool, key: &Key) -> anyhow::Result<String> {
    let shown = show(pool, key).await?;
    Ok(shown.map_or_else(|| "no record".to_owned(), |shown| shown.state.to_string()))
}

/// The answer to a call with the same body.
async fn answer(pool: &PgPool, key: &Key, policy: Option<Policy>) -> String {
    let answer: Result<Outcome<i64>, Error> = match policy {
        None => rejecting().run(pool, key, "body", async |_| Ok(9)).await,
        Some(policy) => {
            ensure_leased(pool, key, "body", policy, async |lease| -> Result<i64, Error> { Ok(lease.attempt().into()) })
                .await
        }
    };
    match answer {
        Ok(outcome) => format!("{outcome:?}"),
        Err(Error::InFlight { .. }) => "in flight".to_owned(),
        Err(Error::Indeterminate { attempt, last_error, .. }) => format!("indeterminate {attempt} {last_error:?}"),
        Err(error) => format!("{error:?}"),
    }
}

/// `operator::show` names each state, and the next call gets the documented answer.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn every_state_gets_its_documented_answer(pool: PgPool) -> anyhow::Result<()> {
    let (least, most) = (Some(AT_LEAST_ONCE), Some(AT_MOST_ONCE));
    let key = key("a");
    for (fixture, is, policy, expected) in [
        (Fixture::completed(&key, "body", &7)?, "completed", None, "Replayed(7)"),
        (Fixture::completed(&key, "body", &7)?.with_mode(Mode::AtMostOnce), "completed", most, "Replayed(7)"),
        (Fixture::completed(&key, "other", &7)?.expired(), "expired", None, "Performed(9)"),
        (Fixture::leased(&key, "body", AT_LEAST_ONCE)?, "in_flight", least, "in flight"),
        (Fixture::leased(&key, "body", AT_LEAST_ONCE)?.expired(), "in_flight", least, "in flight"),
        (Fixture::lapsed(&key, "body", AT_LEAST_ONCE)?.with_attempt(3), "lapsed", least, "Performed(4)"),
        (Fixture::lapsed(&key, "body", IN_STEPS)?, "lapsed", Some(IN_STEPS), "Performed(2)"),
        (
            Fixture::lapsed(&key, "body", IN_STEPS)?.with_step_in_doubt("text"),
            "indeterminate",
            Some(IN_STEPS),
            "indeterminate 1 None",
        ),
        (Fixture::lapsed(&key, "body", AT_MOST_ONCE)?, "indeterminate", most, "indeterminate 1 None"),
        (
            Fixture::lapsed(&key, "body", AT_MOST_ONCE)?.with_attempt(2).with_last_error("lost"),
            "indeterminate",
            most,
            "indeterminate 2 Some(\"lost\")",
        ),
        (Fixture::lapsed(&key, "body", AT_MOST_ONCE)?.expired(), "expired", most, "Performed(1)"),
        (Fixture::released(&key, "body")?, "released", None, "Performed(9)"),
        (Fixture::released(&key, "body")?.with_mode(Mode::AtMostOnce), "released", most, "Performed(2)"),
        (Fixture::indeterminate(&key, "body")?, "indeterminate", None, "indeterminate 1 None"),
        (Fixture::indeterminate(&key, "body")?.expired(), "expired", None, "Performed(9)"),
    ] {
        let named = format!("{fixture:?}");
        fixture.write(&pool).await?;
        assert_eq!(state(&pool, &key).await?, is, "{named}");
        assert_eq!(answer(&pool, &key, policy).await, expected, "{named}");
    }
    Ok(())
}

/// What earlier attempts have stored is there for the next attempt, for an operator and for a resumer.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn steps_and_a_stored_request_are_as_an_attempt_leaves_them(pool: PgPool) -> anyhow::Result<()> {
    let key = key("a");
    let lapsed = || Fixture::lapsed(&key, "body", IN_STEPS)?.with_step("ride", &7);
    let leasing = Leasing::new(IN_STEPS)?.with_max_attempts(NonZeroU32::MAX);
    lapsed()?.with_stored_request("body")?.write(&pool).await?;
    let resumed = leasing.resume_one(&pool, key.operation(), async |lease: &Lease, body: String| {
        let ride = lease.step("ride", async |_| -> Result<i64, Error> { panic!("stored") }).await?;
        Ok::<_, Error>(format!("{body} {ride} {}", lease.attempt()))
    });
    assert_eq!(resumed.await?.expect("a stored request"), "body 7 2");

    lapsed()?.with_step_in_doubt("text").write(&pool).await?;
    let refused = leasing.acquire::<String, _>(&pool, &key, "body").await;
    assert!(matches!(&refused, Err(Error::Indeterminate { steps, .. }) if *steps == ["text"]), "{refused:?}");
    let shown = show(&pool, &key).await?.expect("a record");
    let steps: Vec<_> = shown.steps.iter().map(|step| (step.name.as_str(), step.in_doubt, step.at.is_some())).collect();
    assert_eq!(steps, [("ride", false, true), ("text", true, true)]);
    assert!(!shown.resumable, "an earlier fixture's request is gone");
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_mark_is_a_duplicate_until_it_expires(pool: PgPool) -> anyhow::Result<()> {
    for (fixture, expected) in
        [(Fixture::marked(&key("a")), Marked::Duplicate), (Fixture::marked(&key("a")).expired(), Marked::First)]
    {
        fixture.write(&pool).await?;
        let mut tx = pool.begin().await?;
        assert_eq!(mark(&mut tx, &key("a"), DAY).await?, expected);
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn time_passes_when_the_test_moves_it(pool: PgPool) -> anyhow::Result<()> {
    let key = key("a");
    for (move_it, is) in [(0, "completed"), (1, "completed"), (2, "expired"), (3, "expired")] {
        Fixture::completed(&key, "body", &7)?.write(&pool).await?;
        match move_it {
            0 => {}
            1 => age(&pool, &key, DAY - HOUR).await?,
            2 => age(&pool, &key, DAY).await?,
            _ => expire(&pool, &key).await?,
        }
        assert_eq!(state(&pool, &key).await?, is, "{move_it}");
    }

    // A live lease protects its record, until it lapses.
    let live = Fixture::leased(&key, "body", Policy::AtLeastOnce { lease: HOUR })?;
    live.clone().write(&pool).await?;
    expire_in(&pool, &key, Duration::ZERO).await?;
    assert_eq!(state(&pool, &key).await?, "in_flight");
    lapse(&pool, &key).await?;
    assert_eq!(state(&pool, &key).await?, "expired");
    live.clone().write(&pool).await?;
    lapse(&pool, &key).await?;
    assert_eq!(state(&pool, &key).await?, "lapsed");
    live.clone().write(&pool).await?;
    age(&pool, &key, HOUR).await?;
    assert_eq!(state(&pool, &key).await?, "lapsed");
    live.write(&pool).await?;
    expire(&pool, &key).await?;
    assert_eq!(state(&pool, &key).await?, "expired");
    Ok(())
}

/// Otherwise a typing error in a key would make a test that tests nothing.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_record_that_does_not_exist_cannot_be_moved(pool: PgPool) -> anyhow::Result<()> {
    Fixture::completed(&key("a"), "body", &7)?.write(&pool).await?;
    for moved in [
        age(&pool, &key("b"), HOUR).await,
        expire(&pool, &key("b")).await,
        lapse(&pool, &key("b")).await,
        lapse(&pool, &key("a")).await,
    ] {
        assert!(matches!(moved, Err(Error::Database(sqlx::Error::RowNotFound))), "{moved:?}");
    }
    assert_eq!(once(&pool, &key("a"), "body").await?, Outcome::Replayed(7), "it is as it was");
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn a_state_that_no_call_leaves_behind_is_refused(pool: PgPool) -> anyhow::Result<()> {
    let key = key("a");
    let policy = Policy::AtLeastOnce { lease: HOUR };
    for (impossible, expected) in [
        (Fixture::completed(&key, "body", &7)?.with_attempt(0), "attempts_count_from_one"),
        (Fixture::completed(&key, "body", &7)?.with_mode(Mode::Mark), "fingerprint_unless_mark"),
        (Fixture::marked(&key).with_mode(Mode::Transaction), "fingerprint_unless_mark"),
        (Fixture::indeterminate(&key, "body")?.with_mode(Mode::AtMostOnce), "unfinished_lease_has_a_deadline"),
        (Fixture::leased(&key, "body", policy)?.with_mode(Mode::Transaction), "deadline_only_for_leases"),
        (Fixture::lapsed(&key, "body", policy)?.with_step("ride", &7)?, "steps_only_in_steps"),
        (Fixture::completed(&key, "body", &7)?.with_mode(Mode::InSteps).with_step_in_doubt("a"), "steps_only_in_steps"),
        (Fixture::lapsed(&key, "body", AT_MOST_ONCE)?.with_stored_request("body")?, "request_only_to_resume"),
        (
            Fixture::completed(&key, "body", &7)?.with_mode(Mode::InSteps).with_stored_request("body")?,
            "request_only_to_resume",
        ),
    ] {
        let refused = impossible.write(&pool).await;
        assert!(matches!(refused, Err(Error::ImpossibleRecord { rule, .. }) if rule == expected), "{refused:?}");
    }
    let records: i64 = sqlx::query_scalar("select count(*) from idempotency.record").fetch_one(&pool).await?;
    assert_eq!(records, 0);
    Ok(())
}
