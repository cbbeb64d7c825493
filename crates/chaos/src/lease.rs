//! Callers in lease mode: claim, an effect outside, complete. The outside is a table, written in autocommit.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::try_join_all;
use pg_idempotency::lease::{Acquired, Leasing, Policy};
use pg_idempotency::operator::{release, resolve, show};
use pg_idempotency::{DEFAULT_RETENTION, Error, Outcome};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::history::What;
use crate::lease_checker::Promise;
use crate::mutant::Mutant;
use crate::random::Random;
use crate::settling::MUTANT_SETTLE_LIMIT;
use crate::stepped;
use crate::stepped::Plan;
use crate::subject::{Failure, Subject, ending, key};
use crate::world::World;

/// When the fault is over. One alone would take minutes for the keys of a long run.
const SETTLERS: usize = 8;

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Leased {
    pub(crate) promise: Promise,
    pub(crate) lease: Duration,
    /// Milliseconds that the work takes, at most.
    pub(crate) work: u64,
}

impl Leased {
    pub(crate) fn policy(self) -> Policy {
        match self.promise {
            Promise::AtLeastOnce => Policy::AtLeastOnce { lease: self.lease },
            Promise::AtMostOnce => Policy::AtMostOnce { lease: self.lease },
            Promise::InSteps => Policy::InSteps { lease: self.lease },
        }
    }
}

/// The doors of lease mode: so many callers, and for operations in steps also a resumer and an operator. Each ends with
/// the world.
pub(crate) fn crowd(
    world: &Arc<World>,
    pool: &PgPool,
    name: &str,
    callers: usize,
    leased: Leased,
) -> Vec<JoinHandle<()>> {
    let caller = |caller| tokio::spawn(client(world.clone(), pool.clone(), format!("{name}.{caller}"), leased));
    let mut crowd: Vec<_> = (0..callers).map(caller).collect();
    if leased.promise == Promise::InSteps {
        let (resumer, operator) = (format!("{name}.resumer"), format!("{name}.operator"));
        crowd.push(tokio::spawn(stepped::resumer(world.clone(), pool.clone(), resumer, leased)));
        crowd.push(tokio::spawn(stepped::operator(world.clone(), pool.clone(), operator)));
    }
    crowd
}

async fn client(world: Arc<World>, pool: PgPool, name: String, leased: Leased) {
    let mut random = world.random(&name);
    for number in 0_u64.. {
        if world.is_over() {
            break;
        }
        let key = world.choose_key(&mut random);
        let what = call(&world, &pool, &key, &format!("{name}/{number}"), leased, &mut random).await;
        if !matches!(what, What::Performed(_) | What::Replayed(_)) {
            sleep(Duration::from_millis(5)).await;
        }
    }
}

pub(crate) async fn call(
    world: &World,
    pool: &PgPool,
    value: &str,
    call: &str,
    leased: Leased,
    random: &mut Random,
) -> What {
    world.history.add(call, value, What::Invoked);
    let result = if leased.promise == Promise::InSteps {
        let plan = Plan::new(random, leased, world.subject);
        stepped::call(world, pool, value, call, leased, plan).await
    } else {
        let work = random.millis(0..leased.work.max(1));
        own(world, pool, value, call, leased, work).await
    };
    let what = match result {
        // To be settled by an operator, who asks what became of it.
        Err(Failure::Of(Error::Indeterminate { .. })) => What::Refused("indeterminate".to_owned()),
        result => ending(result),
    };
    world.history.add(call, value, what.clone());
    what
}

