//! Decisions of an operator: about what was shown, by the version of an error, and in a transaction of the caller.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::operator::{Shown, State, Version};
use pg_idempotency::{Error, Key, Misuse, OnEscape, SettleError, commit, protect};
use rig::cases::each;
use rig::fixture::Fixture;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS};
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::support::{assert_changed, key, options, pool_of, setting, shown};

const HOUR: Duration = Duration::from_secs(3600);

pub(crate) const VERBS: [&str; 6] = ["resolve", "release", "release a step", "resolve a step", "grant", "forget"];

/// The records that this verb may settle.
fn settled_by(verb: &str, key: &Key) -> Result<Vec<Fixture>, Error> {
    let in_steps = Fixture::lapsed(key, "body", IN_STEPS)?;
    let in_doubt = in_steps.clone().with_step_in_doubt("text");
    Ok(match verb {
        "grant" => vec![Fixture::lapsed(key, "body", AT_LEAST_ONCE)?, in_steps.with_step("ride", &1)],
        "release a step" | "resolve a step" => vec![in_doubt],
        _ => vec![Fixture::lapsed(key, "body", AT_MOST_ONCE)?, Fixture::indeterminate(key, "body")?, in_doubt],
    })
}

/// One of these records.
pub(crate) async fn waiting(pool: &PgPool, verb: &str) -> Shown {
    let fixture = settled_by(verb, &key(verb)).expect("fixtures").swap_remove(0);
    fixture.write(pool).await.expect("a record");
    shown(pool, &key(verb)).await
}

/// `None` after it is forgotten.
pub(crate) async fn settle(
    verb: &str,
    shown: Shown,
    place: impl Into<pg_idempotency::operator::PoolOrTransaction<'_>>,
) -> Result<Option<Shown>, SettleError> {
    match verb {
        "resolve" => shown.resolve(place, &7, HOUR).await.map(Some),
        "release" => shown.release(place, "no effect").await.map(Some),
        "release a step" => shown.step("text").release(place, "no effect").await.map(Some),
        "resolve a step" => shown.step("text").resolve(place, &7).await.map(Some),
        "grant" => shown.grant(place, "repaired").await.map(Some),
        _ => shown.forget(place).await.map(|()| None),
    }
}

async fn lines(pool: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from audit").fetch_one(pool).await.expect("a count")
}

