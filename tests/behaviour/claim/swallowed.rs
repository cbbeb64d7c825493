//! A database that swallows the record of a claim, or hides it. Nobody else has the key, so no call may say for ever
//! that it is in flight.

use std::time::Duration;

use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::mark::MarkOptions;
use pg_idempotency::operator::health;
use pg_idempotency::testing::age;
use pg_idempotency::{Error, Fingerprint, Idempotency, Misuse, OnDuplicate, Verdict};
use rig::fixture::Fixture;
use rig::functions;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS};
use rig::role::with_role;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

use crate::lease::resume::{MINUTE, abandoned, leasing};
use crate::support::{create_effects, effects, key, leave_effect, options, pool_of};

const HOUR: Duration = Duration::from_secs(3600);
const WAIT: OnDuplicate = OnDuplicate::Wait(Duration::from_millis(1));

/// The ways to claim a key.
#[derive(Clone, Copy, Debug)]
enum Door {
    Ensure,
    Isolated,
    Run,
    ReplayFirst,
    Mark,
    MarkMany,
    Leased(Policy),
    SqlEnsure,
    SqlRun,
}
const IN_TRANSACTION: [Door; 5] = [Door::Ensure, Door::Isolated, Door::Mark, Door::MarkMany, Door::SqlEnsure];
const OTHERS: [Door; 6] = [
    Door::Run,
    Door::ReplayFirst,
    Door::Leased(AT_LEAST_ONCE),
    Door::Leased(IN_STEPS),
    Door::Leased(AT_MOST_ONCE),
    Door::SqlRun,
];

/// What the caller is told.
#[derive(Debug, PartialEq)]
enum Told {
    Done,
    InFlight,
    Swallowed,
}

fn told<T>(result: Result<T, Error>) -> Told {
    match result.err() {
        None => Told::Done,
        Some(Error::InFlight { .. }) => Told::InFlight,
        Some(Error::Misuse(Misuse::ClaimSwallowed)) => Told::Swallowed,
        Some(error) => panic!("{error:?}"),
    }
}

fn told_in_sql(outcome: sqlx::Result<String>) -> Told {
    match outcome {
        Ok(outcome) if outcome == "in_flight" => Told::InFlight,
        Ok(outcome) if ["claimed", "performed"].contains(&&*outcome) => Told::Done,
        Ok(outcome) => panic!("{outcome}"),
        Err(error) => {
            let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default().into_owned();
            assert_eq!(code, "IK009", "{error}");
            Told::Swallowed
        }
    }
}

impl Door {
    async fn call_in(self, conn: &mut PgConnection, value: &str) -> anyhow::Result<Told> {
        let (options, key) = (Idempotency::new().on_duplicate(WAIT), key(value));
        let perform = async |conn: &mut PgConnection| leave_effect(conn, value).await;
        let marks = MarkOptions::new(HOUR).on_duplicate(WAIT);
        Ok(match self {
            Self::Ensure => told(options.ensure(conn, &key, "body", perform).await),
            Self::Isolated => {
                let perform = async |conn: &mut PgConnection| leave_effect(conn, value).await.map(Verdict::Keep);
                told(options.ensure_isolated(conn, &key, "body", perform).await)
            }
            Self::Mark => told(marks.mark(conn, &key).await),
            Self::MarkMany => {
                let others = ["x", "y"].map(|other| crate::support::key(&format!("{value}{other}")));
                told(marks.mark_many(conn, &[&others[..], &[key]].concat()).await)
            }
            Self::SqlEnsure => {
                let fingerprint = Fingerprint::of_json("body")?;
                let answer = functions::ensure(conn, &key, fingerprint.as_bytes(), Some("1 ms")).await;
                told_in_sql(answer.map(|answer| answer.outcome))
            }
            _ => panic!("{self:?} takes a pool"),
        })
    }

