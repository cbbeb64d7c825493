//! The actors: callers, owners, operators, the janitor and the clock. Only this file and its folder call the library.

mod layer;

use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use pg_idempotency::lease::{Acquired, Finding, InDoubt, Lease, LeaseOptions, Policy, Reconciler, Step};
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::testing;
use pg_idempotency::{
    Error, Fingerprint, Idempotency, Janitor, Key, Mode, OnDuplicate, Outcome, SettleError, Verdict, operator,
};
use rig::fixture::Fixture;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool, PgTransaction};

pub(crate) use self::layer::{request, request_leased, request_without_key};
use crate::wire::Board;
use crate::words::{cause, letter};

/// The response of an earlier call, whose effect is not counted.
pub(crate) const EARLIER: &str = "Z";
/// The response that an operator or a reconciler stores.
pub(crate) const OPERATORS: &str = "Y";
const BODY: &str = "body";
const OPERATION: &str = "call";
const HOUR: Duration = Duration::from_secs(3600);
pub(crate) const LEASE: Duration = Duration::from_secs(40);
pub(crate) const AT_LEAST_ONCE: Policy = Policy::AtLeastOnce { lease: LEASE };
pub(crate) const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: LEASE };
pub(crate) const IN_STEPS: Policy = Policy::InSteps { lease: LEASE };

/// An actor's place.
#[derive(Clone)]
pub(crate) struct Seat {
    pub(crate) at: usize,
    pub(crate) pool: PgPool,
    pub(crate) key: Key,
    pub(crate) board: Arc<Board>,
}

type Acting = Pin<Box<dyn Future<Output = anyhow::Result<String>> + Send>>;
pub(crate) type Actor = Arc<dyn Fn(Seat) -> Acting + Send + Sync>;

fn actor<F>(acting: impl Fn(Seat) -> F + Send + Sync + 'static) -> Actor
where
    F: Future<Output = anyhow::Result<String>> + Send + 'static,
{
    Arc::new(move |seat| Box::pin(acting(seat)))
}

/// How a caller asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// In its transaction.
    Plain,
    RepeatableRead,
    /// Two times in one transaction.
    Twice,
    /// With another body under the key.
    OtherBody,
    /// With the fingerprint that the layer computes of its request.
    AsRequest,
    /// Behind a savepoint.
    Isolated,
    /// In a transaction of the crate.
    Run,
}

/// What a caller does when it performs, or afterwards.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    Keeps,
    /// `perform` returns an error, and the caller rolls back unless the call is isolated.
    Fails,
    /// The effect is undone, and the response is kept.
    Undoes,
    /// `perform` ends the transaction and begins another.
    Commits,
    RollsBack,
    /// The caller rolls back, whatever the answer is.
    Regrets,
}

impl Seat {
    fn name(&self) -> String {
        letter(self.at).to_string()
    }

    fn answer(&self, answer: &str) {
        self.board.change(|board| board.players[self.at].answer = Some(answer.to_owned()));
    }

    async fn effect(&self, conn: &mut PgConnection, what: &str) -> Result<String, Error> {
        let insert = sqlx::query("insert into interleave.effect (what, who) values ($1, $2)").bind(what);
        insert.bind(self.name()).execute(conn).await?;
        Ok(self.name())
    }

    async fn perform(&self, conn: &mut PgConnection, manner: Manner) -> anyhow::Result<String> {
        match manner {
            Manner::Commits => conn.execute("commit; begin").await.map(drop)?,
            Manner::RollsBack => conn.execute("rollback; begin").await.map(drop)?,
            Manner::Keeps | Manner::Fails | Manner::Undoes | Manner::Regrets => {}
        }
        let who = self.effect(conn, "").await?;
        anyhow::ensure!(manner != Manner::Fails, "refused");
        Ok(who)
    }

