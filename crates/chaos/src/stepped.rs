//! Callers of an operation in steps: a row in the database, a charge that the outside deduplicates by its key, and two
//! messages, a text and an email, that it does not. Beside the callers, in the same processes, resumers and operators.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::try_join_all;
use pg_idempotency::lease::{Lease, Leasing, Step};
use pg_idempotency::operator::{Shown, unsettled};
use pg_idempotency::operator::{release, release_step, resolve_step};
use pg_idempotency::testing::cancel_after;
use pg_idempotency::{Deployment, Error, Outcome};
use sqlx::{Executor as _, PgConnection, PgExecutor, PgPool};
use tokio::time::{Instant, sleep};
use tokio::try_join;

use crate::history::What;
use crate::lease::Leased;
use crate::mutant::Mutant;
use crate::random::Random;
use crate::settling::SETTLE_LIMIT;
use crate::step_checker::Part;
use crate::subject::{Failure, Subject, ending, key};
use crate::world::{PAUSE, World};

pub(crate) const ROW: &str = "row";
pub(crate) const CHARGE: &str = "charge";
/// The messages are sent side by side, so both can be in doubt.
pub(crate) const TEXT: &str = "text";
pub(crate) const EMAIL: &str = "email";
const NOT_SENT: &str = "the message was not sent, and will not be";
/// Not a step: a row that was committed when a later attempt had claimed the operation.
pub(crate) const OVERTAKEN: &str = "overtaken";

/// The effects, without any unique constraint, and the gateway of the messages. It sends a message for an attempt until
/// the operator withdraws it: a worker that wakes after that must not send it. Most rows of an overtaken attempt do
/// no harm, because the later attempt finds that the step has a result, so the database notes them.
const TABLES: &str = "
    create table part (
        key text collate \"C\" not null, call text not null, step text not null, downstream_key text, attempt int not null
    );
    create table withdrawn (key text not null, step text not null, attempt int not null);
    create function send(the_key text, the_call text, the_step text, the_downstream_key text, the_attempt int)
    returns boolean
    language plpgsql as $$
    begin
        lock table withdrawn in row exclusive mode;
        insert into part
        select the_key, the_call, the_step, the_downstream_key, the_attempt
        where not exists (select from withdrawn where key = the_key and step = the_step and attempt = the_attempt);
        return found;
    end $$;
    create function withdraw(the_key text, the_step text, the_attempt int) returns text
    language plpgsql as $$
    begin
        lock table withdrawn in share row exclusive mode;
        insert into withdrawn values (the_key, the_step, the_attempt);
        return (select call from part where key = the_key and attempt = the_attempt and step = the_step limit 1);
    end $$";

/// On a server that can have a trigger on the table.
const TRIGGER: &str = "
    create function note_if_overtaken() returns trigger
    language plpgsql as $$
    begin
        insert into part
        select new.key, new.call, 'overtaken', null, new.attempt
        from idempotency.record
        where scope = new.key and operation = 'chaos' and value = new.key and attempt <> new.attempt;
        return null;
    end $$;
    -- At COMMIT, when the step has locked the record, so that no other attempt can claim it any more.
    create constraint trigger note_if_overtaken after insert on part deferrable initially deferred
    for each row when (new.step = 'row') execute function note_if_overtaken()";

/// In the database, and outside of it.
pub(crate) async fn create_tables(world: &World) -> sqlx::Result<()> {
    world.observer.execute(TABLES).await?;
    // Citus has no triggers on distributed tables.
    let more = if world.is_distributed() {
        "select create_distributed_table('part', 'key', colocate_with => 'idempotency.record')"
    } else {
        TRIGGER
    };
    world.observer.execute(more).await?;
    if let Some(outside) = &world.outside {
        outside.execute(TABLES).await?;
    }
    Ok(())
}

/// How an attempt goes, and what goes wrong in it besides the fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// A step whose future is dropped after so many polls. The attempt then asks for the step again.
    drops: Option<(&'static str, usize)>,
    /// A step that returns an error.
    fails: Option<&'static str>,
    /// How many steps run side by side: the messages always do, and the others before them or with them. A message that
    /// has begun keeps everybody from taking over.
    abreast: u8,
    /// How long each step takes, before its effect and after it.
    pub(crate) pause: Duration,
}

