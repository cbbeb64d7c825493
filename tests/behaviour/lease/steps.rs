//! Steps: what each kind promises after an error, a drop, a crash, a lost answer, and under a second owner.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pg_idempotency::lease::{Acquired, Lease, LeaseOptions, LeaseOwner, Policy};
use pg_idempotency::testing::lapse;
use pg_idempotency::{Error, InvalidStep, Misuse};
use rig::cases::each;
use rig::database::until_blocked;
use rig::gate::{PATIENCE, cancel_after};
use rig::lease::{IN_STEPS, LEASE, owner};
use rig::proxy::Proxy;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, Executor as _, PgPool};
use tokio::time::timeout;

use crate::lease::leases::{self, WorkError};
use crate::support::{create_effects, effects, key, leave_effect, outside, pool_of, recorded};

pub(crate) async fn acquire(pool: &PgPool, body: &str) -> Result<Acquired<String>, Error> {
    leases::acquire(pool, IN_STEPS, body).await
}

pub(crate) async fn acquired(pool: &PgPool) -> LeaseOwner {
    leases::acquired(pool, IN_STEPS).await
}

/// The next attempt after a crash.
pub(crate) async fn after_a_crash(pool: &PgPool, lease: LeaseOwner) -> LeaseOwner {
    drop(lease);
    lapse(pool, &key("a")).await.expect("a lapsed lease");
    acquired(pool).await
}

pub(crate) async fn steps(pool: &PgPool) -> Option<serde_json::Value> {
    sqlx::query_scalar::<_, Option<String>>("select steps::text from idempotency.record")
        .fetch_one(pool)
        .await
        .expect("a record")
        .map(|steps| serde_json::from_str(&steps).expect("JSON"))
}

fn assert_in_doubt<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert!(matches!(&result, Err(Error::StepInDoubt { step, .. }) if step == "text"), "{result:?}");
}

pub(crate) async fn assert_indeterminate(pool: &PgPool, attempt: u32) -> i64 {
    match acquire(pool, "body").await {
        Err(Error::Indeterminate { steps, attempt: told, token, .. }) => {
            assert_eq!((steps, told), (vec!["text".to_owned()], attempt));
            token
        }
        other => panic!("{other:?}"),
    }
}

/// The three kinds, with an effect that is counted outside the database, or left in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    InDatabase,
    AtLeastOnce,
    AtMostOnce,
}
const KINDS: [Kind; 3] = [Kind::InDatabase, Kind::AtLeastOnce, Kind::AtMostOnce];

