//! Reconciling: which operations are visited, when a person gets them, and who else decides.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, Finding, InDoubt, LeaseOptions, Policy, Reconciler, Visit};
use pg_idempotency::operator::{State, show};
use pg_idempotency::testing::lapse;
use pg_idempotency::{Error, Misuse};
use sqlx::{Executor as _, PgPool};

use super::reconcile::*;
use crate::lease::resume::{self, MINUTE};
use crate::support::{assert_changed, key, shown};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_look_that_fails_is_stored_and_the_last_one_leaves_the_key_to_a_person(pool: PgPool) -> anyhow::Result<()> {
    let reconciler = reconciler().looks(2, 4).time_out(Duration::from_millis(20));
    in_doubt(&pool, "a").await;
    note(&pool, &reconciler).await;
    let errors = ["the gateway is away: no route", "the look-up panicked", "the look-up took longer than 20ms"];
    for (look, expected) in errors.into_iter().enumerate() {
        let failing = async |_: &InDoubt| -> anyhow::Result<Finding> {
            match look {
                0 => Err(anyhow::anyhow!("no route\0").context("the gateway is away")),
                1 => panic!("a bug of the service"),
                _ => std::future::pending().await,
            }
        };
        assert_eq!(reconciler.visit_one(&pool, failing).await?, Visit::Undecided, "{expected}");
        let shown = &looks(&pool).await[0];
        assert_eq!((shown.error.as_deref(), shown.finding.as_deref()), (Some(expected), Some("failed")));
        assert_eq!((shown.no_trace, shown.given_up), (0, false));
        pass_time(&pool).await;
    }
    assert_eq!(says(&pool, &reconciler, Finding::Unknown).await, Visit::GivenUp);
    let shown = &looks(&pool).await[0];
    assert_eq!((shown.looks, shown.finding.as_deref(), shown.given_up), (4, Some("unknown"), true));
    assert_eq!(shown.next, None);
    pass_time(&pool).await;
    assert_eq!(asks_nobody(&pool, &reconciler).await, Visit::Nothing, "a person decides");
    assert_eq!(state(&pool).await, State::Indeterminate);
    crate::support::shown(&pool, &key("a")).await.resolve(&pool, &"sent".to_owned(), MINUTE).await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn after_the_time_that_the_service_gives_nobody_looks_any_more(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    let reconciler = reconciler().give_up_after(MINUTE * 60);
    note(&pool, &reconciler).await;
    assert_eq!(says(&pool, &reconciler, Finding::Unknown).await, Visit::Undecided);
    pass_time(&pool).await;
    pool.execute(
        "update idempotency.record set looks = jsonb_set(looks, '{since}', to_jsonb(extract(epoch from now() - interval '3601 s')))",
    )
    .await?;
    let asking = async |_: &InDoubt| -> Result<Finding, Error> { panic!("it is over") };
    assert_eq!(reconciler.visit_one(&pool, asking).await?, Visit::GivenUp);
    let shown = &looks(&pool).await[0];
    assert_eq!((shown.looks, shown.at.len(), shown.given_up), (1, 1, true));
    Ok(())
}

/// Otherwise a retry would perform, before anybody has decided.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_visit_remembers_the_key_but_brings_no_expired_one_back(pool: PgPool) -> anyhow::Result<()> {
    let last_minute = "update idempotency.record set expires_at = now() + interval '1 min'";
    let left = "select extract(epoch from expires_at - now())::float8 from idempotency.record";
    in_doubt(&pool, "a").await;
    let day = Duration::from_secs(24 * 3600).as_secs_f64();
    pool.execute(last_minute).await?;
    assert_eq!(asks_nobody(&pool, &reconciler()).await, Visit::Noted);
    assert!(scalar::<f64>(&pool, left).await > day - 60.0);
    pass_time(&pool).await;
    let looked_up = async |_: &InDoubt| {
        assert!(scalar::<f64>(&pool, left).await > day - 60.0, "the reservation");
        pool.execute(last_minute).await?;
        Ok::<_, Error>(Finding::NoTrace)
    };
    pool.execute(last_minute).await?;
    assert_eq!(reconciler().visit_one(&pool, looked_up).await?, Visit::Undecided);
    assert!(scalar::<f64>(&pool, left).await > day - 60.0, "the end of the look");
    // A person has pinned it.
    pool.execute("update idempotency.record set expires_at = 'infinity'").await?;
    pass_time(&pool).await;
    assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Undecided);
    assert!(scalar::<bool>(&pool, "select expires_at = 'infinity' from idempotency.record").await);
    pass_time(&pool).await;
    let expiring = async |_: &InDoubt| {
        pool.execute("update idempotency.record set expires_at = now() - interval '1 ms'").await?;
        Ok::<_, Error>(Finding::NoTrace)
    };
    assert_eq!(reconciler().visit_one(&pool, expiring).await?, Visit::Overtaken);
    assert_eq!(state(&pool).await, State::Expired);
    assert_eq!(asks_nobody(&pool, &reconciler()).await, Visit::Nothing);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn only_operations_in_doubt_that_have_stored_their_request_are_visited(pool: PgPool) -> anyhow::Result<()> {
    let Acquired::Owner(live) = leasing().acquire::<String, _>(&pool, &key("live"), "body").await? else { panic!() };
    in_doubt(&pool, "completed").await;
    shown(&pool, &key("completed")).await.resolve(&pool, &1, MINUTE).await?;
    in_doubt(&pool, "released").await;
    shown(&pool, &key("released")).await.release(&pool, "no").await?;
    in_doubt(&pool, "no request").await;
    pool.execute("update idempotency.record set request = null where value = 'no request'").await?;
    in_doubt(&pool, "another").await;
    pool.execute("update idempotency.record set operation = 'another' where value = 'another'").await?;
    steps_in_doubt(&pool, &["text"]).await;
    pool.execute("update idempotency.record set value = 'in steps' where value = 'a'").await?;
    assert_eq!(asks_nobody(&pool, &reconciler()).await, Visit::Nothing);
    let Acquired::Owner(lapsed) = resume::leasing().acquire::<String, _>(&pool, &key("b"), "body").await? else {
        panic!()
    };
    drop(lapsed);
    lapse(&pool, &key("b")).await?;
    pool.execute("delete from idempotency.record where value = 'in steps'").await?;
    assert_eq!(asks_nobody(&pool, &of_steps()).await, Visit::Nothing, "no step is in doubt");
    live.complete(&1).await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn somebody_elses_decision_wins(pool: PgPool) -> anyhow::Result<()> {
    let decisions = [
        "completed late",
        "resolved",
        "failed late",
        "released",
        "gone",
        "performed after a release",
        "in doubt after a release",
    ];
    for (decision, finds) in decisions.iter().flat_map(|decision| [(*decision, true), (*decision, false)]) {
        pool.execute("truncate idempotency.record").await?;
        let Acquired::Owner(owner) = leasing().acquire::<String, _>(&pool, &key("a"), "body").await? else { panic!() };
        lapse(&pool, &key("a")).await?;
        note(&pool, &reconciler()).await;
        for _ in 0..2 {
            assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Undecided);
            pass_time(&pool).await;
        }
        let seen = shown(&pool, &key("a")).await;
        let mut owner = Some(owner);
        let meanwhile = async |_: &InDoubt| {
            match decision {
                "completed late" => owner.take().expect("once").complete(&"by the owner".to_owned()).await?,
                "resolved" => drop(seen.resolve(&pool, &"by a person".to_owned(), MINUTE).await.expect("resolved")),
                "failed late" => {
                    let lapse = "update idempotency.record set token = token + 1, looks = null";
                    pool.execute(lapse).await?;
                }
                "released" => drop(seen.release(&pool, "by a person").await.expect("released")),
                "performed after a release" | "in doubt after a release" => {
                    seen.release(&pool, "by a person").await.expect("released");
                    let next = leasing().acquire::<String, _>(&pool, &key("a"), "body").await?;
                    let Acquired::Owner(next) = next else { panic!("it was released") };
                    if decision == "performed after a release" {
                        next.complete(&"by the next".to_owned()).await?;
                    } else {
                        drop(next);
                        lapse(&pool, &key("a")).await?;
                    }
                }
                _ => {
                    pool.execute("delete from idempotency.record").await?;
                }
            }
            Ok::<_, Error>(if finds { sent() } else { Finding::NoTrace })
        };
        let visit = reconciler().visit_one(&pool, meanwhile).await?;
        let contradicted = finds && (decision.contains("release") || decision == "gone");
        assert_eq!(visit, if contradicted { Visit::Contradicted } else { Visit::Overtaken }, "{decision} {finds}");
        let left: Option<String> = sqlx::query_scalar(
            "select coalesce(convert_from(response_body, 'utf8'), last_error) from idempotency.record",
        )
        .fetch_optional(&pool)
        .await?
        .flatten();
        assert!(left.as_ref().is_none_or(|left| left.contains("by ")), "{decision}: {left:?}");
        drop(owner);
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_effect_whose_answer_cannot_be_stored_is_never_released(pool: PgPool) -> anyhow::Result<()> {
    let reconciler = of_steps().looks(2, 4);
    steps_in_doubt(&pool, &["text"]).await;
    note(&pool, &reconciler).await;
    let too_large = Finding::took_effect(&"x".repeat(64 * 1024))?;
    assert_eq!(says(&pool, &reconciler, too_large).await, Visit::Undecided);
    let shown = &looks(&pool).await[0];
    assert_eq!((shown.step.as_deref(), shown.finding.as_deref()), (Some("text"), Some("took_effect")));
    assert!(shown.error.as_ref().is_some_and(|error| error.contains("bytes")), "{shown:?}");
    for visit in [Visit::Undecided, Visit::Undecided, Visit::GivenUp] {
        pass_time(&pool).await;
        assert_eq!(says(&pool, &reconciler, Finding::NoTrace).await, visit, "a later look does not outvote it");
    }
    assert_eq!(looks(&pool).await[0].no_trace, 0);

    #[derive(serde::Serialize, serde::Deserialize)]
    struct Lossy {
        #[serde(skip_serializing)]
        _lost: i32,
    }
    let error = Finding::took_effect(&Lossy { _lost: 1 }).expect_err("no retry could decode it");
    assert!(matches!(error, Error::Unencodable { .. }), "{error:?}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_dry_run_asks_and_settles_nothing_and_counts_nothing(pool: PgPool) -> anyhow::Result<()> {
    let dry = reconciler().looks(2, 2).dry_run(true);
    in_doubt(&pool, "a").await;
    note(&pool, &dry).await;
    for finding in [Finding::NoTrace, Finding::NoTrace, Finding::Unknown, Finding::NoTrace] {
        let said = format!("{finding:?}");
        assert_eq!(says(&pool, &dry, finding).await, Visit::Undecided, "{said}");
        assert_eq!(asks_nobody(&pool, &dry).await, Visit::Nothing, "it keeps its distance");
        let shown = &looks(&pool).await[0];
        assert_eq!((shown.looks, shown.no_trace, shown.given_up), (0, 0, false));
        pass_time(&pool).await;
    }
    let switched_on = dry.looks(2, 9).dry_run(false);
    for _ in 0..4 {
        assert_eq!(says(&pool, &switched_on, Finding::Unknown).await, Visit::Undecided);
        pass_time(&pool).await;
    }
    assert_eq!(looks(&pool).await[0].looks, 4);
    let trying = async |asked: &InDoubt| {
        assert_eq!(asked.look(), 5, "the look that it tries");
        Ok::<_, Error>(sent())
    };
    assert_eq!(switched_on.clone().dry_run(true).visit_one(&pool, trying).await?, Visit::Undecided);
    assert!(seconds_to_the_next_look(&pool).await <= QUIET.as_secs_f64(), "the first distance");
    assert_eq!(state(&pool).await, State::Indeterminate);
    pass_time(&pool).await;
    assert_eq!(says(&pool, &switched_on, sent()).await, Visit::Resolved);
    Ok(())
}

/// A look that has ended without an answer, or whose answer is not final, may have been told that it took effect. An
/// error says that the other service has said nothing.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn only_a_look_without_a_trace_releases_and_one_without_an_answer_begins_the_count_anew(
    pool: PgPool,
) -> anyhow::Result<()> {
    let failing = async |_: &InDoubt| -> Result<Finding, &str> { Err("503") };
    let panicking = async |_: &InDoubt| -> Result<Finding, &str> { panic!("found it") };
    in_doubt(&pool, "a").await;
    let patient = reconciler().looks(3, 20);
    note(&pool, &patient).await;
    for between in ["unknown", "panicked", "timed out", "failed"] {
        for _ in 0..2 {
            assert_eq!(says(&pool, &patient, Finding::NoTrace).await, Visit::Undecided, "{between}");
            pass_time(&pool).await;
        }
        // The next release of the service is content with fewer.
        let next_release = patient.clone().looks(2, 20);
        let visit = match between {
            "unknown" => says(&pool, &next_release, Finding::Unknown).await,
            "failed" => next_release.visit_one(&pool, failing).await?,
            "timed out" => {
                let impatient = next_release.time_out(Duration::from_millis(5));
                impatient
                    .visit_one(&pool, async |_: &InDoubt| -> Result<Finding, &str> { std::future::pending().await })
                    .await?
            }
            _ => next_release.visit_one(&pool, panicking).await?,
        };
        let counted = if between == "failed" { 2 } else { 0 };
        assert_eq!((visit, looks(&pool).await[0].no_trace), (Visit::Undecided, counted), "{between}");
        pass_time(&pool).await;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn no_distance_is_longer_than_what_is_left_of_the_time_that_the_service_gives(
    pool: PgPool,
) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    let reconciler = reconciler().looks(2, 20).give_up_after(MINUTE * 60);
    note(&pool, &reconciler).await;
    for _ in 0..10 {
        assert_eq!(says(&pool, &reconciler, Finding::Unknown).await, Visit::Undecided);
        assert!(seconds_to_the_next_look(&pool).await <= 3600.0);
        pass_time(&pool).await;
    }
    Ok(())
}

/// A look without a distance would follow at once, and the first looks would release a text that arrives later.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_longest_time_that_a_service_can_give_takes_no_distance_away(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    let years = Duration::from_secs(10 * 366 * 24 * 3600);
    let reconciler = reconciler().give_up_after(years);
    note(&pool, &reconciler).await;
    assert_eq!(says(&pool, &reconciler, Finding::NoTrace).await, Visit::Undecided);
    assert!(seconds_to_the_next_look(&pool).await > 60.0);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn options_that_leave_nothing_to_reconcile_are_refused(pool: PgPool) -> anyhow::Result<()> {
    let problem = |leasing| match Reconciler::new(leasing, "operation", QUIET) {
        Err(Error::Misuse(Misuse::Options { problem, .. })) => problem,
        other => panic!("{other:?}"),
    };
    assert!(problem(leasing().store_request(false)).contains("store_request"));
    let at_least_once = LeaseOptions::new(Policy::AtLeastOnce { lease: MINUTE }).store_request(true);
    assert!(problem(at_least_once).contains("AtLeastOnce"));
    for (no_trace, most) in [(0, 10), (1, 10), (3, 2)] {
        let refused = std::panic::catch_unwind(|| drop(reconciler().looks(no_trace, most)));
        assert!(refused.is_err(), "{no_trace} of {most}");
    }
    let (lease, day) = (Duration::from_secs(40), Duration::from_secs(24 * 3600));
    assert!(Reconciler::new(leasing(), "operation", day).is_err());
    let nothing = async |_: &InDoubt| Ok::<_, Error>(Finding::NoTrace);
    let contradictions = [
        ("interval", reconciler().interval(lease)),
        ("time-out", reconciler().time_out(lease)),
        ("distance", reconciler().distance(day)),
    ];
    for (setting, reconciler) in contradictions {
        let started = reconciler.run(&pool, std::future::ready(()), nothing).await;
        let visited = reconciler.visit_one(&pool, nothing).await.map(drop);
        for refused in [started, visited] {
            let is_refused =
                matches!(&refused, Err(Error::Misuse(Misuse::Options { problem, .. })) if problem.contains(setting));
            assert!(is_refused, "{setting}: {refused:?}");
        }
    }
    let longest = reconciler().interval(lease / 2).time_out(lease / 2).distance(day / 2);
    longest.run(&pool, std::future::ready(()), nothing).await.expect("options that fit");
    // The request is there to be looked up, and nobody does the work again.
    let resumed = leasing().max_attempts(std::num::NonZeroU32::MIN);
    let resumed = resumed
        .resume_one(&pool, "operation", async |_: &_, _: String| -> Result<String, Error> { panic!("at most once") })
        .await;
    assert!(matches!(resumed, Err(Error::Misuse(Misuse::Options { .. }))), "{resumed:?}");
    in_doubt(&pool, "a").await;
    assert!(!show(&pool, &key("a")).await?.expect("a record").resumable);
    Ok(())
}

/// Each attempt has its own looks, and a decision ends them. The rules of `strict.sql` check the rest.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_next_attempt_begins_without_looks(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    note(&pool, &reconciler()).await;
    for _ in 0..2 {
        assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Undecided);
        pass_time(&pool).await;
    }
    shown(&pool, &key("a")).await.release(&pool, "by a person").await?;
    assert!(scalar::<bool>(&pool, "select looks is null from idempotency.record").await);
    let Acquired::Owner(lease) = leasing().acquire::<String, _>(&pool, &key("a"), "body").await? else { panic!() };
    drop(lease);
    lapse(&pool, &key("a")).await?;
    note(&pool, &reconciler()).await;
    assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Undecided);
    assert_eq!(looks(&pool).await[0].no_trace, 1);
    Ok(())
}

