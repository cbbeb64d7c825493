//! How an operator settles a claim whose owner is gone.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool};
use tokio::time::Instant;

use super::step::{MAX_STEPS_BYTES, encode_result, too_large};
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
/// repeat gets the response from now on, for `retention`. `token` is the token in that error. No step of the operation
/// is performed any more, and none of those in doubt.
///
/// # Errors
///
/// [`Error::Changed`] if the record has another token by now, is completed, or is under a live lease;
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
    decided(pool, async |conn| {
        let resolved = record(key).complete_lease(conn, token, &encoded, retention, Actor::Operator).await?;
        Ok(resolved.then_some(()))
    })
    .await
}

/// Releases an [indeterminate](Error::Indeterminate) operation that did not take effect. The next caller may claim it
/// at once, under any policy. `token` is the token in that error, and `steps` are the names in it: of an operation in
/// steps, this decides that **none of these steps** took effect, so the next attempt performs them. Finished steps stay.
/// If other steps are in doubt by now, nothing changes. To decide about one of several steps, call [`release_step`] or
/// [`resolve_step`].
///
/// The record keeps `reason` for the next operator.
///
/// **Looking the effect up is not enough if its process may only be suspended**: when it wakes, it may still send the
/// request. Let the other service withdraw the request, or make sure that the process is gone.
///
/// # Errors
///
/// As [`resolve`], and [`Error::Changed`] unless exactly `steps` are in doubt.
///
/// # Cancellation
///
/// Done or not done.
pub async fn release(pool: &PgPool, key: &Key, token: i64, steps: &[String], reason: &str) -> Result<(), Error> {
    decided(pool, async |conn| {
        let released = record(key).release_unperformed(conn, token, steps, reason).await?;
        Ok(released.then_some(()))
    })
    .await
}

/// Decides that one at-most-once [step](Error::Indeterminate) in doubt took no effect: a later attempt performs it.
/// Otherwise as [`resolve_step`]. The record keeps `reason` for the next operator.
///
/// The warning at [`release`] applies to a step, too.
///
/// # Errors
///
/// As [`resolve_step`].
///
/// # Cancellation
///
/// Done or not done.
pub async fn release_step(pool: &PgPool, key: &Key, token: i64, step: &str, reason: &str) -> Result<i64, Error> {
    decided(pool, async |conn| record(key).settle_step(conn, token, step, None, Some(reason)).await).await
}

/// Stores the result of one at-most-once [step](Error::Indeterminate) that was begun and took effect: the next attempt
/// continues after it. `token` is the token in that error. If the step took no effect, call [`release_step`].
///
/// Other steps in doubt stay in doubt, and have to be settled too, with the token that this returns. After the last one
/// the operation is released. The attempt that follows is permitted even if it exceeds
/// [`with_max_attempts`](super::Leasing::with_max_attempts).
///
/// # Errors
///
/// [`Error::Changed`] if the record has another token by now, is completed, is under a live lease, or if this step is
/// not in doubt; [`Error::InvalidStep`] for a result over 64 KiB, or if all results would exceed 256 KiB;
/// [`Error::Unencodable`]; errors of the database.
///
/// # Cancellation
///
/// Done or not done.
pub async fn resolve_step<T>(pool: &PgPool, key: &Key, token: i64, step: &str, result: &T) -> Result<i64, Error>
where
    T: Serialize + DeserializeOwned,
{
    let result = encode_result(step, result)?;
    decided(pool, async |conn| {
        let settled = record(key).settle_step(conn, token, step, Some(&result), None).await?;
        // After the update, which has locked the record. An error rolls it back.
        if let Some(token) = settled
            && let Some(steps) = record(key).steps(conn, token).await?
            && steps.bytes() > MAX_STEPS_BYTES
        {
            return Err(too_large(step));
        }
        Ok(settled)
    })
    .await
}

fn record(key: &Key) -> Record<'_> {
    Record { key, deployment: UNPREPARED }
}

/// Runs the statements of an operator's decision in their own transaction. `None` means that the record is not as the
/// operator saw it.
async fn decided<R>(
    pool: &PgPool,
    decision: impl AsyncFnOnce(&mut PgConnection) -> Result<Option<R>, Error>,
) -> Result<R, Error> {
    in_pooled_transaction(pool, Opening::DurableOnWorkers, decision).await?.ok_or(Error::Changed)
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
    F: AsyncFnOnce(&mut PgConnection) -> Result<bool, Error>,
{
    if in_pooled_transaction(pool, opening, statement).await? { Ok(()) } else { Err(Error::LeaseLost) }
}
