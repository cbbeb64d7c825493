//! The answer of every entry point under the setting that fits the table, and under the other one: the same, or
//! [`Error::WrongDeployment`]. `tests/citus` has the distributed table, and `tests/behaviour` the plain one.

use std::fmt::Debug;
use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Acquired, Lease, Leasing, Policy};
use pg_idempotency::mark::Marking;
use pg_idempotency::operator::{release, release_step, resolve_step};
use pg_idempotency::testing;
use pg_idempotency::{Deployment, Error, Idempotency, InFlight, Key, Mode, RoundTrips, Verdict, operator};
use sqlx::{Connection as _, PgConnection, PgPool, PgTransaction};

use crate::fixture::Fixture;

const LEASE: Duration = Duration::from_secs(40);
const REPEATS: Policy = Policy::AtLeastOnce { lease: LEASE };
const IN_STEPS: Policy = Policy::InSteps { lease: LEASE };
const NEVER_REPEATS: Policy = Policy::AtMostOnce { lease: LEASE };
const HOUR: Duration = Duration::from_secs(3600);

/// How the lines begin that need no setting: the decisions of an operator.
pub(crate) const DECIDED: &str = "decided:";
/// And one whose answer needs no table.
pub(crate) const TOO_MANY: &str = "mark_many of 101";

/// An entry point and the state that it met, and its answer.
pub(crate) type Line = (String, String);

/// The answers of all entry points under this setting, beside processes whose setting `fits`. The database has the
/// table `answered (scope)`.
pub(crate) async fn answers(pool: &PgPool, fits: Deployment, deployment: Deployment) -> anyhow::Result<Vec<Line>> {
    let mut lines = Vec::new();
    transactions(pool, fits, deployment, &mut lines).await?;
    in_one_transaction(pool, deployment, &mut lines).await?;
    beside_another_process(pool, fits, deployment, &mut lines).await?;
    leases(pool, deployment, &mut lines).await?;
    steps(pool, deployment, &mut lines).await?;
    one_mark(pool, deployment, &mut lines).await?;
    many_marks(pool, deployment, &mut lines).await?;
    Ok(lines)
}

fn key_of(scope: &str, value: &str) -> Key {
    Key::new(scope, "answers", value).expect("a key")
}

/// A key of a new scope.
fn key() -> Key {
    key_of(&scope(), "value")
}

fn scope() -> String {
    uuid::Uuid::new_v4().to_string()
}

async fn effect(conn: &mut PgConnection, key: &Key) -> Result<i64, Error> {
    sqlx::query("insert into answered (scope) values ($1)").bind(key.scope()).execute(&mut *conn).await?;
    effects(conn, key).await
}

async fn effects(conn: &mut PgConnection, key: &Key) -> Result<i64, Error> {
    let count = sqlx::query_scalar("select count(*) from answered where scope = $1").bind(key.scope());
    Ok(count.fetch_one(conn).await?)
}

/// The value, or the name of the error.
fn said<T: Debug>(result: Result<T, Error>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(error) => {
            let debug = format!("{error:?}");
            let name = debug.split(|letter: char| !letter.is_alphanumeric()).next();
            match name {
                // Which error tells more than that it is one.
                Some("Database") => debug,
                name => name.unwrap_or_default().to_owned(),
            }
        }
    }
}

/// What an earlier call has left behind.
#[derive(Clone, Copy, Debug)]
enum Left {
    Nothing,
    Completed,
    OtherBody,
    Expired,
    Released,
    Indeterminate,
    OtherMode,
    InFlight,
}

const LEFT: [Left; 8] = [
    Left::Nothing,
    Left::Completed,
    Left::OtherBody,
    Left::Expired,
    Left::Released,
    Left::Indeterminate,
    Left::OtherMode,
    Left::InFlight,
];