    /// Begins a transaction with a `lock_timeout` of its own, which no call may change.
    async fn begin(&self, way: Way) -> Result<PgTransaction<'static>, sqlx::Error> {
        let isolation = if way == Way::RepeatableRead { "repeatable read" } else { "read committed" };
        let begin = format!("begin isolation level {isolation}; set local lock_timeout = '90s'");
        self.pool.begin_with(AssertSqlSafe(begin)).await
    }

    /// Ends the caller's transaction after an answer, with which it has to be usable.
    async fn conclude(&self, mut tx: PgTransaction<'_>, answer: String, manner: Manner) -> anyhow::Result<String> {
        self.answer(&answer);
        let failed = ["fails", "is told", "refused", "NotInTransaction"].iter().any(|start| answer.starts_with(start));
        if failed && manner != Manner::Undoes || manner == Manner::Regrets {
            tx.rollback().await?;
            return Ok(if failed { answer } else { format!("{answer}, and rolls back") });
        }
        let setting = sqlx::query_scalar("select current_setting('lock_timeout')");
        let lock_timeout: Result<String, _> = setting.fetch_one(&mut *tx).await;
        if !lock_timeout.as_ref().is_ok_and(|limit| limit == "90s") {
            return Ok(format!("{answer}, with an unusable transaction: {lock_timeout:?}"));
        }
        tx.commit().await?;
        Ok(answer)
    }
}

fn told(answered: anyhow::Result<Outcome<String>>) -> String {
    match answered {
        Ok(Outcome::Performed(_)) => "performed".to_owned(),
        Ok(Outcome::Replayed(who)) => format!("replayed {who}"),
        Err(error) => cause(&error),
    }
}

const fn options(on_duplicate: OnDuplicate) -> Idempotency {
    Idempotency::new().on_duplicate(on_duplicate)
}

pub(crate) const WAIT: Idempotency = options(OnDuplicate::Wait(Duration::from_secs(600)));
pub(crate) const REJECT: Idempotency = options(OnDuplicate::Reject);

/// A caller in transaction mode.
pub(crate) fn call(way: Way, manner: Manner, options: Idempotency) -> Actor {
    actor(move |seat| async move {
        let key = &seat.key;
        let perform = async |conn: &mut PgConnection| seat.perform(conn, manner).await;
        if way == Way::Run {
            let answer = told(options.run(&seat.pool, key, BODY, perform).await);
            seat.answer(&answer);
            return Ok(answer);
        }
        let body = match way {
            Way::OtherBody => Fingerprint::of_json("another body"),
            Way::AsRequest => Ok(of_request()),
            _ => Fingerprint::of_json(BODY),
        };
        let body = &body?;
        let mut tx = seat.begin(way).await?;
        if way == Way::Isolated {
            let perform = async |conn: &mut PgConnection| {
                let verdict = if manner == Manner::Undoes { Verdict::Undo } else { Verdict::Keep };
                seat.perform(conn, manner).await.map(verdict)
            };
            let answer = told(options.ensure_isolated(&mut tx, key, body, perform).await);
            // After an isolated call that fails, the caller may commit.
            return seat.conclude(tx, answer, Manner::Undoes).await;
        }
        let mut answer = told(options.ensure(&mut tx, key, body, perform).await);
        if way == Way::Twice {
            let again = told(options.ensure(&mut tx, key, body, perform).await);
            if again != answer && again != format!("replayed {}", seat.name()) {
                answer = format!("{answer}, then {again}");
            }
        }
        seat.conclude(tx, answer, manner).await
    })
}

/// What the layer computes of a request, and every language can.
fn of_request() -> Fingerprint {
    Fingerprint::of_bytes(format!("POST /\n{BODY}").as_bytes())
}

/// A caller in another language: it calls the SQL functions.
pub(crate) fn call_in_sql(manner: Manner, wait: &'static str) -> Actor {
    asks_in_sql(manner, wait, || Ok(Fingerprint::of_json(BODY)?))
}

