//! The statements that the crate sends, and their names. A proxy reads them, as `log_statement = all` would show them.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Acquired, Finding, InDoubt, Lease, LeaseOptions, Policy, Reconciler};
use pg_idempotency::mark::MarkOptions;
use pg_idempotency::operator;
use pg_idempotency::testing::{age, expire, lapse};
use pg_idempotency::{Error, Idempotency, Verdict, migrate};
use rig::proxy::Proxy;
use sqlx::{Executor as _, PgConnection, PgPool};

use crate::lease::reconcile::pass_time;
use crate::operator::settle::{VERBS, settle, waiting};
use crate::support::{janitor, key, pool_of};

const WINDOW: Duration = Duration::from_secs(300);
const LEASE: Duration = Duration::from_millis(1_500);
const POLICIES: [Policy; 3] =
    [Policy::AtLeastOnce { lease: LEASE }, Policy::AtMostOnce { lease: LEASE }, Policy::InSteps { lease: LEASE }];

/// What only a server with Citus has.
const FOR_CITUS: [&str; 3] = ["citus", "pg_dist_", "run_command_on_"];

/// The question whether the server has Citus.
const IS_THERE: &str = "select /* pg_idempotency: has citus */ from pg_catalog.pg_extension where extname = 'citus'";

fn is_for_citus(statement: &str) -> bool {
    let code = without_comments(statement).to_lowercase();
    FOR_CITUS.iter().any(|word| code.contains(word))
}

fn without_comments(statement: &str) -> String {
    statement.lines().filter(|line| !line.trim_start().starts_with("--")).collect::<Vec<_>>().join(" ")
}

/// What was sent to the server meanwhile, each text once.
async fn sent<W>(direct: &PgPool, work: W) -> anyhow::Result<BTreeSet<String>>
where
    W: AsyncFnOnce(&PgPool) -> anyhow::Result<()>,
{
    let proxy = Proxy::listening(&direct.connect_options()).await?;
    let pool = pool_of(3, &proxy.options).await;
    work(&pool).await?;
    pool.close().await;
    Ok(proxy.statements().into_iter().collect())
}

/// Calls of every kind, in every state of their keys.
async fn call(pool: &PgPool) -> anyhow::Result<()> {
    let calls = Idempotency::new();
    for replay_first in [false, true] {
        let (way, key) = (calls.replay_first(replay_first), key(&format!("{replay_first}")));
        for expired in [false, true] {
            if expired {
                expire(pool, &key).await?;
            }
            for _ in ["first", "replay"] {
                let _ = way.run(pool, &key, "body", async |_| Ok::<_, Error>(1)).await?;
            }
        }
    }
    let mut tx = pool.begin().await?;
    let undone = async |_: &mut PgConnection| Ok::<_, Error>(Verdict::Undo(1));
    let _ = calls.ensure_isolated(&mut tx, &key("undone"), "body", undone).await?;
    let failing = async |_: &mut PgConnection| Err::<Verdict<i32>, _>(Error::LeaseLost);
    let _ = calls.ensure_isolated(&mut tx, &key("failed"), "body", failing).await.expect_err("it fails");
    let marking = MarkOptions::new(WINDOW);
    for _ in ["first", "replay", "expired"] {
        let _ = calls.ensure(&mut tx, &key("in a transaction"), "body", async |_| Ok::<_, Error>(1)).await?;
        let _ = marking.mark(&mut tx, &key("mark")).await?;
        let _ = marking.mark_many(&mut tx, &[key("batch"), key("mark")]).await?;
        tx.commit().await?;
        expire(pool, &key("mark")).await?;
        tx = pool.begin().await?;
    }
    Ok(())
}