impl Left {
    /// Returns the transaction of the call that is in flight.
    async fn write(self, pool: &PgPool, fits: Deployment, key: &Key) -> Result<Option<PgTransaction<'static>>, Error> {
        let fixture = match self {
            Self::Nothing => return Ok(None),
            Self::InFlight => {
                let mut owner = pool.begin().await?;
                let call = Idempotency::new().with_deployment(fits);
                let owned = call.ensure(&mut owner, key, "body", async |_| Ok::<_, Error>(7)).await?;
                assert!(!owned.is_replayed(), "the key is new");
                return Ok(Some(owner));
            }
            Self::Completed => Fixture::completed(key, "body", &7)?,
            Self::OtherBody => Fixture::completed(key, "other", &7)?,
            Self::Expired => Fixture::completed(key, "other", &7)?.expired(),
            Self::Released => Fixture::released(key, "body")?,
            Self::Indeterminate => Fixture::indeterminate(key, "body")?,
            Self::OtherMode => Fixture::leased(key, "body", REPEATS)?,
        };
        fixture.write(pool).await.map(|()| None)
    }
}

async fn transactions(
    pool: &PgPool,
    fits: Deployment,
    deployment: Deployment,
    lines: &mut Vec<Line>,
) -> anyhow::Result<()> {
    let way = Idempotency::new().with_deployment(deployment).with_in_flight(InFlight::Reject)?;
    let short = way.with_in_flight(InFlight::Wait(Duration::from_millis(200)))?;
    for left in LEFT {
        for entry in [
            "ensure in a transaction",
            "run",
            "run, with a wait",
            "run, select first",
            "run, fewest round trips",
            "run_isolated",
            "ensure_isolated",
            "ensure_isolated, undone",
        ] {
            let key = &key();
            let owner = left.write(pool, fits, key).await?;
            let perform = async |conn: &mut PgConnection| effect(conn, key).await;
            let verdict = async |conn: &mut PgConnection| effect(conn, key).await.map(Verdict::Keep);
            let mut conn = pool.acquire().await?;
            let result = match entry {
                "ensure in a transaction" => {
                    in_transaction(&mut conn, async |conn| way.ensure(conn, key, "body", perform).await).await
                }
                "run" => way.run(pool, key, "body", perform).await,
                "run, with a wait" => short.run(pool, key, "body", perform).await,
                "run, select first" => {
                    way.with_round_trips(RoundTrips::SelectFirst).run(pool, key, "body", perform).await
                }
                "run, fewest round trips" => {
                    way.with_round_trips(RoundTrips::Fewest).run(pool, key, "body", perform).await
                }
                "run_isolated" => way.run_isolated(pool, key, "body", verdict).await,
                "ensure_isolated" => {
                    in_transaction(&mut conn, async |conn| way.ensure_isolated(conn, key, "body", verdict).await).await
                }
                _ => {
                    let undo = async |conn: &mut PgConnection| effect(conn, key).await.map(Verdict::Undo);
                    in_transaction(&mut conn, async |conn| way.ensure_isolated(conn, key, "body", undo).await).await
                }
            };
            drop(owner);
            let left_behind = effects(&mut conn, key).await?;
            lines.push((format!("{entry}: {left:?}"), format!("{}, {left_behind} effects", said(result))));
        }
    }
    Ok(())
}

/// Commits after a success, and rolls back after an error.
async fn in_transaction<T>(
    conn: &mut PgConnection,
    call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
) -> Result<T, Error> {
    let mut tx = conn.begin().await?;
    match call(&mut tx).await {
        Ok(value) => pg_idempotency::commit(tx).await.map(|()| value),
        Err(error) => {
            tx.rollback().await?;
            Err(error)
        }
    }
}

/// Two calls of one transaction, one after the other or one in the other.
async fn in_one_transaction(pool: &PgPool, deployment: Deployment, lines: &mut Vec<Line>) -> anyhow::Result<()> {
    let way = Idempotency::new().with_deployment(deployment);
    let key = &key();
    let perform = async |conn: &mut PgConnection| effect(conn, key).await;
    let mut conn = pool.acquire().await?;
    let result = in_transaction(&mut conn, async |conn| {
        let _ = way.ensure(conn, key, "body", perform).await?;
        way.ensure(conn, key, "body", perform).await
    });
    lines.push(("two calls of a transaction".to_owned(), said(result.await)));
    let key = &self::key();
    let perform = async |conn: &mut PgConnection| effect(conn, key).await;
    let result = way.run(pool, key, "body", async |conn| -> Result<i64, Error> {
        Ok(way.ensure(conn, key, "body", perform).await?.into_inner())
    });
    lines.push(("a call in its own perform".to_owned(), said(result.await)));
    let key = &self::key();
    let result = in_transaction(&mut conn, async |conn| {
        way.ensure_isolated(conn, key, "body", async |_| -> Result<Verdict<i64>, Error> {
            Err(Error::AlreadyInTransaction)
        })
        .await
    });
    lines.push(("ensure_isolated, failed".to_owned(), said(result.await)));
    lines.push((
        "ensure_isolated, failed, again".to_owned(),
        said(way.run(pool, key, "body", async |conn| effect(conn, key).await).await),
    ));
    Ok(())
}