    async fn call(self, pool: &PgPool, value: &str) -> anyhow::Result<Told> {
        let (options, key) = (Idempotency::new().on_duplicate(WAIT), key(value));
        let perform = async |conn: &mut PgConnection| leave_effect(conn, value).await;
        Ok(match self {
            Self::Run => told(options.run(pool, &key, "body", perform).await),
            Self::ReplayFirst => told(options.replay_first(true).run(pool, &key, "body", perform).await),
            Self::Leased(policy) => {
                told(LeaseOptions::new(policy).on_duplicate(WAIT).acquire::<i64, _>(pool, &key, "body").await)
            }
            Self::SqlRun => {
                let run = "select outcome from idempotency.run('tenant', 'operation', $1, $2, 'answer', '{}', wait => '1 ms')";
                let run = sqlx::query_scalar(run).bind(value).bind(Fingerprint::of_json("body")?.as_bytes().to_vec());
                told_in_sql(run.fetch_one(pool).await)
            }
            in_transaction => {
                let mut tx = pool.begin().await?;
                let told = in_transaction.call_in(&mut tx, value).await?;
                tx.commit().await?;
                told
            }
        })
    }
}

/// The effect of `idempotency.run`.
const ANSWER: &str = "create function answer(jsonb, out status int, out headers jsonb, out body bytea) language sql as
    $$ insert into effect (note) values ('run') returning 200, null::jsonb, null::bytea $$";

fn trigger(when: &str, events: &str, returns: &str) -> String {
    format!(
        "create function in_the_way() returns trigger language plpgsql as 'begin return {returns}; end';
         create trigger in_the_way {when} {events} on idempotency.record for each row execute function in_the_way()"
    )
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_trigger_that_swallows_the_claim_is_a_mistake_at_every_door(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    pool.execute(ANSWER).await?;
    pool.execute(AssertSqlSafe(trigger("before", "insert", "null"))).await?;
    for door in IN_TRANSACTION.into_iter().chain(OTHERS) {
        for _ in ["first", "again"] {
            assert_eq!(door.call(&pool, "a").await?, Told::Swallowed, "{door:?}");
        }
    }
    assert_eq!(effects(&pool).await, 0);
    pool.execute("drop trigger in_the_way on idempotency.record").await?;
    for door in IN_TRANSACTION.into_iter().chain(OTHERS) {
        let value = format!("{door:?}");
        assert_eq!(door.call(&pool, &value).await?, Told::Done, "{door:?}");
    }
    Ok(())
}

/// The update of a take-over, of a record in each state in which a call may take it over.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_trigger_that_swallows_a_take_over_is_a_mistake_at_every_door(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    pool.execute(ANSWER).await?;
    let expired = key("expired");
    Fixture::completed(&expired, "body", &1)?.expired().write(&pool).await?;
    Fixture::released(&key("released"), "body")?.write(&pool).await?;
    Fixture::lapsed(&key("lapsed"), "body", AT_LEAST_ONCE)?.write(&pool).await?;
    // A resumer finds it, and must not go on to the next operation in silence.
    abandoned(&pool, "abandoned").await;
    age(&pool, &key("abandoned"), MINUTE).await?;
    pool.execute(AssertSqlSafe(trigger("before", "update", "null"))).await?;
    for door in IN_TRANSACTION.into_iter().chain(OTHERS) {
        assert_eq!(door.call(&pool, "expired").await?, Told::Swallowed, "{door:?}");
    }
    for door in [Door::Ensure, Door::Isolated, Door::Run, Door::SqlEnsure, Door::SqlRun] {
        assert_eq!(door.call(&pool, "released").await?, Told::Swallowed, "{door:?}");
    }
    assert_eq!(Door::Leased(AT_LEAST_ONCE).call(&pool, "lapsed").await?, Told::Swallowed);
    let resumed = leasing().resume_one(&pool, "operation", async |_, _: String| Ok::<i64, Error>(1)).await;
    assert!(matches!(resumed, Err(Error::Misuse(Misuse::ClaimSwallowed))), "{resumed:?}");
    assert_eq!(effects(&pool).await, 0);
    Ok(())
}