/// As [`call_in_sql`], for the key and the request of a service with the layer.
pub(crate) fn call_in_sql_as_request() -> Actor {
    asks_in_sql(Manner::Keeps, "10 min", || Ok(of_request()))
}

fn asks_in_sql(manner: Manner, wait: &'static str, asked: fn() -> anyhow::Result<Fingerprint>) -> Actor {
    actor(move |seat| async move {
        let mut tx = seat.begin(Way::Plain).await?;
        let asked = asked()?;
        let parts = [seat.key.scope(), seat.key.operation(), seat.key.value()];
        let ensure = sqlx::query_as(
            "select outcome, token, convert_from(body, 'UTF8')
            from idempotency.ensure($1, $2, $3, $4, wait => $5::text::interval)",
        );
        let ensure = parts.iter().fold(ensure, |ensure, part| ensure.bind(*part)).bind(asked.as_bytes()).bind(wait);
        let answered: sqlx::Result<(String, Option<i64>, Option<String>)> = ensure.fetch_one(&mut *tx).await;
        let answer = match answered {
            Ok((outcome, Some(token), None)) if outcome == "claimed" => {
                let complete = async {
                    let who = seat.perform(&mut tx, manner).await?;
                    let complete = sqlx::query("select idempotency.complete($1, $2, $3, $4, body => $5)");
                    let complete = parts.iter().fold(complete, |complete, part| complete.bind(*part)).bind(token);
                    complete.bind(serde_json::to_vec(&who)?).execute(&mut *tx).await?;
                    anyhow::Ok("performed".to_owned())
                };
                complete.await.unwrap_or_else(|error| sql_cause(&error))
            }
            Ok((outcome, None, Some(body))) if outcome == "replayed" => format!("replayed {}", body.replace('"', "")),
            Ok((outcome, None, None)) => as_the_error(&outcome),
            Ok(other) => format!("is told {other:?}"),
            Err(error) => sql_cause(&error.into()),
        };
        seat.conclude(tx, answer, manner).await
    })
}

/// A caller in another language whose effect is a function: one statement, which commits by itself.
pub(crate) fn run_in_sql(wait: &'static str) -> Actor {
    actor(move |seat| async move {
        let asked = Fingerprint::of_json(BODY)?;
        let run = sqlx::query_as(
            "select outcome, convert_from(body, 'UTF8') from idempotency.run(
                $1, $2, $3, $4, 'interleave.effect_of', jsonb_build_object('who', $5::text), wait => $6::text::interval)",
        );
        let key = &seat.key;
        let run = run.bind(key.scope()).bind(key.operation()).bind(key.value()).bind(asked.as_bytes());
        let answered: sqlx::Result<(String, Option<String>)> =
            run.bind(seat.name()).bind(wait).fetch_one(&seat.pool).await;
        let answer = match answered {
            Ok((outcome, Some(_))) if outcome == "performed" => outcome,
            Ok((outcome, Some(body))) if outcome == "replayed" => format!("replayed {}", body.replace('"', "")),
            Ok((outcome, None)) => as_the_error(&outcome),
            Ok(other) => format!("is told {other:?}"),
            Err(error) => sql_cause(&error.into()),
        };
        seat.answer(&answer);
        Ok(answer)
    })
}

/// The name of the Rust error with this outcome.
fn as_the_error(outcome: &str) -> String {
    outcome.split('_').map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}

/// As the library names the errors of `idempotency.complete`.
fn sql_cause(error: &anyhow::Error) -> String {
    let state =
        error.downcast_ref::<sqlx::Error>().and_then(|error| error.as_database_error()).and_then(|error| error.code());
    match state.as_deref() {
        Some("IK002") => "NotInTransaction".to_owned(),
        Some(state) => format!("fails with {state}"),
        None => cause(error),
    }
}

fn leasing(policy: Policy) -> anyhow::Result<LeaseOptions> {
    let most = NonZeroU32::new(9).ok_or_else(|| anyhow::anyhow!("nine"))?;
    Ok(LeaseOptions::new(policy).max_attempts(most).resume_after(Duration::ZERO))
}