/// One process performs, and the other asks for the same key. Neither may wait, and the key must not be claimed twice.
async fn beside_another_process(
    pool: &PgPool,
    fits: Deployment,
    deployment: Deployment,
    lines: &mut Vec<Line>,
) -> anyhow::Result<()> {
    let call = |setting| Idempotency::new().with_deployment(setting).with_in_flight(InFlight::Reject);
    let marking = |setting| Marking::new(HOUR)?.with_deployment(setting).with_in_flight(InFlight::Reject);
    for (name, owner, asks) in [("this", deployment, fits), ("the other", fits, deployment)] {
        let key = &key();
        let (mut first, mut second) = (pool.begin().await?, pool.begin().await?);
        let mut asked = None;
        let owned = call(owner)?.ensure(&mut first, key, "body", async |_| {
            asked = Some(call(asks)?.ensure(&mut second, key, "body", async |_| Ok::<_, Error>(1)).await);
            Ok::<_, Error>(2)
        });
        let owned = owned.await;
        lines.push((format!("in flight in {name} process"), said(asked.unwrap_or(owned))));
        first.rollback().await?;
        second.rollback().await?;
        for count in [1, 20] {
            let base = scope();
            let keys: Vec<Key> = (0..count).map(|at| key_of(&base, &at.to_string())).collect();
            let (mut first, mut second) = (pool.begin().await?, pool.begin().await?);
            sqlx::raw_sql("set local lock_timeout = '3s'").execute(&mut *second).await?;
            let marked = match marking(owner)?.mark_many(&mut first, &keys).await {
                Ok(_) => marking(asks)?.mark(&mut second, &keys[0]).await,
                Err(error) => Err(error),
            };
            lines.push((format!("a mark of {count} in flight in {name} process"), said(marked)));
            first.rollback().await?;
            second.rollback().await?;
        }
    }
    Ok(())
}

