//! Reconciling: when an operation in doubt is probed, and which probes settle it.

use std::time::Duration;

use futures_util::future::{Either, select};
use pg_idempotency::lease::{Acquired, Finding, InDoubt, LeaseOptions, Policy, Reconciler, Visit};
use pg_idempotency::operator::{Probed, ShownProbes, State, show};
use pg_idempotency::testing::lapse;
use pg_idempotency::{Error, Outcome};
use rig::database::until_blocked;
use sqlx::{Executor as _, PgPool};

use crate::lease::resume;
use crate::lease::steps::Kind;
use crate::support::key;

pub(crate) const LEASE: Duration = Duration::from_secs(40);
pub(crate) const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: LEASE };
pub(crate) const QUIET: Duration = Duration::from_secs(120);

pub(crate) fn leasing() -> LeaseOptions {
    LeaseOptions::new(AT_MOST_ONCE).store_request(true)
}

pub(crate) fn reconciler() -> Reconciler {
    Reconciler::new(leasing(), "operation", QUIET).expect("options")
}

pub(super) fn of_steps() -> Reconciler {
    Reconciler::new(resume::leasing(), "operation", QUIET).expect("options")
}

/// An operation at most once whose process died in its work.
pub(crate) async fn in_doubt(pool: &PgPool, value: &str) {
    match leasing().acquire::<String, _>(pool, &key(value), "body").await.expect("acquired") {
        Acquired::Owner(lease) => drop(lease),
        Acquired::Replayed(response) => panic!("replayed {response}"),
    }
    lapse(pool, &key(value)).await.expect("lapsed");
}

/// An operation whose process died in at-most-once steps of these names.
pub(super) async fn steps_in_doubt(pool: &PgPool, names: &[&str]) {
    let Acquired::Owner(lease) =
        resume::leasing().acquire::<String, _>(pool, &key("a"), "body").await.expect("acquired")
    else {
        panic!("replayed")
    };
    for name in names {
        assert!(Kind::AtMostOnce.failing(&lease, name).await.is_err());
    }
    drop(lease);
    lapse(pool, &key("a")).await.expect("lapsed");
}

/// Lets the time until the next probe pass.
pub(crate) async fn pass_time(pool: &PgPool) {
    let moved = "update idempotency.record set probes = jsonb_set(probes, '{of}', (
        select jsonb_agg(
            case when probe -> 'next'::text = 'null'::jsonb then probe else probe || '{\"next\": 1}'::jsonb end
            order by place
        )
        from jsonb_array_elements(probes -> 'of'::text) with ordinality as of (probe, place)
    )) where probes is not null";
    pool.execute(moved).await.expect("probes");
}

pub(super) async fn says(pool: &PgPool, reconciler: &Reconciler, finding: Finding) -> Visit {
    let visit = reconciler.visit_one(pool, async |_: &InDoubt| Ok::<_, Error>(finding)).await;
    visit.expect("no error of the database")
}

/// Fails if it asks.
pub(super) async fn asks_nobody(pool: &PgPool, reconciler: &Reconciler) -> Visit {
    let asking = async |asked: &InDoubt| -> Result<Finding, Error> { panic!("it asked: {asked:?}") };
    let visit = reconciler.visit_one(pool, asking).await.expect("no error of the database");
    assert!(matches!(visit, Visit::Nothing | Visit::Noted), "{visit:?}");
    visit
}

/// The first visit, and the quiet time after it.
pub(super) async fn note(pool: &PgPool, reconciler: &Reconciler) {
    assert_eq!(asks_nobody(pool, reconciler).await, Visit::Noted);
    pass_time(pool).await;
}

pub(super) fn sent() -> Finding {
    Finding::took_effect(&"sent".to_owned()).expect("a text")
}

pub(super) async fn probes(pool: &PgPool) -> Vec<ShownProbes> {
    show(pool, &key("a")).await.expect("a look").expect("a record").probes
}

pub(super) async fn seconds_to_the_next_probe(pool: &PgPool) -> f64 {
    let next =
        "select (probes #> '{of,0,next}'::text[])::float8 - extract(epoch from now())::float8 from idempotency.record";
    scalar(pool, next).await
}

