//! A step in this database that ends its own transaction. Its writes may be committed without its result, so nobody
//! performs the step again before a person has decided.

use std::time::Duration;

use pg_idempotency::lease::{Finding, InDoubt, Lease, Visit};
use pg_idempotency::operator::State;
use pg_idempotency::testing::{age, lapse};
use pg_idempotency::{Error, Misuse};
use rig::gate::cancel_after;
use rig::proxy::Proxy;
use serde::{Deserialize, Serialize, Serializer};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};

use super::reconcile::{asks_nobody, of_steps, pass_time, probes};
use crate::lease::leases::WorkError;
use crate::lease::resume::{MINUTE, leasing};
use crate::lease::steps::{acquired, after_a_crash, assert_indeterminate, steps};
use crate::support::{clear, create_open_effects, effects, key, leave_effect, outside, pool_of, shown, steps_in_doubt};

/// sqlx answers it by rolling back the step's transaction.
const DROPPED_BEGIN: &str = "a nested begin that is dropped";

/// How the code of a step ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Value,
    /// JSON has no such number.
    NoResult,
    /// The last statement fails, outside a transaction.
    LastStatement,
    Error,
    Panic,
    /// In the encoding of the result.
    LatePanic,
}
const ENDS: [End; 6] = [End::Value, End::NoResult, End::LastStatement, End::Error, End::Panic, End::LatePanic];

#[derive(Deserialize)]
struct Measure(f64);

impl Serialize for Measure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        assert!(self.0.is_nan() || self.0 >= 0.0, "on purpose");
        if self.0.is_nan() { Err(serde::ser::Error::custom("no number")) } else { self.0.serialize(serializer) }
    }
}

async fn end_transaction(conn: &mut PgConnection, how: &'static str) -> Result<(), Error> {
    if how == DROPPED_BEGIN {
        // The answer to the sleep comes first, so the begin waits for sure.
        cancel_after(1, conn.execute("select pg_sleep(0.1)")).await;
        assert!(cancel_after(1, conn.begin()).await.is_none());
    } else {
        conn.execute(how).await?;
    }
    Ok(())
}

/// A step that commits one effect, and then ends as `end` says.
async fn committing(lease: &Lease, how: &'static str, end: End) -> Result<f64, WorkError> {
    let result = lease.step("text", async |conn| -> Result<Measure, WorkError> {
        if how.starts_with("commit") {
            leave_effect(&mut *conn, how).await?;
            end_transaction(conn, how).await?;
        } else {
            end_transaction(conn, how).await?;
            leave_effect(&mut *conn, how).await?;
        }
        match end {
            End::Value => Ok(Measure(1.0)),
            End::NoResult => Ok(Measure(f64::NAN)),
            End::LastStatement => {
                Err(conn.execute("select 1 / 0").await.map_err(Error::from).expect_err("it fails").into())
            }
            End::Error => Err(WorkError::Gateway),
            End::Panic => panic!("on purpose"),
            End::LatePanic => Ok(Measure(-1.0)),
        }
    });
    result.await.map(|Measure(value)| value)
}

/// The caller, a resumer and a reconciler whose provider has no trace: none of them performs the step again.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_that_ends_its_transaction_has_one_effect(other: PgPool) -> anyhow::Result<()> {
    // The doubt waits for no second connection.
    let pool = pool_of(1, &other.connect_options()).await;
    create_open_effects(&pool).await;
    let every_end = ENDS.map(|end| ("commit", end));
    let others = ["commit; begin", "commit and chain", "rollback", DROPPED_BEGIN].map(|how| (how, End::Value));
    for (how, end) in every_end.into_iter().chain(others) {
        clear(&pool).await;
        let call = {
            let pool = pool.clone();
            tokio::spawn(async move {
                leasing().run(&pool, &key("a"), "body", async |lease: &Lease| committing(lease, how, end).await).await
            })
        };
        match (end, call.await) {
            (End::Value, Ok(Err(WorkError::Idempotency(error)))) => {
                assert!(matches!(error, Error::Misuse(Misuse::NotInTransaction)), "{how}: {error:?}");
            }
            (End::NoResult, Ok(Err(WorkError::Idempotency(Error::Unencodable { .. })))) => {}
            (End::LastStatement, Ok(Err(WorkError::Idempotency(Error::Database(_))))) => {}
            (End::Error, Ok(Err(WorkError::Gateway))) => {}
            (End::Panic | End::LatePanic, Err(panicked)) => assert!(panicked.is_panic()),
            (end, other) => panic!("{how}, {end:?}: {other:?}"),
        }
        let waits = shown(&pool, &key("a")).await;
        assert_eq!((waits.state, steps_in_doubt(&waits)), (State::Indeterminate, vec!["text"]), "{how}, {end:?}");
        age(&pool, &key("a"), MINUTE).await?;
        let resumed = leasing()
            .resume_one(&pool, "operation", async |lease: &Lease, _: String| committing(lease, how, end).await)
            .await
            .expect("a search");
        assert_eq!(resumed, None, "{how}, {end:?}");
        assert_eq!(asks_nobody(&pool, &of_steps()).await, Visit::Noted);
        pass_time(&pool).await;
        assert_eq!(asks_nobody(&pool, &of_steps()).await, Visit::Nothing, "a person decides");
        let left = probes(&pool).await;
        assert!(matches!(&left[..], [probe] if probe.next.is_none() && probe.probes == 0), "{left:?}");
        assert_indeterminate(&pool, 1).await;
        assert_eq!(effects(&pool).await, 1, "{how}, {end:?}");
        // A person finds the effect, and the next attempt continues after the step.
        shown(&pool, &key("a")).await.step("text").resolve(&pool, &7.0).await?;
        let last = async |lease: &Lease| committing(lease, how, end).await;
        assert_eq!(leasing().run(&pool, &key("a"), "body", last).await?.into_inner(), 7.0);
        assert_eq!(effects(&pool).await, 1, "{how}, {end:?}");
    }
    Ok(())
}