async fn leases(pool: &PgPool, deployment: Deployment, lines: &mut Vec<Line>) -> anyhow::Result<()> {
    for policy in [REPEATS, NEVER_REPEATS] {
        let leasing = Leasing::new(policy)?.with_deployment(deployment);
        let twice = leasing.with_max_attempts(NonZeroU32::new(2).expect("two"));
        let name = if policy == REPEATS { "at least once" } else { "at most once" };
        for left in [
            "nothing",
            "completed",
            "other body",
            "expired",
            "released",
            "leased",
            "lapsed",
            "exhausted",
            "transaction",
        ] {
            let key = &key();
            let fixture = match left {
                "nothing" => None,
                "completed" => Some(Fixture::completed(key, "body", &7)?.with_mode(mode(policy))),
                "other body" => Some(Fixture::leased(key, "other", policy)?),
                "expired" => Some(Fixture::lapsed(key, "other", policy)?.expired()),
                "released" => Some(Fixture::released(key, "body")?.with_mode(mode(policy))),
                "leased" => Some(Fixture::leased(key, "body", policy)?),
                "lapsed" => Some(Fixture::lapsed(key, "body", policy)?),
                "exhausted" => Some(Fixture::lapsed(key, "body", policy)?.with_attempt(2)),
                _ => Some(Fixture::completed(key, "body", &7)?),
            };
            if let Some(fixture) = fixture {
                fixture.write(pool).await?;
            }
            let acquired = twice.acquire::<i64, _>(pool, key, "body").await;
            let acquired = match acquired {
                Ok(Acquired::Replayed(response)) => Ok(format!("replayed {response}")),
                Ok(Acquired::Owner(lease)) => {
                    let attempt = lease.attempt();
                    lease.complete(&8_i64).await.map(|()| format!("completed as attempt {attempt}"))
                }
                Err(error) => Err(error),
            };
            lines.push((format!("acquire {name}: {left}"), said(acquired)));
        }
        let done = leasing.ensure(pool, &key(), "body", async |_: &Lease| Ok::<_, Error>(1)).await;
        lines.push((format!("ensure a lease {name}"), said(done)));
        let key = &key();
        let failed = leasing.ensure(pool, key, "body", async |_: &Lease| Err::<i64, _>(Error::NotInTransaction)).await;
        lines.push((format!("ensure a lease {name}, failed"), said(failed)));
        let again = leasing.acquire::<i64, _>(pool, key, "body").await.map(|_| "acquired");
        lines.push((format!("ensure a lease {name}, again"), said(again)));
        let key = &self::key();
        let released = match leasing.acquire::<i64, _>(pool, key, "body").await {
            Ok(Acquired::Owner(lease)) => lease.release("not now").await,
            Ok(Acquired::Replayed(_)) => anyhow::bail!("replayed"),
            Err(error) => Err(error),
        };
        lines.push((format!("release {name}"), said(released)));
        let stale = leasing.acquire::<i64, _>(pool, key, "body").await;
        if stale.is_ok() {
            testing::expire(pool, key).await?;
            testing::lapse(pool, key).await?;
        }
        let heir = leasing.acquire::<i64, _>(pool, key, "body").await.map(|_| "acquired");
        lines.push((format!("take over {name}"), said(heir)));
        let stored = match stale {
            Ok(Acquired::Owner(stale)) => stale.complete(&1_i64).await,
            Ok(Acquired::Replayed(_)) => anyhow::bail!("replayed"),
            Err(error) => Err(error),
        };
        lines.push((format!("complete {name}, stale"), said(stored)));
    }
    // Three heartbeats.
    let key = &key();
    let short = Leasing::new(Policy::AtMostOnce { lease: Duration::from_millis(600) })?.with_deployment(deployment);
    let renewed = short.ensure(pool, key, "body", async |lease| {
        tokio::time::sleep(Duration::from_millis(1200)).await;
        Ok::<_, Error>(lease.is_lost())
    });
    lines.push(("heartbeats".to_owned(), said(renewed.await)));
    Ok(())
}

/// Steps of each kind, and the decisions of an operator about two steps in doubt, each with the attempt that follows.
async fn steps(pool: &PgPool, deployment: Deployment, lines: &mut Vec<Line>) -> anyhow::Result<()> {
    let leasing = Leasing::new(IN_STEPS)?.with_deployment(deployment);
    let attempt = async |key: &Key| -> Result<_, Error> {
        let lease = match leasing.acquire::<i64, _>(pool, key, "body").await? {
            Acquired::Owner(lease) => lease,
            Acquired::Replayed(response) => return Ok((0, vec![response], 0)),
        };
        let results = vec![
            lease.step("charge", async |conn| effect(conn, key).await).await?,
            lease.step_at_least_once("email", async |_| Ok::<_, Error>(2)).await?,
            lease.step_at_most_once("text", async |_| Ok::<_, Error>(3)).await?,
        ];
        let attempt = lease.attempt();
        lease.complete(&4_i64).await?;
        Ok((attempt, results, effects(&mut *pool.acquire().await?, key).await?))
    };
    let key = &key();
    for repeat in ["first", "again"] {
        lines.push((format!("steps: {repeat}"), said(attempt(key).await)));
    }
    for decision in ["none", "release, of one", "release, of both", "release_step", "resolve_step"] {
        let key = &self::key();
        Fixture::lapsed(key, "body", IN_STEPS)?
            .with_step("charge", &7)
            .with_step_in_doubt("email")
            .with_step_in_doubt("text")
            .write(pool)
            .await?;
        let token = operator::show(pool, key).await?.map_or(0, |shown| shown.token);
        let [email, text] = ["email", "text"].map(str::to_owned);
        let decided = match decision {
            "none" => Ok(()),
            "release, of one" => release(pool, key, token, &[email], "not sent").await,
            "release, of both" => release(pool, key, token, &[email, text], "not sent").await,
            "release_step" => match release_step(pool, key, token, "email", "not sent").await {
                Ok(token) => release_step(pool, key, token, "text", "not sent").await.map(drop),
                Err(error) => Err(error),
            },
            _ => match resolve_step(pool, key, token, "email", &5).await {
                Ok(token) => resolve_step(pool, key, token, "text", &6).await.map(drop),
                Err(error) => Err(error),
            },
        };
        lines.push((format!("{DECIDED} {decision}"), said(decided)));
        lines.push((format!("steps, after {decision}"), said(attempt(key).await)));
    }
    Ok(())
}

