//! Callers in lease mode. Their effects are outside of the database that fails over: a list of the suite's own, which
//! dedupes nothing and loses nothing.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pg_idempotency::lease::{Acquired, Leasing};
use pg_idempotency::operator::{release, resolve};
use pg_idempotency::{DEFAULT_RETENTION, Error, Outcome};
use sqlx::PgPool;
use tokio::time::sleep;

use super::load::Way;
use crate::checker::{Aftermath, Effect};
use crate::history::What;
use crate::lease::Leased;
use crate::subject::{Failure, Request, key};
use crate::world::World;

pub(crate) const INDETERMINATE: &str = "indeterminate";

/// What the callers have done outside of the database.
#[derive(Debug, Default)]
pub(crate) struct Outside(Mutex<Vec<Effect>>);

impl Outside {
    fn affect(&self, key: &str, call: &str, downstream_key: String) {
        let effect = Effect { key: key.to_owned(), call: call.to_owned(), downstream_key: Some(downstream_key) };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(effect);
    }

    pub(crate) fn effects(&self) -> Vec<Effect> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

pub(crate) async fn call(
    world: &World,
    pool: &PgPool,
    request: &Request,
    leased: Leased,
    outside: &Outside,
    work: Duration,
) -> Result<Outcome<String>, Failure> {
    let leasing = Leasing::new(leased.policy()).map_err(Error::from)?.with_deployment(request.deployment());
    match leasing.acquire(pool, &request.key(), request.key.as_str()).await? {
        Acquired::Replayed(response) => Ok(Outcome::Replayed(response)),
        Acquired::Owner(lease) => {
            world.history.add(&request.call, &request.key, What::Claimed(lease.token()));
            if lease.is_lost() {
                return Err(Error::LeaseLost.into());
            }
            outside.affect(&request.key, &request.call, lease.downstream_key());
            sleep(work).await;
            lease.complete(&request.call).await?;
            Ok(Outcome::Performed(request.call.clone()))
        }
    }
}

/// What an operator does about an indeterminate key: looks outside, and resolves or releases it.
pub(crate) async fn decide(pool: &PgPool, way: &Way, value: &str) -> anyhow::Result<()> {
    let Way::Lease(_, outside) = way else { return Ok(()) };
    let token: i64 =
        sqlx::query_scalar("select token from idempotency.record where operation = 'chaos' and value = $1")
            .bind(value)
            .fetch_one(pool)
            .await?;
    match outside.effects().iter().find(|effect| effect.key == value) {
        Some(effect) => resolve(pool, &key(value), token, &effect.call, DEFAULT_RETENTION).await?,
        None => release(pool, &key(value), token, &[], "nothing happened").await?,
    }
    Ok(())
}

/// The results that are stored, in place of the effects: the outside loses none of those, and the database can lose a
/// result.
pub(crate) fn stored_results(after: &Aftermath) -> Aftermath {
    let result = |record: &crate::checker::Stored| {
        let call = record.response.clone().filter(|_| record.completed)?;
        Some(Effect { key: record.key.clone(), call, downstream_key: None })
    };
    Aftermath { effects: after.records.iter().filter_map(result).collect(), records: Vec::new() }
}
