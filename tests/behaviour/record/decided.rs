//! Decisions of an operator in a transaction of the caller, and by the version of an error.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::operator::{Shown, State, Version};
use pg_idempotency::{Error, Key, Misuse, OnEscape, SettleError, commit, protect};
use rig::fixture::Fixture;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Executor as _, PgPool};

use crate::lease::steps::IN_STEPS;
use crate::support::{assert_changed, key, setting, shown};

const HOUR: Duration = Duration::from_secs(3600);
const AT_LEAST_ONCE: Policy = Policy::AtLeastOnce { lease: HOUR };
const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: HOUR };

pub(super) const VERBS: [&str; 6] = ["resolve", "release", "release a step", "resolve a step", "grant", "forget"];

/// A record that this verb may settle.
pub(super) async fn waiting(pool: &PgPool, verb: &str) -> Shown {
    let key = key(verb);
    let fixture = match verb {
        "grant" => Fixture::lapsed(&key, "body", AT_LEAST_ONCE),
        "release a step" | "resolve a step" => {
            Fixture::lapsed(&key, "body", IN_STEPS).map(|lapsed| lapsed.with_step_in_doubt("text"))
        }
        _ => Fixture::lapsed(&key, "body", AT_MOST_ONCE),
    };
    fixture.expect("a fixture").write(pool).await.expect("a record");
    shown(pool, &key).await
}

/// `None` after it is forgotten.
pub(super) async fn settle(
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
async fn weak(options: &PgConnectOptions) -> PgPool {
    let options = options.clone().options([("synchronous_commit", "off")]);
    PgPoolOptions::new().max_connections(2).connect_with(options).await.expect("a pool")
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_decision_and_the_callers_row_are_committed_together_or_not_at_all(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = weak(&options).await;
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
async fn a_decision_that_is_refused_leaves_the_callers_transaction_as_it_was(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = weak(&options).await;
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

/// A service looks the operation up, and settles it by the version of its error. The token alone would not do.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_service_settles_what_its_error_was_about(pool: PgPool) -> anyhow::Result<()> {
    // In UTC, because Citus refuses a time with a zone plus an interval.
    let revived = "update idempotency.record
        set lease_until = (lease_until at time zone 'UTC' + interval '1 ms') at time zone 'UTC'";
    let stepped = r#"update idempotency.record set steps = steps || '{"ride": {"result": "1", "attempt": 1}}'"#;
    let completed = "update idempotency.record
        set completed_at = now(), response_body = '1', lease_until = null, steps = null";
    let released = "update idempotency.record set lease_until = '-infinity', token = token + 1";
    for (policy, meanwhile) in [
        (AT_MOST_ONCE, vec![revived, completed, released]),
        (AT_LEAST_ONCE, vec![revived, completed, released]),
        (IN_STEPS, vec![revived, stepped, completed, released]),
    ] {
        let key = key(&format!("{policy:?}"));
        for change in meanwhile {
            pool.execute("truncate idempotency.record").await?;
            let fixture = Fixture::lapsed(&key, "body", policy)?;
            let fixture = if policy == IN_STEPS { fixture.with_step_in_doubt("text") } else { fixture };
            fixture.write(&pool).await?;
            let told = version(&pool, &key, policy).await;
            let seen = shown(&pool, &key).await;
            assert_eq!((seen.version(), seen.version().to_string()), (&told, told.to_string()), "{policy:?}");
            sqlx::query(change).execute(&pool).await?;
            let now = shown(&pool, &key).await;
            assert_ne!(*now.version(), told, "{policy:?}: {change}");
            assert_ne!(now.version().to_string(), told.to_string(), "{policy:?}: {change}");
            assert_changed(seen.resolve(&pool, &7, HOUR).await, change);
        }
    }
    Ok(())
}

/// The lease of a failed operation ends at once, and its version is that of the record, too.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_has_the_version_of_a_released_record(pool: PgPool) -> anyhow::Result<()> {
    let leasing = LeaseOptions::new(AT_LEAST_ONCE).max_attempts(NonZeroU32::MIN);
    let failing = async |_: &pg_idempotency::lease::Lease| -> Result<i64, Error> { Err(Error::OutlivedRetention) };
    leasing.run(&pool, &key("a"), "body", failing).await.expect_err("it fails");
    let told = version(&pool, &key("a"), AT_LEAST_ONCE).await;
    let seen = shown(&pool, &key("a")).await;
    assert_eq!((seen.state, seen.version()), (State::Released, &told));
    let granted = seen.grant(&pool, "repaired").await?;
    assert!(!granted.is_exhausted(NonZeroU32::MIN));
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