impl Plan {
    /// A mutant that the fault must reveal has no mishaps.
    pub(crate) fn new(random: &mut Random, leased: Leased, subject: Subject) -> Self {
        let mishaps = !subject.mutant().is_some_and(Mutant::needs_the_fault);
        // Each dropped message takes an operator.
        let dropped = random.of(&[ROW, ROW, CHARGE, TEXT, EMAIL]);
        let polls = usize::try_from(random.below(20)).unwrap_or_default();
        let failing = random.of(&[ROW, CHARGE, TEXT, EMAIL]);
        let drops = (random.one_in(4) && mishaps).then_some((dropped, polls));
        Self {
            drops,
            fails: (random.one_in(12) && mishaps).then_some(failing),
            abreast: random.of(&[1, 2, 2, 3]),
            pause: random.millis(0..leased.work.max(1)) / 4,
        }
    }

    pub(crate) fn check(self, step: &str) -> Result<(), Failure> {
        if self.fails == Some(step) { Err(Failure::AskedFor) } else { Ok(()) }
    }

    /// Asks for a step, and once more if its future was dropped. Boxed, because all futures around it contain it several
    /// times, and overflow the stack.
    pub(crate) async fn ask<F>(self, step: &str, perform: impl Fn() -> F) -> Result<String, Failure>
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
    pub(crate) async fn respond<E>(
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
pub(crate) struct Attempt<'a> {
    pub(crate) key: &'a str,
    pub(crate) call: &'a str,
    pub(crate) number: u32,
}

impl Attempt<'_> {
    /// Adds a row or a charge. The outside counts a charge twice only if it has two downstream keys.
    pub(crate) async fn add(self, db: impl PgExecutor<'_>, step: &str, downstream: Option<&str>) -> sqlx::Result<()> {
        sqlx::query("insert into part (key, call, step, downstream_key, attempt) values ($1, $2, $3, $4, $5::int4)")
            .bind(self.key)
            .bind(self.call)
            .bind(step)
            .bind(downstream)
            .bind(i32::try_from(self.number).unwrap_or(i32::MAX))
            .execute(db)
            .await
            .map(drop)
    }

