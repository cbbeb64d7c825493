//! Reconciling: which operations are visited, when a person gets them, and which other callers decide.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, Finding, InDoubt, LeaseOptions, Policy, Reconciler, Visit};
use pg_idempotency::operator::{Probed, State, show};
use pg_idempotency::testing::lapse;
use pg_idempotency::{DEFAULT_RETENTION, Error, Misuse};
use sqlx::{Executor as _, PgPool};

use super::reconcile::*;
use crate::lease::resume::{self, MINUTE};
use crate::support::{assert_changed, key, shown};

/// A look-up may last for half of the lease.
fn impatient() -> Reconciler {
    let leasing = LeaseOptions::new(Policy::AtMostOnce { lease: Duration::from_millis(40) }).store_request(true);
    Reconciler::new(leasing, "operation", QUIET).expect("options")
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_probe_that_fails_is_stored_and_the_last_one_leaves_the_key_to_a_person(pool: PgPool) -> anyhow::Result<()> {
    let reconciler = impatient().probes(2, 4);
    in_doubt(&pool, "a").await;
    note(&pool, &reconciler).await;
    let errors = [
        (Probed::Failed, "the gateway is away: no route"),
        (Probed::Unknown, "the look-up panicked"),
        (Probed::Unknown, "the look-up took longer than 20ms"),
    ];
    for (probe, (finding, expected)) in errors.into_iter().enumerate() {
        let failing = async |_: &InDoubt| -> anyhow::Result<Finding> {
            match probe {
                0 => Err(anyhow::anyhow!("no route\0").context("the gateway is away")),
                1 => panic!("a bug of the service"),
                _ => std::future::pending().await,
            }
        };
        assert_eq!(reconciler.visit_one(&pool, failing).await?, Visit::Undecided, "{expected}");
        let shown = &probes(&pool).await[0];
        assert_eq!((shown.error.as_deref(), shown.finding), (Some(expected), Some(finding)));
        assert_eq!((shown.no_trace, shown.next.is_some()), (0, true));
        pass_time(&pool).await;
    }
    assert_eq!(says(&pool, &reconciler, Finding::Unknown).await, Visit::GivenUp);
    let shown = &probes(&pool).await[0];
    assert_eq!((shown.probes, shown.finding, shown.next), (4, Some(Probed::Unknown), None));
    pass_time(&pool).await;
    assert_eq!(asks_nobody(&pool, &reconciler).await, Visit::Nothing, "a person decides");
    assert_eq!(state(&pool).await, State::Indeterminate);
    crate::support::shown(&pool, &key("a")).await.resolve(&pool, &"sent".to_owned(), MINUTE).await?;
    Ok(())
}

/// The process of the last permitted probe died, or the next release of the service permits fewer.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_key_that_has_reached_its_limit_is_left_to_a_person_without_another_probe(
    pool: PgPool,
) -> anyhow::Result<()> {
    // An effect may have happened since the last probe, so probes without a trace do not release the key now.
    for last in [Finding::Unknown, Finding::NoTrace] {
        pool.execute("truncate idempotency.record").await?;
        in_doubt(&pool, "a").await;
        note(&pool, &reconciler()).await;
        for finding in [Finding::NoTrace, last] {
            assert_eq!(says(&pool, &reconciler(), finding).await, Visit::Undecided);
            pass_time(&pool).await;
        }
        let asking = async |_: &InDoubt| -> Result<Finding, Error> { panic!("it is over") };
        assert_eq!(reconciler().probes(2, 2).visit_one(&pool, asking).await?, Visit::GivenUp);
        assert!(probes(&pool).await.iter().all(|probes| probes.probes == 2 && probes.next.is_none()));
    }
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
    assert!(scalar::<f64>(&pool, left).await > day - 60.0, "the end of the probe");
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
                    let lapse = "update idempotency.record set token = token + 1, probes = null";
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
    let reconciler = of_steps().probes(2, 4);
    steps_in_doubt(&pool, &["text"]).await;
    note(&pool, &reconciler).await;
    let too_large = Finding::took_effect(&"x".repeat(64 * 1024))?;
    assert_eq!(says(&pool, &reconciler, too_large).await, Visit::Undecided);
    let shown = &probes(&pool).await[0];
    assert_eq!((shown.step.as_deref(), shown.finding), (Some("text"), Some(Probed::TookEffect)));
    assert!(shown.error.as_ref().is_some_and(|error| error.contains("bytes")), "{shown:?}");
    for visit in [Visit::Undecided, Visit::Undecided, Visit::GivenUp] {
        pass_time(&pool).await;
        assert_eq!(says(&pool, &reconciler, Finding::NoTrace).await, visit, "a later probe does not outvote it");
    }
    let left = &probes(&pool).await[0];
    assert_eq!((left.probes, left.no_trace, left.finding), (4, 0, Some(Probed::TookEffect)));
    assert_eq!(left.error, shown.error, "a person sees why");

    #[derive(serde::Serialize, serde::Deserialize)]
    struct Lossy {
        #[serde(skip_serializing)]
        _lost: i32,
    }
    let error = Finding::took_effect(&Lossy { _lost: 1 }).expect_err("no retry could decode it");
    assert!(matches!(error, Error::Unencodable { .. }), "{error:?}");
    Ok(())
}