/// A policy that hides the records of others. It lets each new record through, and hides that of the key.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_policy_that_hides_the_record_is_a_mistake_at_every_door(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    pool.execute(ANSWER).await?;
    Fixture::completed(&key("hidden"), "body", &1)?.write(&pool).await?;
    pool.execute(
        "alter table idempotency.record enable row level security;
         create policy writes on idempotency.record for insert with check (true);
         create policy own on idempotency.record for select using (token <> 0)",
    )
    .await?;
    let grants = "grant usage on schema idempotency to @role; grant all on effect to @role;
        grant select, insert, update, delete on all tables in schema idempotency to @role;
        grant execute on all functions in schema idempotency to @role";
    with_role(&pool, grants, async |role| {
        let of_role = pool_of(2, &options(&pool).username(role)).await;
        for door in IN_TRANSACTION.into_iter().chain(OTHERS) {
            assert_eq!(door.call(&of_role, "hidden").await?, Told::Swallowed, "{door:?}");
        }
        anyhow::Ok(())
    })
    .await?;
    assert_eq!(effects(&pool).await, 0);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn each_isolation_level_names_the_cause(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    pool.execute(AssertSqlSafe(trigger("before", "insert", "null"))).await?;
    for level in ["read uncommitted", "read committed", "repeatable read", "serializable"] {
        for door in IN_TRANSACTION {
            let mut conn = pool.acquire().await?;
            let begin = format!("begin isolation level {level}");
            let mut tx = conn.begin_with(AssertSqlSafe(begin)).await?;
            assert_eq!(door.call_in(&mut tx, "a").await?, Told::Swallowed, "{level}: {door:?}");
            tx.rollback().await?;
        }
    }
    Ok(())
}

/// What `health` says about the table.
async fn named(pool: &PgPool) -> anyhow::Result<Vec<String>> {
    let warnings = health(pool, HOUR).await?;
    let named = warnings.into_iter().filter(|warning| warning.name() == "may_swallow");
    Ok(named.map(|warning| warning.to_string().split(" can swallow").next().unwrap_or_default().to_owned()).collect())
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn health_names_what_may_swallow_a_record_and_no_trigger_after_it(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    pool.execute(ANSWER).await?;
    pool.execute(AssertSqlSafe(trigger("after", "insert or update or delete", "null"))).await?;
    assert_eq!(named(&pool).await?, Vec::<String>::new());
    for door in IN_TRANSACTION.into_iter().chain(OTHERS) {
        let value = format!("{door:?}");
        assert_eq!(door.call(&pool, &value).await?, Told::Done, "{door:?}");
    }
    for (object, name) in [
        (
            "create trigger \"An audit\" before delete on idempotency.record for each row execute function in_the_way()",
            "the trigger \"An audit\" on idempotency.record",
        ),
        ("create rule log as on delete to idempotency.record do also select 1", "the rule log on idempotency.record"),
        ("create policy own on idempotency.record using (true)", ""),
        ("alter table idempotency.record enable row level security", "the policy own on idempotency.record"),
        ("drop policy own on idempotency.record", "row level security on idempotency.record"),
    ] {
        let before = named(&pool).await?;
        pool.execute(object).await?;
        let new: Vec<_> = named(&pool).await?.into_iter().filter(|name| !before.contains(name)).collect();
        assert_eq!(
            new,
            Some(name.to_owned()).filter(|name| !name.is_empty()).into_iter().collect::<Vec<_>>(),
            "{object}"
        );
    }
    pool.execute("alter table idempotency.record disable trigger \"An audit\"").await?;
    assert!(named(&pool).await?.iter().all(|name| !name.contains("audit")));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::PARTITIONED_MIGRATOR")]
async fn health_names_a_trigger_of_all_partitions_once(pool: PgPool) -> anyhow::Result<()> {
    pool.execute(AssertSqlSafe(trigger("before", "insert", "null"))).await?;
    assert_eq!(named(&pool).await?, ["the trigger in_the_way on idempotency.record"]);
    assert_eq!(Door::Ensure.call(&pool, "a").await?, Told::Swallowed);
    let leaf: String = sqlx::query_scalar(
        "select relid::regclass::text from pg_partition_tree('idempotency.record') where isleaf order by 1 limit 1",
    )
    .fetch_one(&pool)
    .await?;
    pool.execute("drop trigger in_the_way on idempotency.record").await?;
    let on_leaf = format!("create trigger own before update on {leaf} for each row execute function in_the_way()");
    pool.execute(AssertSqlSafe(on_leaf)).await?;
    assert_eq!(named(&pool).await?, [format!("the trigger own on {leaf}")]);
    Ok(())
}