/// Of an operator's service, whose sessions lose their last commits if the server dies.
async fn weak(pool: &PgPool) -> PgPool {
    pool_of(2, &options(pool).options([("synchronous_commit", "off")])).await
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_decision_and_the_callers_row_are_committed_together_or_not_at_all(pool: PgPool) -> anyhow::Result<()> {
    let pool = weak(&pool).await;
    pool.execute("create table audit (line text not null)").await?;
    protect(&pool, "audit", OnEscape::Refuse).await?;
    for (verb, commits) in VERBS.iter().flat_map(|verb| [(*verb, false), (*verb, true)]) {
        let before = waiting(&pool, verb).await;
        let lines_before = lines(&pool).await;
        let mut tx = pool.begin().await?;
        // The table of the audit is protected like the others.
        tx.execute("set local idempotency.claim = 'exempt'").await?;
        sqlx::query("insert into audit (line) values ($1::text)").bind(verb).execute(&mut *tx).await?;
        let next = settle(verb, before.clone(), &mut tx).await?;
        assert_eq!(setting(&mut tx, "synchronous_commit").await, "on", "{verb}: the decision must not be lost");
        assert_eq!(setting(&mut tx, "row_security").await, "on", "{verb}");
        assert_eq!(setting(&mut tx, "idempotency.claim").await, "exempt", "{verb}");
        assert_eq!(shown(&pool, &before.key).await.version(), before.version(), "{verb}: nobody sees it yet");
        if commits {
            commit(tx).await?
        } else {
            tx.rollback().await?
        }
        assert_eq!(lines(&pool).await - lines_before, i64::from(commits), "{verb}");
        let now = pg_idempotency::operator::show(&pool, &before.key).await?;
        let expected = if commits { next.as_ref() } else { Some(&before) };
        assert_eq!(now.as_ref().map(Shown::version), expected.map(Shown::version), "{verb}");
        let mut conn = pool.acquire().await?;
        assert_eq!(setting(&mut conn, "synchronous_commit").await, "off", "{verb}: only in the transaction");
        // What was shown in a transaction that is rolled back was never there. After a commit it is the next one.
        if let Some(next) = next {
            assert_ne!(next.token, before.token, "{verb}");
            let again = next.forget(&pool).await;
            if commits { again? } else { assert_changed(again, verb) }
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_protected_table_refuses_the_row_of_an_audit_that_does_not_say_so(pool: PgPool) -> anyhow::Result<()> {
    pool.execute("create table audit (line text not null)").await?;
    protect(&pool, "audit", OnEscape::Refuse).await?;
    let mut tx = pool.begin().await?;
    waiting(&pool, "release").await.release(&mut tx, "no effect").await?;
    let refused = tx.execute("insert into audit (line) values ('a decision is no operation')").await;
    let code = refused.err().and_then(|error| Some(error.as_database_error()?.code()?.into_owned()));
    assert_eq!(code.as_deref(), Some("IK006"));
    Ok(())
}

/// A setting that is stronger than `on` stays.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_decision_weakens_no_setting_of_the_caller(pool: PgPool) -> anyhow::Result<()> {
    let mut tx = pool.begin().await?;
    tx.execute("set local synchronous_commit = remote_apply; set local row_security = off").await?;
    waiting(&pool, "release").await.release(&mut tx, "no effect").await?;
    assert_eq!(setting(&mut tx, "synchronous_commit").await, "remote_apply");
    assert_eq!(setting(&mut tx, "row_security").await, "off");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_decision_that_is_refused_leaves_the_callers_transaction_as_it_was(pool: PgPool) -> anyhow::Result<()> {
    let pool = weak(&pool).await;
    pool.execute("create table audit (line text not null)").await?;
    for verb in VERBS {
        let stale = waiting(&pool, verb).await;
        sqlx::query("update idempotency.record set token = token + 1").execute(&pool).await?;
        let before = lines(&pool).await;
        let mut tx = pool.begin().await?;
        assert_changed(settle(verb, stale, &mut tx).await, verb);
        assert_eq!(setting(&mut tx, "synchronous_commit").await, "off", "{verb}");
        assert_eq!(setting(&mut tx, "row_security").await, "on", "{verb}");
        tx.execute("insert into audit (line) values ('tried')").await?;
        commit(tx).await?;
        assert_eq!(lines(&pool).await, before + 1, "{verb}");
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_decision_on_a_connection_without_a_transaction_is_refused(pool: PgPool) -> anyhow::Result<()> {
    for verb in VERBS {
        let before = waiting(&pool, verb).await;
        let mut conn = pool.acquire().await?;
        let refused = settle(verb, before.clone(), &mut *conn).await;
        assert!(matches!(refused, Err(SettleError::Other(Error::Misuse(Misuse::NotInTransaction)))), "{refused:?}");
        assert_eq!(shown(&pool, &before.key).await.version(), before.version(), "{verb}");
    }
    Ok(())
}

/// The version that a caller in a policy with a limit of one attempt gets.
async fn version(pool: &PgPool, key: &Key, policy: Policy) -> Version {
    let leasing = LeaseOptions::new(policy).max_attempts(NonZeroU32::MIN);
    match leasing.acquire::<i64, _>(pool, key, "body").await {
        Err(Error::Indeterminate { version, .. } | Error::Exhausted { version, .. }) => *version,
        other => panic!("{other:?}"),
    }
}

/// A service looks the operation up, and settles it by the version of its error. The lease of a failed operation ends
/// at once, and its version is that of the record, too.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_has_the_version_of_the_record(pool: PgPool) -> anyhow::Result<()> {
    each([AT_MOST_ONCE, AT_LEAST_ONCE, IN_STEPS], async |policy| {
        let key = key(&format!("{policy:?}"));
        let fixture = Fixture::lapsed(&key, "body", policy)?;
        let fixture = if policy == IN_STEPS { fixture.with_step_in_doubt("text") } else { fixture };
        fixture.write(&pool).await?;
        let (told, seen) = (version(&pool, &key, policy).await, shown(&pool, &key).await);
        assert_eq!((seen.version(), seen.version().to_string()), (&told, told.to_string()), "{policy:?}");
        Ok(())
    })
    .await;
    let leasing = LeaseOptions::new(AT_LEAST_ONCE).max_attempts(NonZeroU32::MIN);
    let failing = async |_: &pg_idempotency::lease::Lease| -> Result<i64, Error> { Err(Error::OutlivedRetention) };
    leasing.run(&pool, &key("a"), "body", failing).await.expect_err("it fails");
    let told = version(&pool, &key("a"), AT_LEAST_ONCE).await;
    let seen = shown(&pool, &key("a")).await;
    assert_eq!((seen.state, seen.version()), (State::Released, &told));
    assert!(!seen.grant(&pool, "repaired").await?.is_exhausted(NonZeroU32::MIN));
    Ok(())
}

/// What may happen to a record after it was shown. A change that does not fit the record changes no row.
const MEANWHILE: [(&str, &str); 6] = [
    // Also if the key has expired, and its next operation is in the same state.
    ("another call has claimed it", "token = token + 1"),
    // The owner's machine slept.
    ("its owner has renewed the lease", "lease_until = lease_until + interval '1 ms' where lease_until is not null"),
    (
        "a step has begun",
        r#"steps = coalesce(steps, '{}') || '{"email": {"begun": "2026-01-01T00:00:00+00:00", "attempt": 1}}'
            where mode = 'in_steps'"#,
    ),
    (
        "the step has ended",
        r#"steps = coalesce(steps, '{}') || '{"text": {"result": "7", "attempt": 1}}' where mode = 'in_steps'"#,
    ),
    (
        "another step has ended",
        r#"steps = coalesce(steps, '{}') || '{"more": {"result": "1", "attempt": 1}}' where mode = 'in_steps'"#,
    ),
    // It keeps the token of its claim.
    ("it is completed", "completed_at = now(), response_body = '1', lease_until = null, steps = null"),
];

/// After `forget`, there is none.
async fn row(pool: &PgPool) -> Option<String> {
    let record = "select record::text from idempotency.record";
    sqlx::query_scalar(record).fetch_optional(pool).await.expect("a database")
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_decision_about_a_record_that_has_changed_since_it_was_shown_changes_nothing(
    pool: PgPool,
) -> anyhow::Result<()> {
    let (mut decisions, mut wrong) = (0, Vec::new());
    for (verb, (meanwhile, change)) in VERBS.iter().flat_map(|verb| MEANWHILE.map(|meanwhile| (*verb, meanwhile))) {
        for fixture in settled_by(verb, &key("a"))? {
            fixture.clone().write(&pool).await?;
            let seen = shown(&pool, &key("a")).await;
            let change = format!("update idempotency.record set {change}");
            if sqlx::query(AssertSqlSafe(change)).execute(&pool).await?.rows_affected() == 0 {
                continue;
            }
            let (before, now) = (row(&pool).await, shown(&pool, &key("a")).await);
            let differs = now.version() != seen.version() && now.version().to_string() != seen.version().to_string();
            let settled = settle(verb, seen, &pool).await;
            let refused = matches!(&settled, Err(SettleError::Changed));
            if !differs || !refused || before != row(&pool).await {
                wrong.push(format!("{verb}, since {meanwhile}: {settled:?} of {fixture:?}"));
            }
            decisions += 1;
        }
    }
    // Each change of each record, but a record outside steps has no steps, and one without a lease has no renewal.
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(decisions, 3 * (6 + 3 + 2) + 2 * 6 + (6 + 3));
    Ok(())
}

/// The owner may have worked after the record was shown. The lapse of its lease leaves the record as it was.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_was_shown_under_a_live_lease_is_not_settled_after_the_lease(pool: PgPool) -> anyhow::Result<()> {
    let indeterminate = waiting(&pool, "release").await;
    let live = "update idempotency.record set lease_until = statement_timestamp() + interval '500 ms'";
    // On a busy machine, the lease may lapse before the record is shown.
    let in_flight = loop {
        sqlx::query(live).execute(&pool).await?;
        let shown = shown(&pool, &indeterminate.key).await;
        if shown.state == State::InFlight {
            break shown;
        }
    };
    sqlx::query("select pg_sleep(0.6)").execute(&pool).await?;
    let again = shown(&pool, &indeterminate.key).await;
    assert_eq!((again.version(), again.state), (in_flight.version(), State::Indeterminate));
    let settled = in_flight.release(&pool, "the gateway has no such text").await;
    assert!(matches!(settled, Err(SettleError::Changed)), "{settled:?}");
    assert_eq!(again.release(&pool, "the gateway has no such text").await?.state, State::Released);
    Ok(())
}

/// The list of steps is public, so a caller may take it out or change it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_decision_is_about_the_steps_that_were_shown_whatever_the_caller_did_to_the_list(
    pool: PgPool,
) -> anyhow::Result<()> {
    let mut before = waiting(&pool, "release a step").await;
    assert_eq!(std::mem::take(&mut before.steps).len(), 1);
    let released = before.release(&pool, "the gateway has no such text").await?;
    assert_eq!((released.state, released.steps.len()), (State::Released, 0));
    Ok(())
}