impl Kind {
    pub(crate) async fn step<T>(self, lease: &Lease, name: &str, value: T) -> Result<T, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        match self {
            Self::InDatabase => {
                lease
                    .step(name, async |conn| -> Result<T, Error> {
                        leave_effect(conn, name).await?;
                        Ok(value)
                    })
                    .await
            }
            Self::AtLeastOnce => lease.step_at_least_once(name, async |_| Ok(value)).await,
            Self::AtMostOnce => lease.step_at_most_once(name, async |_| Ok(value)).await,
        }
    }

    /// Fails inside the step.
    pub(crate) async fn failing(self, lease: &Lease, name: &str) -> Result<i64, WorkError> {
        match self {
            Self::InDatabase => {
                lease
                    .step(name, async |conn| {
                        leave_effect(conn, name).await?;
                        Err(WorkError::Gateway)
                    })
                    .await
            }
            Self::AtLeastOnce => lease.step_at_least_once(name, async |_| Err(WorkError::Gateway)).await,
            Self::AtMostOnce => lease.step_at_most_once(name, async |_| Err(WorkError::Gateway)).await,
        }
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_later_attempt_gets_the_stored_results_without_a_statement(direct: PgPool) -> anyhow::Result<()> {
    let proxy = Proxy::before(&direct.connect_options()).await?;
    let pool = pool_of(3, &proxy.options).await;
    create_effects(&pool).await;
    let lease = acquired(&pool).await;
    for kind in KINDS {
        assert_eq!(kind.step(&lease, &format!("{kind:?}"), 1).await?, 1);
    }
    let lease = after_a_crash(&pool, lease).await;
    assert_eq!(lease.attempt(), 2);
    proxy.take();
    for kind in KINDS {
        assert_eq!(kind.step(&lease, &format!("{kind:?}"), 2).await?, 1);
    }
    assert_eq!(proxy.take(), 0);
    assert_eq!(effects(&pool).await, 1);
    lease.complete(&"done".to_owned()).await?;
    assert_eq!(steps(&pool).await, None);
    assert!(matches!(acquire(&pool, "body").await?, Acquired::Replayed(response) if response == "done"));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_kind_of_step_takes_the_documented_round_trips(direct: PgPool) -> anyhow::Result<()> {
    let proxy = Proxy::before(&direct.connect_options()).await?;
    // One connection: each new one would add its own round trips, and prepare the statements again.
    let pool = pool_of(1, &proxy.options).await;
    let operation = async |value: &str, proxy: &Proxy| -> anyhow::Result<Vec<usize>> {
        let mut trips = Vec::new();
        let claim = async || LeaseOptions::new(IN_STEPS).acquire::<i64, _>(&pool, &key(value), "body").await;
        proxy.take();
        let Acquired::Owner(lease) = claim().await? else { panic!("new") };
        trips.push(proxy.take());
        lease.step("database", async |_| Ok::<_, Error>(1)).await?;
        trips.push(proxy.take());
        lease.step_at_least_once("least", async |_| Ok::<_, Error>(1)).await?;
        trips.push(proxy.take());
        lease.step_at_most_once("most", async |_| Ok::<_, Error>(1)).await?;
        trips.push(proxy.take());
        drop(lease);
        lapse(&pool, &key(value)).await?;
        proxy.take();
        let Acquired::Owner(lease) = claim().await? else { panic!("lapsed") };
        trips.push(proxy.take());
        lease.complete(&1).await?;
        trips.push(proxy.take());
        Ok(trips)
    };
    operation("prepares the statements", &proxy).await?;
    let trips = operation("counted", &proxy).await?;
    // 3, 3, 3, 6, 7 and 3, and sqlx's pool sends a ping before and after each transaction.
    assert_eq!(trips, [5, 5, 5, 10, 9, 5], "claim, three kinds, take-over, completion");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_is_not_stored_and_the_step_may_be_asked_for_again(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let lease = acquired(&pool).await;
    for kind in [Kind::InDatabase, Kind::AtLeastOnce] {
        let name = format!("{kind:?}");
        let error = kind.failing(&lease, &name).await.expect_err("it fails");
        assert!(matches!(error, WorkError::Gateway), "{error:?}");
        assert_eq!(kind.step(&lease, &name, 7).await?, 7);
    }
    assert_eq!(effects(&pool).await, 1);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_at_most_once_step_that_fails_is_in_doubt(pool: PgPool) -> anyhow::Result<()> {
    let lease = acquired(&pool).await;
    Kind::AtLeastOnce.step(&lease, "ride", 1).await?;
    assert!(matches!(Kind::AtMostOnce.failing(&lease, "text").await, Err(WorkError::Gateway)));
    for kind in KINDS {
        assert_in_doubt(kind.step(&lease, "text", 1).await);
    }
    drop(lease);
    lapse(&pool, &key("a")).await?;
    for _ in 0..2 {
        assert_indeterminate(&pool, 1).await;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn work_that_ends_in_doubt_lapses_and_is_remembered_for_the_retention(pool: PgPool) -> anyhow::Result<()> {
    let leasing = LeaseOptions::new(IN_STEPS).retention(Duration::from_secs(3600));
    for declared in [false, true] {
        pool.execute("truncate idempotency.record").await?;
        let result = leasing
            .run(&pool, &key("a"), "body", async |lease| -> Result<i64, WorkError> {
                sqlx::query("update idempotency.record set expires_at = now() + interval '1 min'")
                    .execute(&pool)
                    .await
                    .map_err(Error::from)?;
                let failed = Kind::AtMostOnce.failing(lease, "text").await;
                // The declaration contradicts the step, which was not retracted.
                if declared { failed.map_err(|error| lease.not_performed(error)) } else { failed }
            })
            .await;
        assert!(matches!(result, Err(WorkError::Gateway)));
        assert_indeterminate(&pool, 1).await;
        let found: bool = recorded(
            &pool,
            "lease_until > '-infinity' and last_error = 'gateway said no' and expires_at > now() + interval '50 min'",
        )
        .await;
        assert!(found, "lapsed, with the reason");
    }
    Ok(())
}

/// A crash in the middle of the step says nothing more, so the beginning of the step prolongs the record. A key that
/// a person has pinned stays pinned.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_at_most_once_step_is_remembered_for_the_retention_from_its_beginning(pool: PgPool) -> anyhow::Result<()> {
    let leasing = LeaseOptions::new(IN_STEPS).retention(Duration::from_secs(3600));
    for (before, after) in [
        ("now() + interval '1 min'", "expires_at between now() + interval '50 min' and now() + interval '70 min'"),
        ("'infinity'", "expires_at = 'infinity'"),
    ] {
        pool.execute("truncate idempotency.record").await?;
        let lease = owner(&pool, leasing, &key("a")).await;
        pool.execute(sqlx::AssertSqlSafe(format!("update idempotency.record set expires_at = {before}"))).await?;
        let text = lease.step_at_most_once("text", async |_| -> Result<bool, Error> {
            let asked = format!("select {after} from idempotency.record");
            Ok(sqlx::query_scalar(sqlx::AssertSqlSafe(asked)).fetch_one(&pool).await?)
        });
        assert!(text.await?, "{before}");
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_that_took_no_effect_may_be_performed_again(pool: PgPool) -> anyhow::Result<()> {
    let lease = acquired(&pool).await;
    let refused = async |lease: &Lease| {
        lease.step_at_most_once("text", async |step| Err::<i64, _>(step.not_performed(WorkError::Gateway))).await
    };
    for _ in 0..2 {
        assert!(matches!(refused(&lease).await, Err(WorkError::Gateway)));
        assert_eq!(steps(&pool).await, None);
    }
    assert_eq!(Kind::AtMostOnce.step(&lease, "text", 7).await?, 7);
    let lease = after_a_crash(&pool, lease).await;
    assert_eq!(Kind::AtMostOnce.step(&lease, "text", 8).await?, 7);
    // Work that fails so is released: the next attempt may come at once.
    let result = LeaseOptions::new(IN_STEPS)
        .run(&pool, &key("b"), "body", async |lease| -> Result<i64, WorkError> { refused(lease).await })
        .await;
    assert!(matches!(result, Err(WorkError::Gateway)));
    assert!(matches!(
        LeaseOptions::new(IN_STEPS).acquire::<i64, _>(&pool, &key("b"), "body").await?,
        Acquired::Owner(_)
    ));
    Ok(())
}

/// However it ends the transaction: what it wrote before may be lost, so its result must not be stored. A guard that is
/// forgotten ends no transaction.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_that_ends_its_own_transaction_is_never_acknowledged(direct: PgPool) -> anyhow::Result<()> {
    create_effects(&direct).await;
    // All sessions have the setting by which the crate knows its transaction.
    let set = format!(
        "alter database {:?} set idempotency.claim = 'step'",
        direct.connect_options().get_database().expect("a database")
    );
    direct.execute(sqlx::AssertSqlSafe(set)).await?;
    let pool = pool_of(4, &direct.connect_options()).await;
    let lease = acquired(&pool).await;
    let by_sqlx = ["a nested begin that is dropped", "a guard that is forgotten"];
    for ending in ["commit", "rollback", "commit; begin", "rollback; begin"].into_iter().chain(by_sqlx) {
        let name = format!("after {ending}");
        let error = lease
            .step(&name, async |conn| {
                leave_effect(&mut *conn, ending).await?;
                match ending {
                    "a nested begin that is dropped" => {
                        // The answer to the sleep comes first, so the begin waits for sure.
                        cancel_after(1, conn.execute("select pg_sleep(0.2)")).await;
                        assert!(cancel_after(1, conn.begin()).await.is_none());
                    }
                    "a guard that is forgotten" => std::mem::forget(conn.begin().await?),
                    ending => {
                        conn.execute(ending).await?;
                    }
                }
                Ok::<_, Error>(1)
            })
            .await
            .expect_err(ending);
        match ending {
            "a guard that is forgotten" => {
                assert!(matches!(error, Error::Misuse(Misuse::NestedTransaction)), "{error:?}")
            }
            _ => assert!(matches!(error, Error::Misuse(Misuse::NotInTransaction)), "{ending}: {error:?}"),
        }
        let again = Kind::InDatabase.step(&lease, &name, 7).await;
        match ending {
            "a guard that is forgotten" => assert_eq!(again?, 7, "it may be asked for again"),
            _ => assert!(matches!(&again, Err(Error::StepInDoubt { step, .. }) if *step == name), "{again:?}"),
        }
    }
    Ok(())
}

/// Every await of every kind: dropped there and asked for again in the same attempt, and in the next one.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_dropped_at_every_await_and_asked_for_again_keeps_its_promise(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(4, &pool.connect_options()).await;
    create_effects(&pool).await;
    each(KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]), async |(kind, crash)| {
        let mut completed = false;
        for polls in 1.. {
            // In the order in which a step that was dropped, and is not rolled back yet, locks the tables.
            outside(&pool, "truncate effect, idempotency.record").await;
            let mut lease = acquired(&pool).await;
            let performed = AtomicU32::new(0);
            let ask = async |lease: &Lease| -> Result<i64, Error> {
                match kind {
                    Kind::InDatabase => lease.step("text", async |conn| leave_effect(conn, "text").await).await,
                    Kind::AtLeastOnce | Kind::AtMostOnce => {
                        let effect = async || {
                            performed.fetch_add(1, Ordering::SeqCst);
                            tokio::task::yield_now().await;
                            Ok(1)
                        };
                        if kind == Kind::AtLeastOnce {
                            lease.step_at_least_once("text", async |_| effect().await).await
                        } else {
                            lease.step_at_most_once("text", async |_| effect().await).await
                        }
                    }
                }
            };
            let first = cancel_after(polls, ask(&lease)).await;
            if crash {
                drop(lease);
                lapse(&pool, &key("a")).await?;
                lease = match acquire(&pool, "body").await {
                    Ok(Acquired::Owner(lease)) => lease,
                    Err(Error::Indeterminate { .. }) if kind == Kind::AtMostOnce && first.is_none() => continue,
                    other => panic!("{kind:?} after {polls} polls: {other:?}"),
                };
            }
            let again = ask(&lease).await;
            match (&first, &again) {
                (Some(_), Err(Error::Misuse(Misuse::Step { problem: InvalidStep::Repeated, .. }))) if !crash => {}
                (None, Err(Error::StepInDoubt { .. })) if kind == Kind::AtMostOnce && !crash => {}
                (_, Ok(_)) => {}
                other => panic!("{kind:?} after {polls} polls: {other:?}"),
            }
            match kind {
                Kind::InDatabase => assert_eq!(effects(&pool).await, 1, "after {polls} polls"),
                Kind::AtLeastOnce => assert!((1..=2).contains(&performed.load(Ordering::SeqCst))),
                Kind::AtMostOnce => {
                    let performed = performed.load(Ordering::SeqCst);
                    assert!(performed <= 1 && (performed == 1 || again.is_err()), "after {polls} polls: {performed}");
                }
            }
            if first.is_some() {
                completed = true;
                break;
            }
        }
        assert!(completed);
        Ok(())
    })
    .await;
    Ok(())
}

/// Nothing was performed, so no reconciler or person has to find out whether it was.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_is_not_in_doubt_if_the_lease_is_lost_before_its_effect(pool: PgPool) -> anyhow::Result<()> {
    // The COMMIT that begins the step takes longer than the lease.
    pool.execute(
        "create function wait() returns trigger language plpgsql as $$
         begin
             if jsonb_path_exists(new.steps, '$.*.begun') then perform pg_sleep(2.5); end if;
             return null;
         end $$;
         create constraint trigger wait after update on idempotency.record deferrable initially deferred
         for each row execute function wait()",
    )
    .await?;
    let policy = Policy::InSteps { lease: Duration::from_secs(2) };
    let lease = owner(&pool, LeaseOptions::new(policy), &key("a")).await;
    let lost = lease.step_at_most_once("text", async |_| -> Result<i64, Error> { panic!("the lease is lost") }).await;
    assert!(matches!(lost, Err(Error::LeaseLost)), "{lost:?}");
    // Locked, so that this waits for the COMMIT.
    let left: Option<String> =
        sqlx::query_scalar("select steps::text from idempotency.record for update").fetch_one(&pool).await?;
    assert_eq!(left, None);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_answer_to_commit_that_is_lost_is_found_again(direct: PgPool) -> anyhow::Result<()> {
    create_effects(&direct).await;
    let proxy = Proxy::before(&direct.connect_options()).await?;
    let pool = PgPoolOptions::new().max_connections(3).acquire_timeout(Duration::from_secs(1));
    let pool = pool.connect_with(proxy.options.clone()).await?;
    let lease = acquired(&pool).await;
    // The deferred trigger lets COMMIT wait until the network has vanished.
    direct
        .execute(
            "create function wait() returns trigger language plpgsql as $$ begin perform pg_sleep(0.5); return null; end $$;
             create constraint trigger wait after insert on effect deferrable initially deferred
             for each row execute function wait()",
        )
        .await?;
    for again in [Kind::InDatabase, Kind::AtMostOnce] {
        outside(&direct, "truncate effect").await;
        let name = format!("asked again {again:?}");
        let lost = timeout(Duration::from_millis(250), Kind::InDatabase.step(&lease, &name, 1)).await;
        assert!(lost.is_err(), "COMMIT takes longer");
        // The COMMIT was on the wire, and took effect; or the step was rolled back, and is performed now.
        let value = timeout(PATIENCE, again.step(&lease, &name, 2)).await??;
        let performed_again = i64::from(again == Kind::InDatabase && value == 2);
        assert_eq!(effects(&direct).await, i64::from(value == 1) + performed_again, "{again:?}: {value}");
    }
    Ok(())
}

fn problem<T: std::fmt::Debug>(result: Result<T, Error>) -> InvalidStep {
    match result {
        Err(Error::Misuse(Misuse::Step { problem, .. })) => problem,
        other => panic!("{other:?}"),
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_bad_step_is_refused_before_it_is_performed(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let lease = acquired(&pool).await;
    for kind in KINDS {
        for name in [String::new(), "n".repeat(256), "a\0b".to_owned()] {
            assert_eq!(problem(kind.step(&lease, &name, 1).await), InvalidStep::Name);
        }
        let name = format!("{kind:?}");
        kind.step(&lease, &name, 1).await?;
        for other in KINDS {
            assert_eq!(problem(other.step(&lease, &name, 1).await), InvalidStep::Repeated);
        }
    }
    assert_eq!(effects(&pool).await, 1);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_inside_a_step_is_refused(pool: PgPool) -> anyhow::Result<()> {
    let lease = acquired(&pool).await;
    for kind in KINDS {
        // Boxed, because the future of this test would contain it in each of the three steps.
        let inner = async || format!("{:?}", problem(Box::pin(kind.step(&lease, "inner", 1)).await));
        let name = format!("{kind:?}");
        let found: [String; 3] = [
            lease.step(&format!("{name} 1"), async |_| Ok::<_, Error>(inner().await)).await?,
            lease.step_at_least_once(&format!("{name} 2"), async |_| Ok::<_, Error>(inner().await)).await?,
            lease.step_at_most_once(&format!("{name} 3"), async |_| Ok::<_, Error>(inner().await)).await?,
        ];
        assert_eq!(found, ["Nested"; 3]);
    }
    // A step of another operation is none of this one.
    let other = owner(&pool, LeaseOptions::new(IN_STEPS), &key("b")).await;
    let value = lease
        .step_at_least_once("around", async |_| other.step_at_least_once("inner", async |_| Ok::<_, Error>(1)).await)
        .await?;
    assert_eq!(value, 1);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_is_refused_above_the_limits(pool: PgPool) -> anyhow::Result<()> {
    let lease = acquired(&pool).await;
    // A string of JSON has two quotes.
    let largest = "x".repeat(64 * 1024 - 2);
    for n in 0..4 {
        Kind::AtLeastOnce.step(&lease, &n.to_string(), largest.clone()).await?;
    }
    assert_eq!(problem(Kind::AtLeastOnce.step(&lease, "one more", 1).await), InvalidStep::TooLarge);
    let lease = after_a_crash(&pool, lease).await;
    assert_eq!(problem(Kind::AtLeastOnce.step(&lease, "one more", 1).await), InvalidStep::TooLarge);
    assert_eq!(Kind::AtLeastOnce.step(&lease, "3", String::new()).await?, largest);
    pool.execute("truncate idempotency.record").await?;
    drop(lease);
    let lease = acquired(&pool).await;
    assert_eq!(problem(Kind::AtLeastOnce.step(&lease, "large", largest.clone() + "x").await), InvalidStep::TooLarge);
    // The size is known only after the effect.
    assert_eq!(problem(Kind::AtMostOnce.step(&lease, "text", largest + "x").await), InvalidStep::TooLarge);
    assert_in_doubt(Kind::AtMostOnce.step(&lease, "text", String::new()).await);
    // The step in doubt is one of them.
    for n in 0..99 {
        Kind::AtLeastOnce.step(&lease, &n.to_string(), n).await?;
    }
    assert_eq!(problem(Kind::AtLeastOnce.step(&lease, "100", 1).await), InvalidStep::TooLarge);
    Ok(())
}

/// The results of steps side by side count before they are stored.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn steps_side_by_side_keep_the_limit_of_all_results(pool: PgPool) -> anyhow::Result<()> {
    const STEPS: usize = 8;
    let pool = pool_of(4, &pool.connect_options()).await;
    create_effects(&pool).await;
    each(KINDS, async |kind| {
        outside(&pool, "truncate idempotency.record, effect").await;
        let lease = acquired(&pool).await;
        let largest = "x".repeat(64 * 1024 - 2);
        let step = async |name: String| match kind.step(&lease, &name, largest.clone()).await {
            Ok(_) => true,
            Err(Error::Misuse(Misuse::Step { problem: InvalidStep::TooLarge, .. })) => false,
            Err(error) => panic!("{kind:?}: {error:?}"),
        };
        let stored = futures_util::future::join_all((0..STEPS).map(|n| step(n.to_string()))).await;
        assert_eq!(stored.iter().filter(|stored| **stored).count(), 4, "{kind:?}: {stored:?}");
        let bytes: i64 = sqlx::query_scalar(
            "select sum(octet_length(step.value ->> 'result'::text)) from idempotency.record, jsonb_each(steps) as step",
        )
        .fetch_one(&pool)
        .await?;
        assert_eq!(bytes, 256 * 1024, "{kind:?}");
        Ok(())
    })
    .await;
    Ok(())
}

/// It is unknown whether the result of a dropped step is stored, so its size stays reserved.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_that_is_dropped_while_it_is_stored_counts(pool: PgPool) -> anyhow::Result<()> {
    // No heartbeat and no second try comes in the time of this test: they would be blocked, too.
    let leasing = LeaseOptions::new(Policy::InSteps { lease: LEASE * 15 });
    let lease = owner(&pool, leasing, &key("a")).await;
    let largest = "x".repeat(64 * 1024 - 2);
    for n in 0..4 {
        let mut row = pool.begin().await?;
        row.execute("select from idempotency.record for update").await?;
        let name = n.to_string();
        tokio::select! {
            stored = Kind::AtLeastOnce.step(&lease, &name, largest.clone()) => panic!("the record is locked: {stored:?}"),
            blocked = until_blocked(&pool, 1) => blocked?,
        }
        row.commit().await?;
        // The statement that was dropped would count as blocked in the next round.
        until_blocked(&pool, 0).await?;
    }
    assert_eq!(problem(Kind::AtLeastOnce.step(&lease, "one more", 1).await), InvalidStep::TooLarge);
    // Asked for again, it has a size that is known.
    assert_eq!(Kind::AtLeastOnce.step(&lease, "3", "small".to_owned()).await?, "small");
    assert_eq!(Kind::AtLeastOnce.step(&lease, "one more", 1).await?, 1);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_result_comes_back_to_the_last_bit(pool: PgPool) -> anyhow::Result<()> {
    let result = ("a\0b\u{202e}\"\\".to_owned(), -0.0_f64, 5e-324_f64, u128::MAX, (), Some(vec![1_u8]));
    let lease = acquired(&pool).await;
    Kind::AtLeastOnce.step(&lease, "value", result.clone()).await?;
    let error = Kind::AtLeastOnce.step(&lease, "no value", f64::NAN).await.expect_err("JSON has no NaN");
    assert!(matches!(error, Error::Unencodable { .. }), "{error:?}");
    let lease = after_a_crash(&pool, lease).await;
    let other = (String::new(), 1.0_f64, 1.0_f64, 1_u128, (), None);
    let stored = Kind::AtLeastOnce.step(&lease, "value", other).await?;
    assert_eq!((&stored, stored.1.to_bits()), (&result, result.1.to_bits()));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_result_of_another_type_is_told_with_its_step(pool: PgPool) -> anyhow::Result<()> {
    let lease = acquired(&pool).await;
    Kind::AtLeastOnce.step(&lease, "ride", "seven".to_owned()).await?;
    let lease = after_a_crash(&pool, lease).await;
    let error = Kind::AtLeastOnce.step(&lease, "ride", 7).await.expect_err("a text is stored");
    assert!(matches!(&error, Error::Undecodable { step: Some(step), .. } if step == "ride"), "{error:?}");
    assert_eq!(Kind::AtLeastOnce.step(&lease, "ride", String::new()).await?, "seven");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_step_has_its_own_downstream_key_in_every_attempt(pool: PgPool) -> anyhow::Result<()> {
    let mut lease = acquired(&pool).await;
    let mut keys = Vec::new();
    for attempt in 1..=2 {
        for name in ["charge", "refund"] {
            let key = lease
                .step_at_least_once(name, async |step| -> Result<(), WorkError> {
                    keys.push(step.downstream_key().to_owned());
                    Err(WorkError::Gateway)
                })
                .await;
            assert!(key.is_err());
        }
        keys.push(lease.downstream_key());
        if attempt == 1 {
            lease = after_a_crash(&pool, lease).await;
        }
    }
    assert_eq!(keys[..3], keys[3..]);
    let shown = pg_idempotency::operator::show(&pool, &key("a")).await?.expect("a record");
    assert_eq!(shown.downstream_key, None, "an operator searches for the keys of the steps");
    for (name, key) in ["charge", "refund"].iter().zip(&keys) {
        assert_eq!(shown.downstream_key_of_step(name).as_ref(), Some(key));
    }
    assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2]);
    assert!(keys.iter().flat_map(|key| key.bytes()).all(|byte| byte.is_ascii_hexdigit()));
    assert!(keys.iter().all(|key| key.len() == 32));
    Ok(())
}
