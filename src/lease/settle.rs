//! How an operator settles a claim whose owner is gone.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgPool;
use tokio::time::Instant;

use super::step::encode_result;
use crate::limits::{RETENTION, within};
use crate::outcome::encode;
use crate::record::{Actor, Record};
use crate::session::{ANSWER, Opening, answered, in_pooled_transaction, jittered};
use crate::{Deployment, Error, Key};

/// An operator sends a statement once, so it is not worth preparing. Its form is the same for every deployment, and it
/// is durable on the workers too if there are any.
const UNPREPARED: Deployment = Deployment::new().with_prepared_statements(false);

/// The number of tries to store a result that fit into one lease, if each try takes its longest time.
const TRIES: u32 = 3;
/// The pause between two tries, as a share of the lease: 2 s for a lease of 40 s.
const PAUSES: u32 = 20;

/// Stores the response of an [indeterminate](Error::Indeterminate) or [exhausted](Error::Exhausted) operation. Every
/// repeat gets the response from now on, for `retention`. `token` is the token in that error.
///
/// # Errors
///
/// [`Error::LeaseLost`] if the record has another token by now, is completed, or is under a live lease;
/// [`Error::Unencodable`]; errors of the database.
///
/// # Cancellation
///
/// Done or not done.
pub async fn resolve<T: Serialize + DeserializeOwned>(
    pool: &PgPool,
    key: &Key,
    token: i64,
    response: &T,
    retention: Duration,
) -> Result<(), Error> {
    let retention = within("retention", retention, RETENTION)?;
    let encoded = encode(response)?;
    let record = Record { key, deployment: UNPREPARED };
    committed(pool, Opening::DurableOnWorkers, async |conn| {
        record.complete_lease(conn, token, &encoded, retention, Actor::Operator).await
    })
    .await
}

/// Releases an [indeterminate](Error::Indeterminate) operation that did not take effect. The next caller may claim it
/// at once, under any policy. Of an operation in steps, it forgets the step in doubt and keeps the finished ones.
/// `token` is the token in that error. The record keeps `reason` for the next operator.
///
/// **Looking the effect up is not enough if its process may only be suspended**: when it wakes, it may still send the
/// request. Let the other service withdraw the request, or make sure that the process is gone.
///
/// # Errors
///
/// As [`resolve`].
///
/// # Cancellation
///
/// Done or not done.
pub async fn release(pool: &PgPool, key: &Key, token: i64, reason: &str) -> Result<(), Error> {
    let record = Record { key, deployment: UNPREPARED };
    committed(pool, Opening::DurableOnWorkers, async |conn| {
        record.release_lease(conn, token, reason, Actor::Operator).await
    })
    .await
}

/// Stores the result of an at-most-once [step](Error::Indeterminate) that was begun and took effect, and releases the
/// operation: the next attempt continues after this step. `token` is the token in that error.
///
/// If the step took no effect, call [`release`], which keeps the finished steps.
///
/// # Errors
///
/// [`Error::LeaseLost`] if the record has another token by now, is completed, is under a live lease, or if this step is
/// not in doubt; [`Error::InvalidStep`] for a result over 64 KiB; [`Error::Unencodable`]; errors of the database.
///
/// # Cancellation
///
/// Done or not done.
pub async fn resolve_step<T>(pool: &PgPool, key: &Key, token: i64, step: &str, result: &T) -> Result<(), Error>
where
    T: Serialize + DeserializeOwned,
{
    let result = encode_result(step, result)?;
    let record = Record { key, deployment: UNPREPARED };
    committed(pool, Opening::DurableOnWorkers, async |conn| record.resolve_step(conn, token, step, &result).await).await
}

/// Tries a statement again after an error of the database, for the length of one lease: the work is done, and one
/// broken connection would lose its result.
pub(super) async fn within_a_lease<R, F>(lease: Duration, statement: impl Fn() -> F) -> Result<R, Error>
where
    // With `AsyncFn`, the future of the caller would not be `Send`.
    F: Future<Output = Result<R, Error>>,
{
    let deadline = Instant::now() + lease;
    loop {
        // A network that drops all packets must not take the time of the next try.
        match answered((lease / TRIES).min(ANSWER * 2), statement()).await {
            Ok(value) => return Ok(value),
            // Another try would get the same error.
            Err(error @ (Error::LeaseLost | Error::SchemaMissing { .. })) => return Err(error),
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => tokio::time::sleep(jittered(lease / PAUSES)).await,
        }
    }
}

/// Runs one fenced statement in its own transaction.
pub(super) async fn committed<F>(pool: &PgPool, opening: Opening, statement: F) -> Result<(), Error>
where
    F: AsyncFnOnce(&mut sqlx::PgConnection) -> Result<bool, Error>,
{
    if in_pooled_transaction(pool, opening, statement).await? { Ok(()) } else { Err(Error::LeaseLost) }
}
