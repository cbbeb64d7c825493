//! A call of an operation in steps: a row in the database, a charge that the outside deduplicates by its key, and two
//! messages, a text and an email, that it does not. Beside the callers, in the same processes, run resumers and
//! operators.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::join_all;
use pg_idempotency::lease::{Lease, Leasing, Step};
use pg_idempotency::operator::{Shown, release, release_step, resolve_step, unsettled};
use pg_idempotency::testing::cancel_after;
use pg_idempotency::{Error, Outcome};
use sqlx::{AssertSqlSafe, PgConnection, PgExecutor, PgPool};
use tokio::time::{Instant, sleep};
use tokio::try_join;

use super::lease::Leased;
use crate::checker::Aftermath;
use crate::checker::steps::{self, CHARGE, EMAIL, Part, ROW, TEXT};
use crate::finding::Finding;
use crate::history::{Call, What};
use crate::mutant::Mutant;
use crate::random::Random;
use crate::request::{Failure, ending, key};
use crate::world::{PAUSE, World};

const NOT_SENT: &str = "the message was not sent, and will not be";
/// When the fault is over, resumers and operators must finish all operations within this time.
const FINISH_LIMIT: Duration = Duration::from_secs(60);

/// How an attempt goes, and its mishaps besides the fault.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// A step whose future is dropped after so many polls. The attempt then requests the step again.
    drops: Option<(&'static str, usize)>,
    /// How many steps run side by side: the messages always do, and the others before them or with them. A message that
    /// has begun prevents every take-over.
    abreast: u8,
    /// How long each step takes, before its effect and after it.
    pause: Duration,
}

impl Plan {
    /// A mutant that the fault must reveal has no mishaps.
    fn new(random: &mut Random, leased: Leased, mutant: Option<Mutant>) -> Self {
        let mishaps = !mutant.is_some_and(Mutant::needs_the_fault);
        // Each dropped message needs an operator.
        let dropped = random.of(&[ROW, ROW, CHARGE, TEXT, EMAIL]);
        let polls = usize::try_from(random.below(20)).unwrap_or_default();
        let drops = (random.one_in(4) && mishaps).then_some((dropped, polls));
        Self { drops, abreast: random.of(&[1, 2, 2, 3]), pause: leased.work(random) / 4 }
    }

    /// Requests a step, and once more if its future was dropped. Boxed, because all futures around it contain it several
    /// times, and overflow the stack.
    async fn ask<F>(self, step: &str, perform: impl Fn() -> F) -> Result<String, Failure>
    where
        F: Future<Output = Result<String, Failure>>,
    {
        if let Some((dropped, polls)) = self.drops
            && dropped == step
            && let Some(result) = cancel_after(polls, Box::pin(perform())).await
        {
            return result;
        }
        Box::pin(perform()).await
    }

    /// The response of the operation: the result of each step, which is the name of the call that had its effect.
    async fn respond<E>(
        self,
        row: impl Future<Output = Result<String, E>>,
        charge: impl Future<Output = Result<String, E>>,
        text: impl Future<Output = Result<String, E>>,
        email: impl Future<Output = Result<String, E>>,
    ) -> Result<String, E> {
        let (row, charge, text, email) = match self.abreast {
            1 => {
                let (row, charge) = (row.await?, charge.await?);
                let (text, email) = try_join!(text, email)?;
                (row, charge, text, email)
            }
            2 => {
                let (row, charge) = try_join!(row, charge)?;
                let (text, email) = try_join!(text, email)?;
                (row, charge, text, email)
            }
            _ => try_join!(row, charge, text, email)?,
        };
        Ok(format!("{row} {charge} {text} {email}"))
    }
}

/// One call's attempt, as its effects name it.
#[derive(Clone, Copy, Debug)]
struct Attempt<'a> {
    key: &'a str,
    call: &'a str,
    number: u32,
}

impl Attempt<'_> {
    /// Adds a row, a charge or a message by this function of tables.sql. `false` means that the operator has withdrawn
    /// the message.
    async fn affect(
        self,
        db: impl PgExecutor<'_>,
        function: &str,
        step: &str,
        downstream_key: Option<&str>,
    ) -> sqlx::Result<bool> {
        sqlx::query_scalar(AssertSqlSafe(format!(
            "select {function}($1::text, $2::text, $3::text, $4::text, $5::int4)"
        )))
        .bind(self.key)
        .bind(self.call)
        .bind(step)
        .bind(downstream_key)
        .bind(i32::try_from(self.number).unwrap_or(i32::MAX))
        .fetch_one(db)
        .await
    }
}