/// Leases of every policy: completed, failed and abandoned ones, their renewal, and what settles them.
async fn lease(pool: &PgPool) -> anyhow::Result<()> {
    for policy in POLICIES {
        let leasing = LeaseOptions::new(policy).store_request(true);
        let leasing = leasing.max_attempts(NonZeroU32::MAX).resume_after(LEASE);
        let in_steps = matches!(policy, Policy::InSteps { .. });
        let work = async |lease: &Lease, _: String| {
            if in_steps {
                lease.step("row", async |_| Ok::<_, Error>(1)).await?;
                lease.step_at_least_once("mail", async |_| Ok::<_, Error>(1)).await?;
                lease.step_at_most_once("text", async |_| Ok::<_, Error>(1)).await?;
            }
            Ok::<_, Error>(1)
        };
        let key = |value: &str| key(&format!("{policy:?} {value}"));
        let acquire = async |value: &str| match leasing.acquire::<i32, _>(pool, &key(value), "body").await {
            Ok(Acquired::Owner(lease)) => lease,
            other => panic!("{value}: {other:?}"),
        };
        // Longer than a third of the lease, so that it is renewed.
        let slow = async |lease: &Lease| {
            tokio::time::sleep(LEASE / 2).await;
            work(lease, String::new()).await
        };
        for _ in ["first", "replay"] {
            let _ = leasing.run(pool, &key("done"), "body", slow).await?;
        }
        let failing = async |_: &Lease| Err::<i32, _>(Error::LeaseLost);
        let _ = leasing.run(pool, &key("failed"), "body", failing).await.expect_err("it fails");
        let refusing = async |lease: &Lease| Err::<i32, _>(lease.not_performed(Error::LeaseLost));
        let _ = leasing.run(pool, &key("refused"), "body", refusing).await.expect_err("it fails");
        acquire("released").await.release("on purpose").await?;
        drop(acquire("abandoned").await);
        lapse(pool, &key("abandoned")).await?;
        age(pool, &key("abandoned"), WINDOW).await?;
        if !matches!(policy, Policy::AtMostOnce { .. }) {
            let _ = leasing.resume_one(pool, "operation", work).await?;
        }
    }
    Ok(())
}

/// Operations in doubt, and a reconciler that finds no trace, or the effect.
async fn reconcile(pool: &PgPool, direct: &PgPool) -> anyhow::Result<()> {
    for policy in &POLICIES[1..] {
        let leasing = LeaseOptions::new(*policy).store_request(true);
        let reconciler = Reconciler::new(leasing, "operation", Duration::from_secs(120))?.probes(2, 2);
        for took_effect in [false, true] {
            direct.execute("truncate idempotency.record").await?;
            let lost = leasing.acquire::<i32, _>(pool, &key("lost"), "body").await?;
            if let (Acquired::Owner(lease), Policy::InSteps { .. }) = (&lost, policy) {
                let failing = async |_: &pg_idempotency::lease::Step| Err::<i32, _>(Error::LeaseLost);
                let _ = lease.step_at_most_once("text", failing).await.expect_err("it fails");
            }
            drop(lost);
            lapse(pool, &key("lost")).await?;
            for _ in ["noted", "asked", "asked again"] {
                let finding = async |_: &InDoubt| {
                    if took_effect { Finding::took_effect(&1) } else { Ok::<_, Error>(Finding::NoTrace) }
                };
                let _ = reconciler.visit_one(pool, finding).await?;
                pass_time(direct).await;
            }
        }
    }
    Ok(())
}

/// Every verb of an operator, in a transaction of its own and in one of the caller.
async fn decide(pool: &PgPool, direct: &PgPool) -> anyhow::Result<()> {
    for verb in VERBS {
        let key = waiting(direct, verb).await.key;
        let shown = operator::show(pool, &key).await?.expect("a record");
        let _ = settle(verb, shown, pool).await?;
        let shown = waiting(direct, verb).await;
        let mut tx = pool.begin().await?;
        let _ = settle(verb, shown, &mut tx).await?;
        tx.commit().await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_statement_has_a_name_and_none_is_only_for_citus(direct: PgPool) -> anyhow::Result<()> {
    let statements = sent(&direct, async |pool| {
        call(pool).await?;
        lease(pool).await?;
        decide(pool, &direct).await?;
        reconcile(pool, &direct).await?;
        operator::stats(pool).await?;
        janitor(pool).sweep_once(10).await?;
        Ok(migrate(pool).await?)
    })
    .await?;
    assert!(statements.len() > 40, "{}", statements.len());
    let unnamed: Vec<String> = sqlx::query_scalar(
        // Not at the start of a statement, where PostgreSQL 18 leaves a comment out.
        "select statement from unnest($1::text[]) as statement
        where statement like '%idempotency.%' and statement !~ '^\\s*\\w+ /\\* pg_idempotency: [a-z_ ]+ \\*/\\s'",
    )
    .bind(statements.iter().cloned().collect::<Vec<_>>())
    .fetch_all(&direct)
    .await?;
    assert_eq!(unnamed, Vec::<String>::new());
    let for_citus: Vec<_> = statements.iter().filter(|statement| is_for_citus(statement)).collect();
    assert_eq!(for_citus, [IS_THERE], "the size of the table");
    Ok(())
}

/// On a server without Citus, the catalog of Citus is not there.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn health_only_asks_whether_there_is_citus(pool: PgPool) -> anyhow::Result<()> {
    let statements = sent(&pool, async |pool| Ok(operator::health(pool, WINDOW).await.map(drop)?)).await?;
    let questions: Vec<_> = statements.into_iter().filter(|statement| is_for_citus(statement)).collect();
    assert_eq!(questions, [IS_THERE]);
    Ok(())
}