/// How the owner of a lease ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Completes,
    Releases,
    /// Completes after a heartbeat.
    Renews,
}

/// Moves Tokio's clock, which all actors share, to the heartbeat of this lease, and waits until it has ended. The wire
/// holds it as any message.
async fn renewed(lease: &Lease) {
    tokio::time::pause();
    tokio::time::advance(LEASE / 3 + Duration::from_millis(1)).await;
    tokio::time::resume();
    let left = lease.remaining();
    while !lease.is_lost() && lease.remaining() <= left {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Takes a lease, works, and ends it.
pub(crate) fn own(policy: Policy, ending: Ending) -> Actor {
    owning(policy, ending, BODY, false)
}

/// As `own`, with another body under the key.
pub(crate) fn own_other_body(policy: Policy) -> Actor {
    owning(policy, Ending::Completes, "another body", false)
}

/// As `own`, and its claim stores the request.
pub(crate) fn own_with_request(policy: Policy, ending: Ending) -> Actor {
    owning(policy, ending, BODY, true)
}

fn owning(policy: Policy, ending: Ending, body: &'static str, stored_request: bool) -> Actor {
    actor(move |seat| async move {
        let acquired =
            leasing(policy)?.store_request(stored_request).acquire::<String, _>(&seat.pool, &seat.key, body).await;
        let lease = match acquired {
            Ok(Acquired::Owner(lease)) => lease,
            Ok(Acquired::Replayed(who)) => return Ok(format!("replayed {who}")),
            Err(error) => return Ok(cause(&error.into())),
        };
        let attempt = lease.attempt();
        seat.effect(&mut *seat.pool.acquire().await?, "").await?;
        if ending == Ending::Renews {
            renewed(&lease).await;
        }
        let ended = match ending {
            Ending::Completes | Ending::Renews => lease.complete(&seat.name()).await.map(|()| "completed"),
            Ending::Releases => lease.release("on purpose").await.map(|()| "released"),
        };
        Ok(match ended {
            Ok(ended) => format!("{ended} attempt {attempt}"),
            Err(error) => format!("worked, {}", cause(&error.into())),
        })
    })
}

/// As `own`, in sessions whose own level is repeatable read.
pub(crate) fn own_at_repeatable_read(policy: Policy, ending: Ending) -> Actor {
    let own = own(policy, ending);
    Arc::new(move |seat| {
        let options = (*seat.pool.connect_options()).clone();
        seat.pool.set_connect_options(options.options([("default_transaction_isolation", "repeatable read")]));
        own(seat)
    })
}

/// Work that fails: the claim is released, or remains indeterminate.
pub(crate) fn own_and_fail(policy: Policy) -> Actor {
    actor(move |seat| async move {
        let work = async |_: &Lease| -> anyhow::Result<String> {
            seat.effect(&mut *seat.pool.acquire().await?, "").await?;
            anyhow::bail!("refused")
        };
        Ok(told(leasing(policy)?.run(&seat.pool, &seat.key, BODY, work).await))
    })
}

/// The step in the database.
pub(crate) const PAY: &str = "pay";
/// The step outside that is never repeated.
pub(crate) const SEND: &str = "send";

/// An operation in these steps.
pub(crate) fn work_in(steps: &'static [&'static str]) -> Actor {
    actor(move |seat| async move {
        let leasing = leasing(IN_STEPS)?.store_request(steps.len() > 1);
        Ok(told(leasing.run(&seat.pool, &seat.key, BODY, async |lease| seat.steps(lease, steps).await).await))
    })
}

/// Continues an operation in steps whose caller did not come back.
pub(crate) fn resume(steps: &'static [&'static str]) -> Actor {
    actor(move |seat| async move {
        let leasing = leasing(IN_STEPS)?;
        let work = async |lease: &Lease, _: String| seat.steps(lease, steps).await;
        Ok(match leasing.resume_one(&seat.pool, OPERATION, work).await {
            Ok(Some(_)) => "performed".to_owned(),
            Ok(None) => "found nothing".to_owned(),
            Err(error) => cause(&error),
        })
    })
}