/// A probe that has ended without an answer, or whose answer is not final, may have been told that the operation took
/// effect. An error says that the other service has said nothing.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn only_a_probe_without_a_trace_releases_and_one_without_an_answer_begins_the_count_anew(
    pool: PgPool,
) -> anyhow::Result<()> {
    let failing = async |_: &InDoubt| -> Result<Finding, &str> { Err("503") };
    let panicking = async |_: &InDoubt| -> Result<Finding, &str> { panic!("found it") };
    in_doubt(&pool, "a").await;
    let patient = reconciler().probes(3, 20);
    note(&pool, &patient).await;
    for between in ["unknown", "panicked", "timed out", "failed"] {
        for _ in 0..2 {
            assert_eq!(says(&pool, &patient, Finding::NoTrace).await, Visit::Undecided, "{between}");
            pass_time(&pool).await;
        }
        // The next release of the service is content with fewer.
        let next_release = patient.clone().probes(2, 20);
        let visit = match between {
            "unknown" => says(&pool, &next_release, Finding::Unknown).await,
            "failed" => next_release.visit_one(&pool, failing).await?,
            "timed out" => {
                let silent = async |_: &InDoubt| -> Result<Finding, &str> { std::future::pending().await };
                impatient().probes(2, 20).visit_one(&pool, silent).await?
            }
            _ => next_release.visit_one(&pool, panicking).await?,
        };
        let counted = if between == "failed" { 2 } else { 0 };
        assert_eq!((visit, probes(&pool).await[0].no_trace), (Visit::Undecided, counted), "{between}");
        pass_time(&pool).await;
    }
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
    for impossible in [String::new(), "a\0".to_owned(), "x".repeat(256)] {
        let refused = Reconciler::new(leasing(), &impossible, QUIET).err();
        assert!(matches!(refused, Some(Error::Misuse(Misuse::Options { .. }))), "{impossible:?}: {refused:?}");
    }
    for (no_trace, most) in [(0, 10), (1, 10), (3, 2)] {
        let refused = std::panic::catch_unwind(|| drop(reconciler().probes(no_trace, most)));
        assert!(refused.is_err(), "{no_trace} of {most}");
    }
    // The first probe comes a lease and the quiet time after the first visit, and must come before the key expires.
    let longest = (DEFAULT_RETENTION - LEASE) / 2;
    assert!(Reconciler::new(leasing(), "operation", longest).is_ok());
    assert!(Reconciler::new(leasing(), "operation", longest + Duration::from_nanos(1)).is_err());
    // The request is stored for the look-up, and no resumer does the work again.
    let resumed = leasing().max_attempts(std::num::NonZeroU32::MIN);
    let resumed = resumed
        .resume_one(&pool, "operation", async |_: &_, _: String| -> Result<String, Error> { panic!("at most once") })
        .await;
    assert!(matches!(resumed, Err(Error::Misuse(Misuse::Options { .. }))), "{resumed:?}");
    in_doubt(&pool, "a").await;
    assert!(!show(&pool, &key("a")).await?.expect("a record").resumable);
    Ok(())
}

/// Each probe remembers the record for the retention.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn no_distance_is_longer_than_half_of_the_retention(pool: PgPool) -> anyhow::Result<()> {
    let half = (DEFAULT_RETENTION / 2).as_secs_f64();
    in_doubt(&pool, "a").await;
    let reconciler = reconciler().distance(DEFAULT_RETENTION / 3).probes(2, u32::MAX);
    note(&pool, &reconciler).await;
    for _ in 0..3 {
        assert_eq!(says(&pool, &reconciler, Finding::Unknown).await, Visit::Undecided);
        let left = seconds_to_the_next_probe(&pool).await;
        assert!(left > half / 2.0 && left <= half, "{left}");
        pass_time(&pool).await;
    }
    Ok(())
}

/// Each attempt has its own probes, and a decision ends them. The rules of `strict.sql` check the rest.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_next_attempt_begins_without_probes(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    note(&pool, &reconciler()).await;
    for _ in 0..2 {
        assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Undecided);
        pass_time(&pool).await;
    }
    shown(&pool, &key("a")).await.release(&pool, "by a person").await?;
    assert!(scalar::<bool>(&pool, "select probes is null from idempotency.record").await);
    let Acquired::Owner(lease) = leasing().acquire::<String, _>(&pool, &key("a"), "body").await? else { panic!() };
    drop(lease);
    lapse(&pool, &key("a")).await?;
    note(&pool, &reconciler()).await;
    assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Undecided);
    assert_eq!(probes(&pool).await[0].no_trace, 1);
    Ok(())
}

/// A decision of a person changes nothing if a suspended process has woken since that person looked.
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

/// It ends between two searches at once, and the probe that is under way first.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_reconciler_ends_at_the_shutdown_after_the_probe_that_is_under_way(pool: PgPool) -> anyhow::Result<()> {
    let reconciler = impatient();
    let stopped = reconciler.run(&pool, std::future::ready(()), async |_: &InDoubt| Ok::<_, Error>(sent()));
    tokio::time::timeout(Duration::from_secs(60), stopped).await?;

    in_doubt(&pool, "a").await;
    note(&pool, &reconciler).await;
    let (shutdown, stopped) = tokio::sync::oneshot::channel::<()>();
    let shutdown = std::sync::Mutex::new(Some(shutdown));
    // The shutdown comes during the probe.
    let look_up = async |_: &InDoubt| {
        drop(shutdown.lock().expect("no panic holds it").take());
        tokio::task::yield_now().await;
        Ok::<_, Error>(sent())
    };
    let running = reconciler.run(&pool, async { drop(stopped.await) }, look_up);
    tokio::time::timeout(Duration::from_secs(60), running).await?;
    assert_eq!(state(&pool).await, State::Completed, "what the probe found is stored");
    Ok(())
}