pub(super) async fn state(pool: &PgPool) -> State {
    show(pool, &key("a")).await.expect("a look").expect("a record").state
}

pub(super) async fn scalar<T>(pool: &PgPool, sql: &'static str) -> T
where
    T: Send + Unpin + for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    sqlx::query_scalar(sql).fetch_one(pool).await.expect("one value")
}

/// A machine that slept wakes, and its heartbeat revives the lease. Then it dies.
pub(super) async fn revive_and_lapse(pool: &PgPool) {
    pool.execute("update idempotency.record set lease_until = statement_timestamp()").await.expect("revived");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_effect_that_is_found_settles_at_once_and_every_retry_gets_its_answer(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    note(&pool, &reconciler()).await;
    let looked_up = async |asked: &InDoubt| {
        let shown = show(&pool, &key("a")).await?.expect("a record");
        assert_eq!((&asked.key, &asked.step, asked.attempt), (&key("a"), &None, 1));
        assert_eq!(Some(&asked.downstream_key), shown.downstream_key.as_ref());
        assert_eq!(asked.claimed_at, shown.claimed_at);
        assert_eq!(asked.request::<String>()?, "body");
        let error = asked.request::<u64>().expect_err("a text");
        assert!(matches!(&error, Error::Undecodable { .. }) && !format!("{error:?}").contains("body"), "{error:?}");
        Finding::took_effect(&"sent".to_owned())
    };
    assert_eq!(reconciler().visit_one(&pool, looked_up).await?, Visit::Resolved);
    let again = leasing().run(&pool, &key("a"), "body", async |_| -> Result<String, Error> { panic!("done") }).await?;
    assert_eq!(again, Outcome::Replayed("sent".to_owned()));
    assert!(probes(&pool).await.is_empty());
    assert_eq!(asks_nobody(&pool, &reconciler()).await, Visit::Nothing);
    Ok(())
}

/// Also if the last attempt that the service permits was the one in doubt: what is left is to finish.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_result_of_a_step_is_stored_and_the_attempt_that_finishes_is_permitted(pool: PgPool) -> anyhow::Result<()> {
    for took_effect in [true, false] {
        pool.execute("truncate idempotency.record").await?;
        steps_in_doubt(&pool, &["text"]).await;
        pool.execute("update idempotency.record set attempt = 4").await?;
        note(&pool, &of_steps()).await;
        if took_effect {
            assert_eq!(says(&pool, &of_steps(), Finding::took_effect(&7_i64)?).await, Visit::Resolved);
        } else {
            for _ in 0..2 {
                assert_eq!(says(&pool, &of_steps(), Finding::NoTrace).await, Visit::Undecided);
                pass_time(&pool).await;
            }
            assert_eq!(says(&pool, &of_steps(), Finding::NoTrace).await, Visit::Released);
        }
        match resume::leasing().acquire::<String, _>(&pool, &key("a"), "body").await {
            Ok(Acquired::Owner(lease)) if took_effect => {
                assert_eq!(Kind::AtMostOnce.step(&lease, "text", 8).await?, 7);
                lease.complete(&"done".to_owned()).await?;
            }
            Err(Error::Exhausted { attempts: 4, .. }) if !took_effect => {}
            other => panic!("{took_effect}: {other:?}"),
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_first_visit_asks_nobody_and_the_next_one_comes_after_the_quiet_time(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    assert_eq!(asks_nobody(&pool, &reconciler()).await, Visit::Noted);
    assert_eq!(asks_nobody(&pool, &reconciler()).await, Visit::Nothing, "the quiet time has just begun");
    // If the server's clock has jumped, the owner is healthy, and has one more lease in which to renew.
    let lease = LEASE;
    let left = seconds_to_the_next_probe(&pool).await;
    assert!(left > (lease + QUIET).as_secs_f64() - 30.0 && left <= (lease + QUIET).as_secs_f64(), "{left}");
    let shown = probes(&pool).await;
    assert_eq!((shown.len(), shown[0].probes, shown[0].at), (1, 0, None), "{shown:?}");
    assert!(shown[0].next.is_some());

    // After a decision about one of two steps, the quiet time of the other begins anew.
    pool.execute("truncate idempotency.record").await?;
    steps_in_doubt(&pool, &["email", "text"]).await;
    note(&pool, &of_steps()).await;
    let first = of_steps().visit_one(&pool, async |_: &InDoubt| Finding::took_effect(&1_i64)).await?;
    assert_eq!(first, Visit::Resolved);
    assert_eq!(asks_nobody(&pool, &of_steps()).await, Visit::Noted);
    assert_eq!(asks_nobody(&pool, &of_steps()).await, Visit::Nothing);
    assert!(seconds_to_the_next_probe(&pool).await > QUIET.as_secs_f64());
    pass_time(&pool).await;
    assert_eq!(says(&pool, &of_steps(), Finding::took_effect(&2_i64)?).await, Visit::Resolved);
    assert_eq!(state(&pool).await, State::Released);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn only_enough_probes_without_a_trace_at_growing_distances_release(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    note(&pool, &reconciler()).await;
    for probe in 1..=2_u32 {
        // Each probe is made by another process.
        assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Undecided);
        assert_eq!(asks_nobody(&pool, &reconciler()).await, Visit::Nothing, "each probe comes after its distance");
        let distance = seconds_to_the_next_probe(&pool).await;
        let expected = QUIET.as_secs_f64() * f64::from(2_u32.pow(probe - 1));
        assert!(distance > expected - 60.0 && distance <= expected, "{probe}: {distance}");
        let shown = &probes(&pool).await[0];
        assert_eq!((shown.probes, shown.no_trace, shown.at.is_some()), (probe, probe, true));
        assert_eq!((shown.finding, &shown.error, shown.next.is_some()), (Some(Probed::NoTrace), &None, true));
        pass_time(&pool).await;
    }
    assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Released);
    let shown = show(&pool, &key("a")).await?.expect("a record");
    assert_eq!((shown.state, shown.granted_attempt), (State::Released, None));
    assert!(shown.probes.is_empty() && shown.last_error.is_some_and(|reason| reason.contains("3 probes")));
    let Acquired::Owner(lease) = leasing().acquire::<String, _>(&pool, &key("a"), "body").await? else { panic!() };
    assert_eq!(lease.attempt(), 2);
    lease.complete(&"sent".to_owned()).await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn no_other_reconciler_asks_while_a_probe_is_under_way(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    note(&pool, &reconciler()).await;
    let looked_up = async |_: &InDoubt| {
        assert_eq!(asks_nobody(&pool, &reconciler()).await, Visit::Nothing);
        Ok::<_, Error>(Finding::NoTrace)
    };
    assert_eq!(reconciler().visit_one(&pool, looked_up).await?, Visit::Undecided);
    Ok(())
}

/// A process that was suspended in its probe, and wakes after another process has made one.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_probe_that_is_not_the_last_one_counts_nothing_unless_it_found_the_effect(
    pool: PgPool,
) -> anyhow::Result<()> {
    for finds in [false, true] {
        pool.execute("truncate idempotency.record").await?;
        in_doubt(&pool, "a").await;
        note(&pool, &reconciler()).await;
        let late = async |_: &InDoubt| {
            pass_time(&pool).await;
            assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Undecided);
            Ok::<_, Error>(if finds { sent() } else { Finding::NoTrace })
        };
        let visit = reconciler().visit_one(&pool, late).await?;
        if finds {
            assert_eq!((visit, state(&pool).await), (Visit::Resolved, State::Completed));
        } else {
            assert_eq!((visit, probes(&pool).await[0].no_trace), (Visit::Overtaken, 1));
        }
    }
    Ok(())
}

/// A probe that took longer than its distance ends between the search of another reconciler and its reservation. The
/// search has read the record before, so the number of probes is the same and only the finding differs.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_reservation_does_not_erase_the_finding_of_a_probe_that_ends_after_the_search(
    pool: PgPool,
) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    note(&pool, &reconciler()).await;
    // The end of a probe whose answer cannot be stored, and which leaves `TookEffect`.
    let ends = "update idempotency.record
        set probes = jsonb_set(probes, '{of,0,finding}', '\"took_effect\"') where probes #>> '{of,0,probes}'::text[] = '1'";
    let searched = async || -> anyhow::Result<Visit> {
        pass_time(&pool).await;
        let mut ending = pool.begin().await?;
        ending.execute(ends).await?;
        let commits = async {
            until_blocked(&pool, 1).await?;
            Ok::<_, Error>(ending.commit().await?)
        };
        let reconciler = reconciler();
        let (visit, committed) = tokio::join!(asks_nobody(&pool, &reconciler), commits);
        committed?;
        Ok(visit)
    };
    // An error or a panic in the look-up would be stored as a finding.
    let mut other = None;
    let looks_up = async |_: &InDoubt| {
        other = Some(searched().await);
        Ok::<_, Error>(Finding::Unknown)
    };
    let visit = reconciler().visit_one(&pool, looks_up).await?;
    assert_eq!(other.expect("the look-up has run")?, Visit::Nothing);
    assert_eq!(visit, Visit::Overtaken);
    assert_eq!(probes(&pool).await[0].finding, Some(Probed::TookEffect));
    Ok(())
}

