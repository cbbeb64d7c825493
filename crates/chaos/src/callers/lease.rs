//! A call in lease mode: claim, an effect outside, complete. The outside is a table, written in autocommit.

use std::time::Duration;

use anyhow::Context as _;
use pg_idempotency::lease::{Acquired, LeaseOptions, Policy};
use pg_idempotency::operator::show;
use pg_idempotency::{DEFAULT_RETENTION, Error, Outcome};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::time::sleep;

use crate::checker::leases::Promise;
use crate::history::What;
use crate::mutant::Mutant;
use crate::random::Random;
use crate::request::Failure;
use crate::world::World;

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Leased {
    pub(crate) promise: Promise,
    pub(crate) lease: Duration,
    /// The longest time of the work, in milliseconds.
    pub(crate) work: u64,
}

impl Leased {
    pub(super) fn policy(self) -> Policy {
        match self.promise {
            Promise::AtLeastOnce => Policy::AtLeastOnce { lease: self.lease },
            Promise::AtMostOnce | Promise::Reconciled => Policy::AtMostOnce { lease: self.lease },
            Promise::InSteps => Policy::InSteps { lease: self.lease },
        }
    }

    pub(super) fn work(self, random: &mut Random) -> Duration {
        random.millis(0..self.work.max(1))
    }
}

pub(super) async fn call(
    world: &World,
    pool: &PgPool,
    value: &str,
    call: &str,
    leased: Leased,
    random: &mut Random,
) -> Result<Outcome<String>, Failure> {
    let (mutant, work) = (world.mutant, leased.work(random));
    let policy = match mutant {
        Some(Mutant::TakesOverAtMostOnce) => Policy::AtLeastOnce { lease: leased.lease },
        _ => leased.policy(),
    };
    let ignores_loss = mutant == Some(Mutant::LossIgnored);
    let leasing = LeaseOptions::new(policy);
    match leasing.acquire(pool, &world.key(value), value).await? {
        Acquired::Replayed(response) => Ok(Outcome::Replayed(response)),
        Acquired::Owner(lease) => {
            world.history.add(call, value, What::Claimed(lease.token()));
            if lease.is_lost() && !ignores_loss {
                return Err(Error::LeaseLost.into());
            }
            let (outside, downstream, token) = (world.outside_or(pool), lease.downstream_key(), lease.token());
            if mutant == Some(Mutant::CompletesFirst) {
                lease.complete(&call.to_owned()).await?;
                sleep(work).await;
                affect(outside, value, call, &downstream, token).await?;
                return Ok(Outcome::Performed(call.to_owned()));
            }
            affect(outside, value, call, &downstream, token).await?;
            sleep(work).await;
            match lease.complete(&call.to_owned()).await {
                Err(Error::LeaseLost) if ignores_loss => {}
                completed => completed?,
            }
            Ok(Outcome::Performed(call.to_owned()))
        }
    }
}

/// The effect: no rollback undoes it, and no constraint deduplicates it.
async fn affect(outside: &PgPool, key: &str, call: &str, downstream: &str, token: i64) -> sqlx::Result<()> {
    sqlx::query("select affect_outside($1::text, $2::text, $3::text, $4::int8)")
        .bind(key)
        .bind(call)
        .bind(downstream)
        .bind(token)
        .execute(outside)
        .await
        .map(drop)
}

/// What an operator does about an indeterminate key: looks outside, and resolves or releases it.
pub(super) async fn decide(world: &World, pool: &PgPool, value: &str) -> anyhow::Result<()> {
    let key = world.key(value);
    let shown = show(pool, &key).await?.context("nothing deletes it")?;
    let happened: Option<String> = sqlx::query_scalar("select call from effect where downstream_key = $1")
        .bind(&shown.downstream_key)
        .fetch_optional(world.outside_or(pool))
        .await?;
    match happened {
        Some(response) => shown.resolve(pool, &response, DEFAULT_RETENTION).await?,
        None => shown.release(pool, "nothing happened").await?,
    };
    Ok(())
}