async fn work(
    world: &World,
    pool: &PgPool,
    lease: &Lease,
    value: &str,
    call: &str,
    plan: Plan,
) -> Result<String, Failure> {
    let mutant = world.mutant;
    let outside = world.outside_or(pool);
    let attempt = Attempt { key: value, call, number: lease.attempt() };
    let row = async || {
        if mutant == Some(Mutant::RowOutside) {
            // The loss of the lease does not stop a task.
            let (pool, key, call) = (pool.clone(), value.to_owned(), call.to_owned());
            let writing = tokio::spawn(async move {
                sleep(2 * plan.pause).await;
                let attempt = Attempt { key: &key, call: &call, number: attempt.number };
                attempt.affect(&pool, "add", ROW, None).await.map(|_| call)
            });
            return Ok(writing.await.expect("no panic")?);
        }
        lease
            .step(ROW, async |conn: &mut PgConnection| {
                sleep(plan.pause).await;
                attempt.affect(conn, "add", ROW, None).await?;
                sleep(plan.pause).await;
                Ok(call.to_owned())
            })
            .await
    };
    let charge = || {
        lease.step_at_least_once(CHARGE, async |step: &Step| {
            sleep(plan.pause).await;
            attempt.affect(outside, "charge", CHARGE, Some(&step.downstream_key())).await?;
            sleep(plan.pause).await;
            Ok(call.to_owned())
        })
    };
    let message = async |name: &'static str| {
        let send = async move |step: &Step| {
            sleep(plan.pause).await;
            if !attempt.affect(outside, "send", name, Some(&step.downstream_key())).await? {
                return Err(step.not_performed(Failure::AskedFor));
            }
            sleep(plan.pause).await;
            Ok(call.to_owned())
        };
        match mutant {
            Some(Mutant::BegunNotWritten) => lease.step_at_least_once(name, send).await,
            _ => lease.step_at_most_once(name, send).await,
        }
    };
    let (text, email) = (plan.ask(TEXT, || message(TEXT)), plan.ask(EMAIL, || message(EMAIL)));
    plan.respond(plan.ask(ROW, row), plan.ask(CHARGE, charge), text, email).await
}

fn leasing(world: &World, leased: Leased) -> Result<Leasing, Error> {
    // An attempt ends with each kill, so the highest number is out of reach.
    let most = std::num::NonZeroU32::MAX;
    let leasing = Leasing::new(leased.policy())?.with_deployment(world.deployment());
    Ok(leasing.with_stored_request(true).with_max_attempts(most))
}

pub(super) async fn call(
    world: &World,
    pool: &PgPool,
    value: &str,
    call: &str,
    leased: Leased,
    random: &mut Random,
) -> Result<Outcome<String>, Failure> {
    let plan = Plan::new(random, leased, world.mutant);
    let work = async |lease: &Lease| {
        world.history.add(call, value, What::Claimed(lease.token()));
        work(world, pool, lease, value, call, plan).await
    };
    leasing(world, leased)?.ensure(pool, &key(value), value, work).await
}

/// Finishes the operations for which no caller asks any more.
pub(super) async fn resumer(world: Arc<World>, pool: PgPool, name: String, leased: Leased, stopped: Arc<AtomicBool>) {
    let mut random = world.random(&name);
    let mut number = 0;
    while !stopped.load(Ordering::Relaxed) && !world.is_over() {
        number += 1;
        let name = format!("{name}/{number}");
        // Soon, because the callers ask for a key during two leases only.
        if !matches!(resume_one(&world, &pool, &name, leased, leased.lease / 8, &mut random).await, Ok(true)) {
            sleep(random.millis(5..30)).await;
        }
    }
}

/// Whether there was an operation to resume.
async fn resume_one(
    world: &World,
    pool: &PgPool,
    call: &str,
    leased: Leased,
    after: Duration,
    random: &mut Random,
) -> Result<bool, Failure> {
    let taken = OnceLock::new();
    let plan = Plan::new(random, leased, world.mutant);
    let work = async |lease: &Lease, value: String| {
        let _ = taken.set(value.clone());
        world.invoked(call, &value);
        world.history.add(call, &value, What::Claimed(lease.token()));
        work(world, pool, lease, &value, call, plan).await
    };
    let leasing = leasing(world, leased)?.with_resume_after(after).map_err(Error::from)?;
    let resumed = leasing.resume_one(pool, "chaos", work).await;
    match (taken.get(), resumed) {
        // On a busy machine a short lease is lost before its work begins.
        (None, Err(Failure::Of(Error::LeaseLost))) => Ok(true),
        (None, resumed) => resumed.map(|resumed| resumed.is_some()),
        (Some(value), resumed) => {
            let response = resumed.map(|response| Outcome::Performed(response.expect("an operation was taken")));
            world.ended(call, value, ending(response));
            Ok(true)
        }
    }
}

/// Settles the messages in doubt.
pub(super) async fn operator(world: Arc<World>, pool: PgPool, name: String, stopped: Arc<AtomicBool>) {
    let mut random = world.random(&name);
    while !stopped.load(Ordering::Relaxed) && !world.is_over() {
        // After an error and after a kill, the next round finds the same messages in doubt.
        let _ = settle_in_doubt(&world, &pool).await;
        sleep(random.millis(5..25)).await;
    }
}