/// It may have been told that the operation took effect.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_probe_whose_process_died_makes_the_probes_without_a_trace_begin_anew(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    note(&pool, &reconciler()).await;
    for _ in 0..2 {
        assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Undecided);
        pass_time(&pool).await;
    }
    let reconciler = reconciler();
    let (asked, is_asked) = tokio::sync::oneshot::channel();
    let dying = Box::pin(reconciler.visit_one(&pool, async move |_: &InDoubt| -> Result<Finding, Error> {
        asked.send(()).expect("the test waits");
        std::future::pending().await
    }));
    let Either::Right((asked, dying)) = select(dying, is_asked).await else { panic!("nobody answers") };
    asked?;
    drop(dying);
    pass_time(&pool).await;
    assert_eq!(says(&pool, &reconciler, Finding::NoTrace).await, Visit::Undecided);
    let shown = &probes(&pool).await[0];
    assert_eq!((shown.probes, shown.no_trace), (4, 1));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_revived_lease_sets_the_probes_and_the_quiet_time_back(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "a").await;
    note(&pool, &reconciler()).await;
    for _ in 0..2 {
        assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, Visit::Undecided);
        pass_time(&pool).await;
    }
    revive_and_lapse(&pool).await;
    assert!(probes(&pool).await.is_empty(), "they are about another lapse");
    assert_eq!(asks_nobody(&pool, &reconciler()).await, Visit::Noted);
    pass_time(&pool).await;
    for visit in [Visit::Undecided, Visit::Undecided, Visit::Released] {
        assert_eq!(says(&pool, &reconciler(), Finding::NoTrace).await, visit);
        pass_time(&pool).await;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_probes_of_one_step_settle_no_other(pool: PgPool) -> anyhow::Result<()> {
    steps_in_doubt(&pool, &["email", "text"]).await;
    note(&pool, &of_steps()).await;
    let email_only = async |asked: &InDoubt| -> Result<Finding, Error> {
        assert_eq!(asked.step.as_deref(), Some("email"), "the text is asked for later");
        let shown = show(&pool, &key("a")).await?.expect("a record");
        assert_eq!(Some(&asked.downstream_key), shown.downstream_key_of_step("email").as_ref());
        Ok(Finding::NoTrace)
    };
    for visit in [Visit::Undecided, Visit::Undecided, Visit::Released] {
        // Only the email is due.
        pass_time(&pool).await;
        pool.execute(
            "update idempotency.record set probes = jsonb_set(probes, '{of,0,next}', '99999999999')
            where probes #>> '{of,0,step}'::text[] = 'text'",
        )
        .await?;
        assert_eq!(of_steps().visit_one(&pool, email_only).await?, visit);
    }
    let shown = show(&pool, &key("a")).await?.expect("a record");
    assert_eq!((shown.state, crate::support::steps_in_doubt(&shown)), (State::Indeterminate, vec!["text"]));
    Ok(())
}