impl Seat {
    async fn steps(&self, lease: &Lease, steps: &[&str]) -> anyhow::Result<String> {
        let mut done = String::new();
        for &step in steps {
            done += &match step {
                PAY => lease.step(step, async |conn| anyhow::Ok(self.effect(conn, step).await?)).await?,
                _ => {
                    let send = async |_: &Step| {
                        let mut conn = self.pool.acquire().await?;
                        anyhow::Ok(self.effect(&mut conn, step).await?)
                    };
                    lease.step_at_most_once(step, send).await?
                }
            };
        }
        Ok(done)
    }
}

fn marking(in_flight: OnDuplicate) -> MarkOptions {
    MarkOptions::new(HOUR).on_duplicate(in_flight)
}

/// A consumer that marks one event and processes it.
pub(crate) fn mark(in_flight: OnDuplicate, manner: Manner) -> Actor {
    actor(move |seat| async move {
        let mut tx = seat.begin(Way::Plain).await?;
        let answer = match marking(in_flight).mark(&mut tx, &seat.key).await {
            Ok(Marked::First) => {
                seat.effect(&mut tx, "").await?;
                "performed".to_owned()
            }
            Ok(Marked::Duplicate) => "duplicate".to_owned(),
            Err(error) => cause(&error.into()),
        };
        seat.conclude(tx, answer, manner).await
    })
}

/// The key of an event in a batch.
pub(crate) fn event(key: &Key, event: char) -> Key {
    Key::new(key.scope(), key.operation(), format!("{} {event}", key.value())).unwrap_or_else(|_| key.clone())
}

/// A consumer that marks these events at once, and processes those that are new.
pub(crate) fn mark_many(events: &'static str, in_flight: OnDuplicate, manner: Manner) -> Actor {
    actor(move |seat| async move {
        let keys: Vec<Key> = events.chars().map(|one| event(&seat.key, one)).collect();
        let mut tx = seat.begin(Way::Plain).await?;
        let answer = match marking(in_flight).mark_many(&mut tx, &keys).await {
            Ok(marked) => {
                let mut first = String::new();
                for (one, marked) in events.chars().zip(marked) {
                    if marked == Marked::First {
                        seat.effect(&mut tx, &one.to_string()).await?;
                        first.push(one);
                    }
                }
                format!("performed {first}")
            }
            Err(error) => cause(&error.into()),
        };
        seat.conclude(tx, answer, manner).await
    })
}

/// A sweep of all that is due.
pub(crate) fn sweep() -> Actor {
    actor(|seat| async move {
        let swept = Janitor::new(seat.pool.clone()).grace(Duration::ZERO).sweep_once(10).await?;
        Ok(format!("swept {}", swept.rows()))
    })
}

/// Moves the database's clock past the retention, for all that ask later.
///
/// By a minute, because a call is judged as of the time since its start, which the search does not choose: the order of
/// the messages alone must decide whether a call finds the record expired.
pub(crate) fn expire() -> Actor {
    move_time("expires_at = statement_timestamp() - interval '1 min'")
}

/// Moves the database's clock past the retention and the lease.
pub(crate) fn outlive() -> Actor {
    move_time(
        "expires_at = statement_timestamp() - interval '1 min',
        lease_until = case when lease_until > statement_timestamp() then statement_timestamp() else lease_until end",
    )
}

fn move_time(assignments: &'static str) -> Actor {
    actor(move |seat| async move {
        let (scope, operation, value) = (seat.key.scope(), seat.key.operation(), seat.key.value());
        let key = "where scope = $1 and operation = $2 and value = $3";
        let update = format!("update /* pg_idempotency: move time */ idempotency.record set {assignments} {key}");
        let update = sqlx::query(AssertSqlSafe(update)).bind(scope).bind(operation).bind(value);
        let done = update.execute(&seat.pool).await?;
        Ok(if done.rows_affected() == 1 { "expired it" } else { "found nothing" }.to_owned())
    })
}