async fn own(
    world: &World,
    pool: &PgPool,
    value: &str,
    call: &str,
    leased: Leased,
    work: Duration,
) -> Result<Outcome<String>, Failure> {
    let mutant = world.subject.mutant();
    let policy = match mutant {
        Some(Mutant::TakesOverAtMostOnce) => Policy::AtLeastOnce { lease: leased.lease },
        _ => leased.policy(),
    };
    let ignores_loss = mutant == Some(Mutant::LossIgnored);
    let leasing = Leasing::new(policy).map_err(Error::from)?;
    match leasing.acquire(pool, &key(value), value).await? {
        Acquired::Replayed(response) => Ok(Outcome::Replayed(response)),
        Acquired::Owner(lease) => {
            world.history.add(call, value, What::Claimed(lease.token()));
            if lease.is_lost() && !ignores_loss {
                return Err(Error::LeaseLost.into());
            }
            let (downstream, token) = (lease.downstream_key(), lease.token());
            if mutant == Some(Mutant::CompletesFirst) {
                lease.complete(&call.to_owned()).await?;
                sleep(work).await;
                affect(pool, value, call, &downstream, token).await?;
                return Ok(Outcome::Performed(call.to_owned()));
            }
            affect(pool, value, call, &downstream, token).await?;
            sleep(work).await;
            match lease.complete(&call.to_owned()).await {
                Err(Error::LeaseLost) if ignores_loss => {}
                completed => completed?,
            }
            Ok(Outcome::Performed(call.to_owned()))
        }
    }
}

/// The effect: no rollback undoes it, and no constraint dedupes it.
pub(crate) async fn affect(pool: &PgPool, key: &str, call: &str, downstream: &str, token: i64) -> sqlx::Result<()> {
    sqlx::query("insert into effect (key, call, downstream_key, token) values ($1::text, $2::text, $3::text, $4::int8)")
        .bind(key)
        .bind(call)
        .bind(downstream)
        .bind(token)
        .execute(pool)
        .await
        .map(drop)
}

/// When the fault is over: asks for every key until it is answered, and does an operator's duty for what is
/// indeterminate: looks outside, and resolves or releases. Returns how often that was needed.
pub(crate) async fn settle(world: &Arc<World>, leased: Leased) -> anyhow::Result<usize> {
    let pool = crate::world::pool(&world.options, 2 * SETTLERS as u32);
    let calls = world.history.calls();
    let mut keys: Vec<&str> = calls.iter().map(|call| call.key.as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    let started = Instant::now();
    let settler = async |settler: usize| {
        let mut random = world.random(&format!("settler{settler}"));
        let mut decided = 0;
        for value in keys.iter().skip(settler).step_by(SETTLERS) {
            if world.subject != Subject::Crate && started.elapsed() > MUTANT_SETTLE_LIMIT {
                break;
            }
            // A lease has to lapse first, at times.
            for attempt in 0..2000 {
                let name = format!("settler/{value}/{attempt}");
                let what = call(world, &pool, value, &name, Leased { work: 1, ..leased }, &mut random).await;
                match what {
                    What::Performed(_) | What::Replayed(_) | What::Wrong(_) => break,
                    What::Refused(_) if leased.promise == Promise::InSteps => {
                        stepped::settle_in_doubt(world, &pool).await?
                    }
                    What::Refused(why) if why == "indeterminate" => {
                        decide(&pool, value).await?;
                        decided += 1;
                    }
                    _ => sleep(Duration::from_millis(5)).await,
                }
            }
        }
        anyhow::Ok(decided)
    };
    let decided = try_join_all((0..SETTLERS).map(settler)).await?;
    pool.close().await;
    Ok(decided.into_iter().sum())
}

async fn decide(pool: &PgPool, value: &str) -> anyhow::Result<()> {
    let key = key(value);
    let shown = show(pool, &key).await?.context("nothing deletes it")?;
    let happened: Option<String> = sqlx::query_scalar("select call from effect where downstream_key = $1")
        .bind(&shown.downstream_key)
        .fetch_optional(pool)
        .await?;
    match happened {
        Some(response) => resolve(pool, &key, shown.token, &response, DEFAULT_RETENTION).await?,
        None => release(pool, &key, shown.token, &[], "nothing happened").await?,
    }
    Ok(())
}
