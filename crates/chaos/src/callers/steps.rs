//! A call of an operation in steps: a row in the database, a charge that the outside deduplicates by its key, and a
//! text that it does not. Beside the callers, in the same processes, run resumers and
//! operators.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pg_idempotency::lease::{Lease, LeaseOptions, Step};
use pg_idempotency::operator::{Shown, unsettled};
use pg_idempotency::{Error, Outcome, SettleError};
use sqlx::{AssertSqlSafe, PgConnection, PgExecutor, PgPool};
use tokio::time::sleep;
use tokio::try_join;

use super::lease::Leased;
use crate::checker::Aftermath;
use crate::checker::register;
use crate::checker::steps::{self, CHARGE, Part, ROW, TEXT};
use crate::finding::Finding;
use crate::history::{Call, What};
use crate::mutant::Mutant;
use crate::random::Random;
use crate::request::{Failure, ending};
use crate::world::World;

const NOT_SENT: &str = "the text was not sent, and will not be";

/// One call's attempt, as its effects name it.
#[derive(Clone, Copy, Debug)]
struct Attempt<'a> {
    key: &'a str,
    call: &'a str,
    number: u32,
}

impl Attempt<'_> {
    /// Adds a row, a charge or a text by this function of tables.sql. `false` means that the operator has withdrawn
    /// the text.
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
    pause: Duration,
) -> Result<String, Failure> {
    let mutant = world.mutant;
    let outside = world.outside_or(pool);
    let attempt = Attempt { key: value, call, number: lease.attempt() };
    let row = async || {
        if mutant == Some(Mutant::RowOutside) {
            // The loss of the lease does not stop a task.
            let (pool, key, call) = (pool.clone(), value.to_owned(), call.to_owned());
            let writing = tokio::spawn(async move {
                sleep(2 * pause).await;
                let attempt = Attempt { key: &key, call: &call, number: attempt.number };
                attempt.affect(&pool, "add", ROW, None).await.map(|_| call)
            });
            return Ok::<_, Failure>(writing.await.expect("no panic")?);
        }
        lease
            .step(ROW, async |conn: &mut PgConnection| {
                sleep(pause).await;
                attempt.affect(conn, "add", ROW, None).await?;
                sleep(pause).await;
                Ok(call.to_owned())
            })
            .await
    };
    let charge = || {
        lease.step_at_least_once(CHARGE, async |step: &Step| {
            sleep(pause).await;
            attempt.affect(outside, "charge", CHARGE, Some(step.downstream_key())).await?;
            sleep(pause).await;
            Ok::<_, Failure>(call.to_owned())
        })
    };
    let text = async || {
        let send = async |step: &Step| {
            sleep(pause).await;
            if !attempt.affect(outside, "send", TEXT, Some(step.downstream_key())).await? {
                return Err(step.not_performed(Failure::AskedFor));
            }
            sleep(pause).await;
            Ok(call.to_owned())
        };
        match mutant {
            Some(Mutant::BegunNotWritten) => lease.step_at_least_once(TEXT, send).await,
            _ => lease.step_at_most_once(TEXT, send).await,
        }
    };
    let (row, charge) = try_join!(row(), charge())?;
    let text = text().await?;
    Ok(format!("{row} {charge} {text}"))
}

fn leasing(leased: Leased) -> LeaseOptions {
    // An attempt ends with each kill, so the highest number is out of reach.
    let most = std::num::NonZeroU32::MAX;
    let leasing = LeaseOptions::new(leased.policy());
    leasing.store_request(true).max_attempts(most)
}

pub(super) async fn call(
    world: &World,
    pool: &PgPool,
    value: &str,
    call: &str,
    leased: Leased,
    random: &mut Random,
) -> Result<Outcome<String>, Failure> {
    let pause = leased.work(random) / 4;
    let work = async |lease: &Lease| {
        world.history.add(call, value, What::Claimed(lease.token()));
        work(world, pool, lease, value, call, pause).await
    };
    leasing(leased).run(pool, &world.key(value), value, work).await
}

/// Finishes the operations for which no caller asks any more.
pub(super) async fn resumer(world: Arc<World>, pool: PgPool, name: String, leased: Leased, stopped: Arc<AtomicBool>) {
    let mut random = world.random(&name);
    let mut number = 0;
    while !stopped.load(Ordering::Relaxed) && !world.is_over() {
        number += 1;
        let name = format!("{name}/{number}");
        if !matches!(resume_one(&world, &pool, &name, leased, &mut random).await, Ok(true)) {
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
    random: &mut Random,
) -> Result<bool, Failure> {
    let taken = OnceLock::new();
    let pause = leased.work(random) / 4;
    let work = async |lease: &Lease, value: String| {
        let _ = taken.set(value.clone());
        world.invoked(call, &value);
        world.history.add(call, &value, What::Claimed(lease.token()));
        work(world, pool, lease, &value, call, pause).await
    };
    // Soon, because the callers ask for a key during two leases only.
    let leasing = leasing(leased).resume_after(leased.lease / 8);
    let resumed = leasing.resume_one(pool, &world.operation, work).await;
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

/// Settles the texts in doubt.
pub(super) async fn operator(world: Arc<World>, pool: PgPool, name: String, stopped: Arc<AtomicBool>) {
    let mut random = world.random(&name);
    while !stopped.load(Ordering::Relaxed) && !world.is_over() {
        // After an error and after a kill, the next round finds the same texts in doubt.
        let _ = settle_in_doubt(&world, &pool).await;
        sleep(random.millis(5..25)).await;
    }
}

/// Asks the gateway whether each text in doubt was sent, and withdraws it, because its worker may only be suspended.
pub(super) async fn settle_in_doubt(world: &World, pool: &PgPool) -> Result<(), Error> {
    let found = unsettled(pool, 100, None, None).await?;
    let ours = found.into_iter().filter(|found| found.key.operation() == world.operation);
    for found in ours.filter(|found| found.steps.iter().any(|step| step.in_doubt)) {
        let settled = match withdraw(world, pool, &found).await? {
            Some(call) => found.step(TEXT).resolve(pool, &call).await,
            None => found.step(TEXT).release(pool, NOT_SENT).await,
        };
        // `Changed`: another operator was faster, or the owner was only suspended.
        if let Err(SettleError::Other(error)) = settled {
            return Err(error);
        }
    }
    Ok(())
}

async fn withdraw(world: &World, pool: &PgPool, found: &Shown) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar("select withdraw($1::text, $2::text, $3::int4)")
        .bind(found.key.value())
        .bind(TEXT)
        .bind(i32::try_from(found.attempt).unwrap_or(i32::MAX))
        .fetch_one(world.outside_or(pool))
        .await
}

/// Checks the operations, and counts what happened in them.
pub(super) async fn check(world: &World, calls: &[Call], after: &Aftermath) -> anyhow::Result<Finding> {
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
    let checked = steps::check(calls, after, &parts);
    let resumed = calls.iter().filter(|call| call.was_resumed()).count();
    // A call does not know the answer that it would have given, so the answers do not form a register.
    Ok(world
        .finding(checked.violations, register::Checked::default())
        .note(format!("{} operations in steps", after.records.len()))
        .note(format!("{resumed} operations completed by a resumer"))
        .note(format!("{} charges recognized by their key", checked.deduplicated))
        .note(format!("texts in doubt: {sent} sent, {withdrawn} not sent")))
}