/// Moves the database's clock past the lease.
pub(crate) fn lapse() -> Actor {
    actor(|seat| async move { Ok(said("lapsed it", testing::lapse(&seat.pool, &seat.key).await)) })
}

fn said(done: &str, result: Result<(), Error>) -> String {
    match result {
        Ok(()) => done.to_owned(),
        Err(Error::Database(sqlx::Error::RowNotFound)) => "found nothing".to_owned(),
        Err(error) => cause(&error.into()),
    }
}

/// What an operator does to a record that they have looked at.
#[derive(Clone, Copy)]
pub(crate) enum Verb {
    Forget,
    Release,
    Resolve,
    ResolveStep,
    ReleaseStep,
}

pub(crate) fn operate(verb: Verb) -> Actor {
    actor(move |seat| async move {
        let (pool, key) = (&seat.pool, &seat.key);
        let Some(shown) = operator::show(pool, key).await? else { return Ok("found nothing".to_owned()) };
        let (done, settled) = match verb {
            Verb::Forget => ("forgot", shown.forget(pool).await),
            Verb::Release => ("set free", shown.release(pool, "by an operator").await.map(drop)),
            Verb::Resolve => ("resolved", shown.resolve(pool, &OPERATORS.to_owned(), HOUR).await.map(drop)),
            Verb::ReleaseStep => ("set free", shown.step(SEND).release(pool, "by an operator").await.map(drop)),
            Verb::ResolveStep => ("resolved", shown.step(SEND).resolve(pool, &OPERATORS.to_owned()).await.map(drop)),
        };
        match settled {
            Ok(()) => Ok(done.to_owned()),
            Err(SettleError::Other(error)) => Ok(cause(&error.into())),
            // The search knows it under the name that it had among the errors of callers.
            Err(_) => Ok("Changed".to_owned()),
        }
    })
}

/// Each visit until nothing is due. Two probes without a trace release the operation.
pub(crate) fn reconcile(policy: Policy, took_effect: bool) -> Actor {
    actor(move |seat| async move {
        let leasing = LeaseOptions::new(policy).store_request(true);
        // Whatever is not due now is not due in the search, either.
        let reconciler = Reconciler::new(leasing, OPERATION, LEASE)?.probes(2, 10);
        let mut visits = Vec::new();
        while visits.last().is_none_or(|last| last != "Nothing") {
            let look_up = async |_: &InDoubt| match took_effect {
                true => Finding::took_effect(&OPERATORS.to_owned()),
                false => Ok(Finding::NoTrace),
            };
            visits.push(match reconciler.visit_one(&seat.pool, look_up).await {
                Ok(visit) => format!("{visit:?}"),
                Err(error) => return Ok(cause(&error.into())),
            });
        }
        visits.pop();
        Ok(format!("visits {}", visits.join(" ")))
    })
}

/// The heartbeat of a machine that slept, and its death: the retention is prolonged, and the lease has lapsed again, at
/// another time.
pub(crate) fn wake_and_die() -> Actor {
    wake("steps = steps")
}

/// As `wake_and_die`, but the machine begins a step before it dies.
pub(crate) fn wake_begin_and_die() -> Actor {
    wake("steps = jsonb_build_object('send', jsonb_build_object('begun', statement_timestamp(), 'attempt', attempt))")
}

fn wake(assignment: &'static str) -> Actor {
    actor(move |seat| async move {
        // The conditions of a heartbeat.
        let update = format!(
            "update /* pg_idempotency: move time */ idempotency.record
            set expires_at = greatest(expires_at, statement_timestamp() + interval '1 h'),
                lease_until = statement_timestamp() - interval '1 ms', {assignment}
            where operation = $1 and value = $2 and token = 0 and completed_at is null and lease_until > '-infinity'"
        );
        let update = sqlx::query(AssertSqlSafe(update)).bind(OPERATION).bind(seat.key.value());
        let done = update.execute(&seat.pool).await?;
        Ok(if done.rows_affected() == 1 { "woke and died" } else { "found nothing" }.to_owned())
    })
}