/// The provider of the other step knows nothing about this one.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_reconciler_settles_the_other_steps_and_leaves_this_one_to_a_person(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    let work = async |lease: &Lease| -> Result<f64, WorkError> {
        let sent = lease.step_at_most_once("sent", async |_| Err::<i64, _>(WorkError::Gateway)).await;
        assert!(sent.is_err());
        committing(lease, "commit", End::Value).await
    };
    assert!(leasing().run(&pool, &key("a"), "body", work).await.is_err());
    assert_eq!(asks_nobody(&pool, &of_steps()).await, Visit::Noted);
    pass_time(&pool).await;
    let look_up = async |asked: &InDoubt| {
        assert_eq!(asked.step.as_deref(), Some("sent"));
        Finding::took_effect(&7)
    };
    assert_eq!(of_steps().visit_one(&pool, look_up).await?, Visit::Resolved);
    let waits = shown(&pool, &key("a")).await;
    assert_eq!((waits.state, steps_in_doubt(&waits)), (State::Indeterminate, vec!["text"]));
    assert_eq!(asks_nobody(&pool, &of_steps()).await, Visit::Noted, "of the new claim");
    pass_time(&pool).await;
    assert_eq!(asks_nobody(&pool, &of_steps()).await, Visit::Nothing);
    Ok(())
}

/// The lease may have lapsed meanwhile, and the key may be about to expire.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_doubt_needs_no_live_lease_and_is_remembered_for_the_retention(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    let lease = acquired(&pool).await;
    let step = lease.step("text", async |conn| -> Result<i64, Error> {
        conn.execute("commit").await?;
        lapse(&pool, &key("a")).await?;
        pool.execute("update idempotency.record set expires_at = now() + interval '1 min'").await?;
        Ok(1)
    });
    assert!(matches!(step.await, Err(Error::Misuse(Misuse::NotInTransaction))));
    let waits = shown(&pool, &key("a")).await;
    assert_eq!((waits.state, steps_in_doubt(&waits)), (State::Indeterminate, vec!["text"]));
    assert!(waits.retention_left > Duration::from_secs(3600), "{:?}", waits.retention_left);
    Ok(())
}

/// Another owner has the record now, whose step must not become doubtful.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_overtaken_owner_leaves_no_doubt_on_the_claim_of_the_next_one(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    let lease = acquired(&pool).await;
    let mut next = None;
    let step = lease.step("text", async |conn| -> Result<i64, Error> {
        conn.execute("commit").await?;
        lapse(&pool, &key("a")).await?;
        let owner = acquired(&pool).await;
        owner.step("text", async |_| Ok::<_, Error>(7)).await?;
        next = Some(owner);
        Ok(1)
    });
    assert!(matches!(step.await, Err(Error::Misuse(Misuse::NotInTransaction))));
    let next = after_a_crash(&pool, next.expect("the next owner")).await;
    assert_eq!(next.step("text", async |_| Ok::<_, Error>(8)).await?, 7);
    Ok(())
}

/// The server rolls these transactions back, so the step may be performed again.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_transaction_that_is_aborted_or_lost_leaves_no_doubt(direct: PgPool) -> anyhow::Result<()> {
    create_open_effects(&direct).await;
    let proxy = Proxy::before(&direct.connect_options()).await?;
    let pool = pool_of(2, &proxy.options).await;
    for how in ["an error", "an aborted transaction", "a lost connection", "an unread error"] {
        outside(&direct, "truncate idempotency.record").await;
        let lease = acquired(&pool).await;
        let failed = lease.step("text", async |conn| -> Result<i64, WorkError> {
            leave_effect(&mut *conn, how).await?;
            match how {
                "an error" => return Err(WorkError::Gateway),
                "an aborted transaction" => assert!(conn.execute("select 1 / 0").await.is_err()),
                "a lost connection" => {
                    assert!(conn.execute("select pg_terminate_backend(pg_backend_pid())").await.is_err());
                }
                // Its answer comes later than the drop.
                _ => assert!(cancel_after(1, conn.execute("select 1 / (pg_sleep(0.5) is null)::int")).await.is_none()),
            }
            Err(WorkError::Gateway)
        });
        assert!(matches!(failed.await, Err(WorkError::Gateway)), "{how}");
        assert_eq!(steps(&direct).await, None, "{how}");
        assert_eq!(lease.step("text", async |conn| leave_effect(conn, how).await.map(|_| 7)).await?, 7, "{how}");
        assert_eq!(effects(&direct).await, 1, "{how}");
        outside(&direct, "truncate effect").await;
    }
    Ok(())
}

/// Behind an error that nobody has read, the question is asked again.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_unread_error_does_not_hide_a_commit(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    let lease = acquired(&pool).await;
    let failed = lease.step("text", async |conn| -> Result<i64, WorkError> {
        leave_effect(&mut *conn, "committed").await?;
        conn.execute("commit").await.map_err(Error::from)?;
        assert!(cancel_after(1, conn.execute("select 1 / (pg_sleep(0.5) is null)::int")).await.is_none());
        Err(WorkError::Gateway)
    });
    assert!(matches!(failed.await, Err(WorkError::Gateway)));
    let again = lease.step("text", async |conn| leave_effect(conn, "again").await).await;
    assert!(matches!(again, Err(Error::StepInDoubt { .. })), "{again:?}");
    assert_eq!(effects(&pool).await, 1);
    Ok(())
}