/// Asks the gateway whether each message in doubt was sent, and withdraws it, because its worker may only be suspended.
pub(super) async fn settle_in_doubt(world: &World, pool: &PgPool) -> Result<(), Error> {
    let found = unsettled(pool, 100, None, None).await?;
    for found in found.into_iter().filter(|found| !found.steps_in_doubt().is_empty()) {
        let settled = if world.mutant == Some(Mutant::SettlesAllInDoubt) {
            settle_as_if_one(world, pool, &found).await
        } else {
            settle_each(world, pool, &found).await
        };
        // Another operator was faster, or the owner was only suspended.
        if !matches!(settled, Err(Error::Changed)) {
            settled?;
        }
    }
    Ok(())
}

async fn settle_each(world: &World, pool: &PgPool, found: &Shown) -> Result<(), Error> {
    let (key, steps) = (&found.key, found.steps_in_doubt());
    let mut sent = Vec::new();
    for step in &steps {
        sent.push((step, withdraw(world, pool, found, step).await?));
    }
    if sent.iter().all(|(_, sent)| sent.is_none()) {
        return release(pool, key, found.token, &steps, NOT_SENT).await;
    }
    let mut token = found.token;
    for (step, sent) in sent {
        token = match sent {
            Some(call) => resolve_step(pool, key, token, step, &call).await?,
            None => release_step(pool, key, token, step, NOT_SENT).await?,
        };
    }
    Ok(())
}

/// The mutant asks about one message, and releases all that are in doubt.
async fn settle_as_if_one(world: &World, pool: &PgPool, found: &Shown) -> Result<(), Error> {
    let steps = found.steps_in_doubt();
    if let Some(call) = withdraw(world, pool, found, &steps[0]).await? {
        return resolve_step(pool, &found.key, found.token, &steps[0], &call).await.map(drop);
    }
    release(pool, &found.key, found.token, &steps, NOT_SENT).await
}

async fn withdraw(world: &World, pool: &PgPool, found: &Shown, step: &str) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar("select withdraw($1::text, $2::text, $3::int4)")
        .bind(found.key.value())
        .bind(step)
        .bind(i32::try_from(found.attempt).unwrap_or(i32::MAX))
        .fetch_one(world.outside_or(pool))
        .await
}

/// When the fault is over, resumers and operators finish every operation, and no caller helps. Returns how many they
/// did not finish. A mutant's operations are left to its callers.
pub(super) async fn finish(world: &World, leased: Leased) -> anyhow::Result<i64> {
    if world.mutant.is_some() {
        return Ok(0);
    }
    let pool = crate::world::pool(&world.options, 16);
    let leased = Leased { work: 1, ..leased };
    let started = Instant::now();
    for round in 0_u64.. {
        settle_in_doubt(world, &pool).await?;
        let finisher = async |finisher: usize| {
            let name = format!("finisher{finisher}.{round}");
            let mut random = world.random(&name);
            for number in 0_u64.. {
                let name = format!("{name}/{number}");
                // After an error, such as a lease that a busy machine has lost, the next round tries again.
                if !matches!(resume_one(world, &pool, &name, leased, Duration::ZERO, &mut random).await, Ok(true)) {
                    break;
                }
            }
        };
        join_all((0..8).map(finisher)).await;
        // A claim that never began leaves attempt 0 and no request: the key is free, and there is nothing to finish.
        let left = "select count(*) from idempotency.record
            where mode = 'in_steps' and completed_at is null and attempt > 0";
        let left: i64 = sqlx::query_scalar(left).fetch_one(&pool).await?;
        if left == 0 || started.elapsed() > FINISH_LIMIT {
            pool.close().await;
            return Ok(left);
        }
        // A lease has to lapse first, at times.
        sleep(PAUSE).await;
    }
    unreachable!("it ends after its time")
}

/// Checks the operations, and counts what happened in them.
pub(super) async fn check(
    world: &World,
    calls: &[Call],
    after: &Aftermath,
    unfinished: i64,
) -> anyhow::Result<Finding> {
    let outside = world.outside_or(&world.observer);
    let select = "select key, call, step, downstream_key from part";
    let mut parts: Vec<Part> = sqlx::query_as(select).fetch_all(&world.observer).await?;
    if !std::ptr::eq(outside, &world.observer) {
        parts.extend(sqlx::query_as::<_, Part>(select).fetch_all(outside).await?);
    }
    let (sent, withdrawn): (i64, i64) = sqlx::query_as(
        "select count(*) filter (where sent), count(*) filter (where not sent)
        from (
            select exists (
                select from part where part.step = one.step and part.key = one.key and part.attempt = one.attempt
            ) as sent
            from (select distinct key, step, attempt from withdrawn) as one
        ) as withdrawn",
    )
    .fetch_one(outside)
    .await?;
    let mut checked = steps::check(calls, after, &parts);
    if unfinished > 0 {
        checked.violations.push(format!("{unfinished} operations that resumers and operators did not finish"));
    }
    let resumed = calls.iter().filter(|call| call.was_resumed()).count();
    Ok(world
        .finding(checked.violations)
        .note(format!("{} operations in steps", after.records.len()))
        .note(format!("{resumed} operations completed by a resumer"))
        .note(format!("{} charges recognized by their key", checked.deduplicated))
        .note(format!("messages in doubt: {sent} sent, {withdrawn} not sent")))
}
