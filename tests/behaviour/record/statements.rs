//! The statements that the crate sends: their names, and what they say to a plain server and to Citus. A proxy reads
//! them, as `log_statement = all` would show them.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Acquired, Finding, InDoubt, Lease, LeaseOptions, Policy, Reconciler};
use pg_idempotency::mark::MarkOptions;
use pg_idempotency::operator;
use pg_idempotency::testing::{age, expire, lapse};
use pg_idempotency::{Deployment, Error, Idempotency, Verdict, migrate};
use rig::proxy::Proxy;
use sqlx::{Executor as _, PgConnection, PgPool};

use crate::lease::reconcile::pass_time;
use crate::operator::settle::{VERBS, settle, waiting};
use crate::support::{janitor, key, pool_of};

const WINDOW: Duration = Duration::from_secs(300);
const LEASE: Duration = Duration::from_millis(1_500);
const POLICIES: [Policy; 3] =
    [Policy::AtLeastOnce { lease: LEASE }, Policy::AtMostOnce { lease: LEASE }, Policy::InSteps { lease: LEASE }];

/// What only a table that Citus distributes needs.
const FOR_CITUS: [&str; 5] = ["citus", "pg_dist_", "run_command_on_", "create_distributed_table", "propagate"];

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
async fn call(pool: &PgPool, deployment: Deployment) -> anyhow::Result<()> {
    let calls = Idempotency::new().deployment(deployment);
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
    let marking = MarkOptions::new(WINDOW).deployment(deployment);
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
async fn lease(pool: &PgPool, deployment: Deployment) -> anyhow::Result<()> {
    for policy in POLICIES {
        let leasing = LeaseOptions::new(policy).store_request(true).deployment(deployment);
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
async fn reconcile(pool: &PgPool, direct: &PgPool, deployment: Deployment) -> anyhow::Result<()> {
    for policy in &POLICIES[1..] {
        let leasing = LeaseOptions::new(*policy).store_request(true).deployment(deployment);
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

/// Every verb of an operator, in a transaction of its own and in one of the caller. They are told of no deployment.
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

async fn everything(pool: &PgPool, direct: &PgPool, deployment: Deployment) -> anyhow::Result<()> {
    call(pool, deployment).await?;
    lease(pool, deployment).await?;
    decide(pool, direct).await?;
    reconcile(pool, direct, deployment).await
}

/// Three properties of the same statements, because it takes some seconds until all of them are sent.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_statement_has_a_name_and_none_is_for_citus_unless_the_deployment_says_so(
    direct: PgPool,
) -> anyhow::Result<()> {
    let mut all = BTreeSet::new();
    for deployment in crate::support::DEPLOYMENTS {
        direct.execute("truncate idempotency.record").await?;
        let statements = sent(&direct, async |pool| everything(pool, &direct, *deployment).await).await?;
        if *deployment == Deployment::new() && !cfg!(idempotency_distributed) {
            let for_citus: Vec<_> = statements.iter().filter(|statement| is_for_citus(statement)).collect();
            assert!(for_citus.is_empty(), "{for_citus:#?}");
        } else {
            assert!(statements.iter().any(|statement| is_for_citus(statement)), "the proxy reads the statements");
        }
        all.extend(statements);
    }
    assert!(all.len() > 40, "{}", all.len());
    let unnamed: Vec<String> = sqlx::query_scalar(
        // Not at the start of a statement, where PostgreSQL 18 leaves a comment out.
        "select statement from unnest($1::text[]) as statement
        where statement like '%idempotency.%' and statement !~ '^\\s*\\w+ /\\* pg_idempotency: [a-z_ ]+ \\*/\\s'",
    )
    .bind(all.iter().cloned().collect::<Vec<_>>())
    .fetch_all(&direct)
    .await?;
    assert_eq!(unnamed, Vec::<String>::new());
    let refused = refused_by_citus(&direct, &all).await?;
    assert!(refused.is_empty(), "{refused:#?}");
    Ok(())
}

/// What an operator and a janitor ask the catalog, on a server without Citus.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "there are more questions")]
async fn only_these_questions_find_out_whether_there_is_citus(pool: PgPool) -> anyhow::Result<()> {
    const IS_THERE: &str =
        "select /* pg_idempotency: distribution */ from pg_catalog.pg_extension where extname = 'citus'";
    let migrating = sent(&pool, async |pool| Ok(migrate(pool).await?)).await?;
    let measuring = sent(&pool, async |pool| Ok(operator::stats(pool).await.map(drop)?)).await?;
    let health = sent(&pool, async |pool| Ok(operator::health(pool, WINDOW).await.map(drop)?)).await?;
    let sweeping = sent(&pool, async |pool| Ok(janitor(pool).sweep_once(10).await.map(drop)?)).await?;
    for (work, statements, expected) in [
        ("migrate", migrating, vec![]),
        ("stats", measuring, vec![IS_THERE]),
        ("health", health, vec![IS_THERE]),
        ("sweep", sweeping, vec![IS_THERE]),
    ] {
        assert!(!statements.is_empty(), "{work}");
        let questions: Vec<_> = statements.into_iter().filter(|statement| is_for_citus(statement)).collect();
        assert_eq!(questions, expected, "{work}");
    }
    Ok(())
}

/// The updates and deletes that Citus would refuse on a distributed table: `record/distributed.rs` has the rules. The
/// catalog of a plain server has the volatility of each function, too.
async fn refused_by_citus(pool: &PgPool, statements: &BTreeSet<String>) -> anyhow::Result<Vec<String>> {
    let volatility: Vec<(String, String)> = sqlx::query_as(
        "select proname::text, max(provolatile::text) from pg_proc where pronamespace = 'pg_catalog'::regnamespace::oid
        group by proname having max(provolatile::text) in ('s', 'v')",
    )
    .fetch_all(pool)
    .await?;
    let columns: Vec<String> = sqlx::query_scalar(
        "select attname::text from pg_attribute where attrelid = 'idempotency.record'::regclass::oid and attnum > 0",
    )
    .fetch_all(pool)
    .await?;
    let (volatility, columns) = (volatility.into_iter().collect(), columns.into_iter().collect());
    let one_row = |statement: &&String| {
        let first = statement.split_whitespace().next().unwrap_or_default();
        // A statement with a CTE in front is for a plain table, but the take-over of a distributed one.
        let writes =
            ["update", "delete"].contains(&first) || statement.contains("with /* pg_idempotency: take over */ free");
        writes && statement.contains("/* pg_idempotency: ")
    };
    let writes: Vec<_> = statements.iter().filter(one_row).collect();
    anyhow::ensure!(writes.len() > 15, "{writes:#?}");
    // The usual statement forgets its claim in RETURNING; a distributed table has one without.
    let is_usual = |statement: &str| statement.contains("release in transaction") && statement.contains("returning");
    let refused = writes.into_iter().filter(|statement| !is_usual(statement));
    Ok(refused
        .filter_map(|statement| Some(format!("{}: {statement}", mistake(statement, &volatility, &columns)?)))
        .collect())
}

/// The first mistake of an update or delete.
fn mistake(statement: &str, volatility: &BTreeMap<String, String>, columns: &BTreeSet<String>) -> Option<String> {
    let code = without_comments(statement);
    // Texts have no code.
    let code: String = code.split('\'').step_by(2).collect::<Vec<_>>().join(" x ");
    let mut tokens: Vec<&str> = Vec::new();
    for word in code.split_inclusive(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$')) {
        let (name, mark) =
            word.split_at(word.trim_end_matches(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$')).len());
        tokens.extend([name, mark.trim()].into_iter().filter(|token| !token.is_empty()));
    }
    // Open CASEs and parentheses: whether COALESCE or a function that is not immutable has opened them.
    let mut open: Vec<&str> = Vec::new();
    let mut returning = false;
    for (at, token) in tokens.iter().enumerate() {
        let before = if at > 0 { tokens[at - 1] } else { "" };
        let kind = volatility.get(*token).filter(|_| tokens.get(at + 1) == Some(&"("));
        returning |= *token == "returning";
        if let Some(kind) = kind {
            let conditional = open.iter().any(|opener| ["case", "coalesce"].contains(opener));
            if conditional || returning || kind == "v" {
                return Some(format!("{token} is not immutable, and stands in {open:?}, or in RETURNING"));
            }
        }
        match *token {
            "case" => open.push("case"),
            "end" => {
                open.pop();
            }
            "(" => open.push(before),
            ")" => {
                open.pop();
            }
            column if columns.contains(column) && before != ":" => {
                if let Some(function) = open.iter().find(|opener| volatility.contains_key(**opener)) {
                    return Some(format!("{function} is not immutable, and takes the column {column}"));
                }
            }
            _ => {}
        }
    }
    None
}

/// The check above finds the mistakes that were made.
#[test]
fn the_check_finds_what_citus_has_refused() {
    let volatility =
        [("statement_timestamp", "s"), ("current_setting", "s"), ("jsonb_build_object", "s"), ("set_config", "v")];
    let volatility = volatility.map(|(name, kind)| (name.to_owned(), kind.to_owned())).into_iter().collect();
    let columns = ["token", "steps"].map(str::to_owned).into_iter().collect();
    for (statement, refused) in [
        ("update r set t = case when a then pg_catalog.statement_timestamp() end", true),
        ("update r set t = pg_catalog.statement_timestamp() + case when a then b end", false),
        ("update r set a = 1 where coalesce(pg_catalog.current_setting('x', true), '') = ''", true),
        ("update r set a = 1 where (pg_catalog.current_setting('x', true) = '') is true", false),
        ("update r set a = pg_catalog.jsonb_build_object('a', steps)", true),
        ("update r set steps = steps || pg_catalog.jsonb_build_object('steps', $1::text)", false),
        ("update r set a = 1 returning pg_catalog.set_config('a', 'b', true)", true),
        ("update r set a = 1 where token = 2 returning token", false),
    ] {
        assert_eq!(mistake(statement, &volatility, &columns).is_some(), refused, "{statement}");
    }
}