fn mode(policy: Policy) -> Mode {
    if policy == REPEATS { Mode::AtLeastOnce } else { Mode::AtMostOnce }
}

async fn one_mark(pool: &PgPool, deployment: Deployment, lines: &mut Vec<Line>) -> anyhow::Result<()> {
    let marking = Marking::new(HOUR)?.with_deployment(deployment).with_in_flight(InFlight::Reject)?;
    for left in ["nothing", "marked", "expired", "other mode", "in flight"] {
        let key = &key();
        let mut owner = pool.begin().await?;
        match left {
            "nothing" => {}
            "marked" => Fixture::marked(key).write(pool).await?,
            "expired" => Fixture::marked(key).expired().write(pool).await?,
            "other mode" => Fixture::completed(key, "body", &7)?.write(pool).await?,
            // By a process with this setting: the next one has the other setting too.
            _ => drop(marking.mark(&mut owner, key).await),
        }
        let mut conn = pool.acquire().await?;
        for repeat in ["mark", "mark again"] {
            let marked = in_transaction(&mut conn, async |conn| marking.mark(conn, key).await).await;
            lines.push((format!("{repeat}: {left}"), said(marked)));
        }
        owner.rollback().await?;
    }
    Ok(())
}

async fn many_marks(pool: &PgPool, deployment: Deployment, lines: &mut Vec<Line>) -> anyhow::Result<()> {
    let marking = Marking::new(HOUR)?.with_deployment(deployment).with_in_flight(InFlight::Reject)?;
    for count in [20, 100] {
        for scopes in [1, 5] {
            let base = scope();
            let keys: Vec<Key> =
                (0..count).map(|at| key_of(&format!("{base} {}", at % scopes), &at.to_string())).collect();
            Fixture::marked(&keys[0]).write(pool).await?;
            Fixture::marked(&keys[1]).expired().write(pool).await?;
            let mut conn = pool.acquire().await?;
            for repeat in ["new", "again", "with another mode"] {
                if repeat == "with another mode" {
                    Fixture::completed(&keys[2], "body", &7)?.write(pool).await?;
                }
                let marked = in_transaction(&mut conn, async |conn| marking.mark_many(conn, &keys).await).await;
                let marked = marked.map(|marked| {
                    let first = marked.iter().filter(|marked| **marked == pg_idempotency::mark::Marked::First).count();
                    (marked[0], marked[1], first)
                });
                lines.push((format!("mark_many of {count} over {scopes}: {repeat}"), said(marked)));
            }
        }
    }
    let base = scope();
    let keys: Vec<Key> = (0..101).map(|at| key_of(&base, &at.to_string())).collect();
    let mut conn = pool.acquire().await?;
    let marked = in_transaction(&mut conn, async |conn| marking.mark_many(conn, &keys).await).await;
    lines.push((TOO_MANY.to_owned(), said(marked)));
    Ok(())
}

/// The lines that are answered. The others are refused, without an effect.
pub(crate) fn answered(fits: Vec<Line>, other: Vec<Line>) -> Vec<String> {
    assert_eq!(fits.len(), other.len());
    let mut answered = Vec::new();
    for ((name, right), (_, answer)) in fits.into_iter().zip(other) {
        assert!(!right.starts_with("WrongDeployment") && !right.starts_with("Database"), "{name}: {right}");
        if answer == right {
            answered.push(name);
        } else {
            assert!(
                ["WrongDeployment", "WrongDeployment, 0 effects"].contains(&&*answer),
                "{name}: {answer}, not {right}"
            );
        }
    }
    answered
}