/// A person who looked before a machine woke decides about nothing.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_operators_decision_is_about_the_lease_that_was_shown(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    let stale = shown(&pool, &key("a")).await;
    revive_and_lapse(&pool).await;
    assert_changed(stale.clone().release(&pool, "not sent").await, "release");
    assert_changed(stale.resolve(&pool, &"sent".to_owned(), MINUTE).await, "resolve");
    shown(&pool, &key("a")).await.release(&pool, "not sent").await?;

    pool.execute("truncate idempotency.record").await?;
    steps_in_doubt(&pool, &["email", "text"]).await;
    let stale = shown(&pool, &key("a")).await;
    revive_and_lapse(&pool).await;
    assert_changed(stale.clone().step("text").release(&pool, "not sent").await, "release a step");
    assert_changed(stale.step("text").resolve(&pool, &1).await, "resolve a step");
    let shown = shown(&pool, &key("a")).await.step("email").release(&pool, "not sent").await?;
    shown.step("text").resolve(&pool, &1).await?;
    Ok(())
}

/// It ends between two searches at once, and the look that is under way first.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_reconciler_ends_at_the_shutdown_after_the_look_that_is_under_way(pool: PgPool) -> anyhow::Result<()> {
    let reconciler = reconciler().interval(Duration::from_millis(10));
    let stopped = reconciler.run(&pool, std::future::ready(()), async |_: &InDoubt| Ok::<_, Error>(sent()));
    tokio::time::timeout(Duration::from_secs(60), stopped).await??;

    in_doubt(&pool, "a").await;
    note(&pool, &reconciler).await;
    let (shutdown, stopped) = tokio::sync::oneshot::channel::<()>();
    let shutdown = std::sync::Mutex::new(Some(shutdown));
    // The shutdown comes during the look.
    let look_up = async |_: &InDoubt| {
        drop(shutdown.lock().expect("no panic holds it").take());
        tokio::task::yield_now().await;
        Ok::<_, Error>(sent())
    };
    let running = reconciler.run(&pool, async { drop(stopped.await) }, look_up);
    tokio::time::timeout(Duration::from_secs(60), running).await??;
    assert_eq!(state(&pool).await, State::Completed, "what the look found is stored");
    Ok(())
}