/// A record of an earlier call.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Before {
    Completed,
    Expired,
    Released,
    /// Of this policy, and lapsed.
    Lapsed(Policy),
    LapsedAndExpired(Policy),
    /// In steps, lapsed, paid, and with a stored request.
    Paid,
    /// As `Paid`, and expired.
    PaidAndExpired,
    /// In steps, lapsed, and with a step in doubt.
    InDoubt,
    /// Of this policy, lapsed and in doubt. A reconciler has noted the operation, and its first probe is due.
    Noted(Policy),
    /// As `Noted`, but one probe has found no trace, and the second probe is due.
    Probed(Policy),
    ExpiredMark,
    /// Of this event of a batch.
    ExpiredEvent(char),
}

impl Before {
    pub(crate) fn fixture(self, key: &Key) -> Result<Fixture, Error> {
        Ok(match self {
            Self::Completed => Fixture::completed(key, BODY, EARLIER)?,
            Self::Expired => Fixture::completed(key, BODY, EARLIER)?.expired(),
            Self::Released => Fixture::released(key, BODY)?,
            Self::Lapsed(policy) => Fixture::lapsed(key, BODY, policy)?,
            Self::LapsedAndExpired(policy) => Fixture::lapsed(key, BODY, policy)?.expired(),
            Self::Paid => Fixture::lapsed(key, BODY, IN_STEPS)?.with_step("pay", EARLIER).with_stored_request(BODY),
            Self::PaidAndExpired => Self::Paid.fixture(key)?.expired(),
            Self::InDoubt => Fixture::lapsed(key, BODY, IN_STEPS)?.with_step_in_doubt("send"),
            Self::Noted(policy) | Self::Probed(policy) => {
                let probes = u32::from(matches!(self, Self::Probed(_)));
                let lapsed = Fixture::lapsed(key, BODY, policy)?.with_stored_request(BODY).with_probes(probes);
                if policy == IN_STEPS { lapsed.with_step_in_doubt(SEND) } else { lapsed }
            }
            Self::ExpiredMark => Fixture::marked(key).expired(),
            Self::ExpiredEvent(one) => Fixture::marked(&event(key, one)).expired(),
        })
    }
}

/// The record of another key.
pub(crate) fn bystander(key: &Key) -> Result<Fixture, Error> {
    Fixture::completed(key, BODY, "of another key")
}

/// The state that remains, and the answer of a further call, which is rolled back.
pub(crate) async fn left(pool: &PgPool, conn: &mut PgConnection, key: &Key) -> anyhow::Result<String> {
    let Some(shown) = operator::show(pool, key).await? else {
        return next(conn, key).await.map(|next| format!("no record, the next {next}"));
    };
    let mut left = shown.state.to_string();
    let stored = "select convert_from(response_body, 'UTF8') from idempotency.record
        where scope = $1 and operation = $2 and value = $3";
    let stored = sqlx::query_scalar(stored).bind(key.scope()).bind(key.operation()).bind(key.value());
    let stored: Option<String> = stored.fetch_one(pool).await?;
    if let Some(body) = stored {
        left = format!("{left} {body}");
    }
    if shown.mode == Mode::Transaction {
        left = format!("{left}, the next {}", next(conn, key).await?);
    }
    Ok(left)
}

async fn next(conn: &mut PgConnection, key: &Key) -> anyhow::Result<String> {
    let mut tx = conn.begin().await?;
    let answered = REJECT.ensure(&mut tx, key, BODY, async |_| anyhow::Ok(String::new())).await;
    tx.rollback().await?;
    Ok(told(answered))
}