    /// Sends a text or an email. `false` means that the operator has withdrawn it.
    pub(crate) async fn send(self, outside: &PgPool, step: &str, downstream: &str) -> sqlx::Result<bool> {
        sqlx::query_scalar("select send($1::text, $2::text, $3::text, $4::text, $5::int4)")
            .bind(self.key)
            .bind(self.call)
            .bind(step)
            .bind(downstream)
            .bind(i32::try_from(self.number).unwrap_or(i32::MAX))
            .fetch_one(outside)
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
    let mutant = world.subject.mutant();
    let outside = world.outside_or(pool);
    let attempt = Attempt { key: value, call, number: lease.attempt() };
    let row = async || {
        if mutant == Some(Mutant::RowOutside) {
            // In a task, which the loss of the lease does not stop.
            let (pool, key, call) = (pool.clone(), value.to_owned(), call.to_owned());
            let writing = tokio::spawn(async move {
                sleep(2 * plan.pause).await;
                let attempt = Attempt { key: &key, call: &call, number: attempt.number };
                attempt.add(&pool, ROW, None).await.map(|()| call)
            });
            return Ok(writing.await.expect("no panic")?);
        }
        lease
            .step(ROW, async |conn: &mut PgConnection| {
                sleep(plan.pause).await;
                attempt.add(conn, ROW, None).await?;
                plan.check(ROW)?;
                sleep(plan.pause).await;
                Ok(call.to_owned())
            })
            .await
    };
    let charge = || {
        lease.step_at_least_once(CHARGE, async |step: &Step| {
            sleep(plan.pause).await;
            attempt.add(outside, CHARGE, Some(&step.downstream_key())).await?;
            plan.check(CHARGE)?;
            sleep(plan.pause).await;
            Ok(call.to_owned())
        })
    };
    let message = async |name: &'static str| {
        let send = async move |step: &Step| {
            sleep(plan.pause).await;
            plan.check(name).map_err(|error| step.not_performed(error))?;
            if !attempt.send(outside, name, &step.downstream_key()).await? {
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
    // An attempt ends with each kill, so the number is out of reach.
    let most = std::num::NonZeroU32::MAX;
    let deployment = Deployment::new().with_distributed(world.is_distributed());
    let leasing = Leasing::new(leased.policy())?.with_deployment(deployment);
    Ok(leasing.with_stored_request(true).with_max_attempts(most))
}

pub(crate) async fn call(
    world: &World,
    pool: &PgPool,
    value: &str,
    call: &str,
    leased: Leased,
    plan: Plan,
) -> Result<Outcome<String>, Failure> {
    let work = async |lease: &Lease| {
        world.history.add(call, value, What::Claimed(lease.token()));
        work(world, pool, lease, value, call, plan).await
    };
    leasing(world, leased)?.ensure(pool, &key(value), value, work).await
}

/// Finishes what no caller comes back for.
pub(crate) async fn resumer(world: Arc<World>, pool: PgPool, name: String, leased: Leased) {
    let mut random = world.random(&name);
    for number in 0_u64.. {
        if world.is_over() {
            break;
        }
        let name = format!("{name}/{number}");
        // Soon, because a caller's key is asked for during two leases only.
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
    let plan = Plan::new(random, leased, world.subject);
    let taken = OnceLock::new();
    let work = async |lease: &Lease, value: String| {
        let _ = taken.set(value.clone());
        world.history.add(call, &value, What::Invoked);
        world.history.add(call, &value, What::Claimed(lease.token()));
        work(world, pool, lease, &value, call, plan).await
    };
    let leasing = leasing(world, leased)?.with_resume_after(after).map_err(Error::from)?;
    let resumed = leasing.resume_one(pool, "chaos", work).await;
    match (taken.get(), resumed) {
        (None, resumed) => resumed.map(|resumed| resumed.is_some()),
        (Some(value), resumed) => {
            let response = resumed.map(|response| Outcome::Performed(response.expect("an operation was taken")));
            world.history.add(call, value, ending(response));
            Ok(true)
        }
    }
}

/// Settles the messages in doubt.
pub(crate) async fn operator(world: Arc<World>, pool: PgPool, name: String) {
    let mut random = world.random(&name);
    while !world.is_over() {
        // After an error, and after a kill, the next round finds the same messages in doubt.
        let _ = settle_in_doubt(&world, &pool).await;
        sleep(random.millis(5..25)).await;
    }
}

/// Asks the gateway whether each message in doubt was sent, and withdraws it: its worker may only be suspended.
pub(crate) async fn settle_in_doubt(world: &World, pool: &PgPool) -> Result<(), Error> {
    let found = unsettled(pool, 100, None).await?;
    for found in found.into_iter().filter(|found| !found.steps_in_doubt().is_empty()) {
        let settled = if world.subject.mutant() == Some(Mutant::SettlesAllInDoubt) {
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

/// The mutant: asks about one message, and its release is about all that are in doubt.
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

/// When the fault is over: resumers and operators finish every operation, and no caller helps. Returns how many they
/// did not finish. A mutant's operations are left to its callers.
pub(crate) async fn finish(world: &World, leased: Leased) -> anyhow::Result<i64> {
    if world.subject != Subject::Crate {
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
                if !resume_one(world, &pool, &name, leased, Duration::ZERO, &mut random).await? {
                    break;
                }
            }
            Ok::<_, Failure>(())
        };
        try_join_all((0..8).map(finisher)).await?;
        let left = "select count(*) from idempotency.record where mode = 'in_steps' and completed_at is null";
        let left: i64 = sqlx::query_scalar(left).fetch_one(&pool).await?;
        if left == 0 || started.elapsed() > SETTLE_LIMIT {
            pool.close().await;
            return Ok(left);
        }
        // A lease has to lapse first, at times.
        sleep(PAUSE).await;
    }
    unreachable!("it ends with its time")
}

pub(crate) async fn parts(world: &World) -> sqlx::Result<Vec<Part>> {
    let select = "select key, call, step, downstream_key from part";
    let mut parts = sqlx::query_as(select).fetch_all(&world.observer).await?;
    if let Some(outside) = &world.outside {
        parts.extend(sqlx::query_as(select).fetch_all(outside).await?);
    }
    Ok(parts)
}

/// How many messages in doubt an operator has looked up: those that were sent, and the others.
pub(crate) async fn looked_up(world: &World) -> sqlx::Result<(i64, i64)> {
    sqlx::query_as(
        "select count(*) filter (where sent), count(*) filter (where not sent)
        from (
            select exists (
                select from part where part.step = one.step and part.key = one.key and part.attempt = one.attempt
            ) as sent
            from (select distinct key, step, attempt from withdrawn) as one
        ) as withdrawn",
    )
    .fetch_one(world.outside_or(&world.observer))
    .await
}
