//! How an operator settles a claim whose owner is gone.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool};

use crate::lease::{encode_result, store_result_of_step};
use crate::limits::{RETENTION, in_range};
use crate::outcome::encode;
use crate::record::{Actor, Fence, Record};
use crate::session::{Opening, in_pooled_transaction};
use crate::{Error, Key, migrate};

/// Stores the response of an [indeterminate](Error::Indeterminate) or [exhausted](Error::Exhausted) operation. Every
/// retry gets the response from now on, for `retention`, or until the record would have expired if that is later.
/// `seen` is the token in that error, or [`Shown::fence`](super::Shown::fence). After that no step is
/// performed, not even one in doubt.
///
/// # Errors
///
/// [`Error::Changed`] if the record has another token by now, is completed, is under a live lease, or if no attempt has
/// begun (attempt 0); [`Error::Unencodable`]; errors of the database.
///
/// # Cancellation
///
/// Done or not done.
pub async fn resolve<T: Serialize + DeserializeOwned>(
    pool: &PgPool,
    key: &Key,
    seen: impl Into<Fence>,
    response: &T,
    retention: Duration,
) -> Result<(), Error> {
    let (retention, seen) = (in_range("retention", retention, RETENTION)?, seen.into());
    let encoded = encode(response)?;
    decided(pool, async |conn| {
        let resolved =
            Record::unprepared(key).complete_lease(conn, &seen, &encoded, retention, Actor::Operator).await?;
        Ok(resolved.then_some(()))
    })
    .await
}

/// Releases an [indeterminate](Error::Indeterminate) operation that did not take effect. The next caller may claim it
/// at once, under any policy, if attempts are left ([`grant_attempt`]). `seen` is as for [`resolve`], and `steps` are
/// the names in it: of an operation in steps, this decides that **none of these steps** took effect, so the next
/// attempt performs them, and is permitted as by [`grant_attempt`]. Finished steps stay. If other steps are in doubt by
/// now, nothing changes. To decide about one of several steps, call [`release_step`] or [`resolve_step`].
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
pub async fn release(
    pool: &PgPool,
    key: &Key,
    seen: impl Into<Fence>,
    steps: &[String],
    reason: &str,
) -> Result<(), Error> {
    let seen = seen.into();
    decided(pool, async |conn| {
        let released = Record::unprepared(key).release_unperformed(conn, &seen, steps, reason).await?;
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
pub async fn release_step(
    pool: &PgPool,
    key: &Key,
    seen: impl Into<Fence>,
    step: &str,
    reason: &str,
) -> Result<i64, Error> {
    let seen = seen.into();
    decided(pool, async |conn| Record::unprepared(key).release_step(conn, &seen, step, reason, true).await).await
}

/// Stores the result of one at-most-once [step](Error::Indeterminate) that was begun and took effect: the next attempt
/// continues after it. `seen` is as for [`resolve`]. If the step took no effect, call [`release_step`].
///
/// Other steps in doubt stay in doubt, and have to be settled too, with the token that this returns. After the last one
/// the operation is released. The attempt that follows is permitted, as by [`grant_attempt`].
///
/// ```rust,no_run
/// # use pg_idempotency::operator;
/// # struct Gateways;
/// # impl Gateways { async fn withdraw(&self, _: &str, _: u32) -> anyhow::Result<Option<String>> { Ok(None) } }
/// # async fn f(pool: &sqlx::PgPool, gateways: &Gateways) -> anyhow::Result<()> {
/// for found in operator::unsettled(pool, 100, None, None).await? {
///     let (key, mut token) = (&found.key, found.token);
///     for step in found.steps.iter().filter(|step| step.in_doubt) {
///         token = match gateways.withdraw(&step.downstream_key, found.attempt).await? {
///             // It took effect: the next attempt continues after this step.
///             Some(sent) => operator::resolve_step(pool, key, token, &step.name, &sent).await?,
///             // It took no effect: the next attempt performs this step, and no finished one.
///             None => operator::release_step(pool, key, token, &step.name, "the gateway has not sent it").await?,
///         };
///     }
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`Error::Changed`] if the record has another token by now, is completed, is under a live lease, or if this step is
/// not in doubt; [`Misuse::Step`](crate::Misuse::Step) for a result over 64 KiB, or if all results would exceed 256
/// KiB; [`Error::Unencodable`]; errors of the database.
///
/// # Cancellation
///
/// Done or not done.
pub async fn resolve_step<T>(
    pool: &PgPool,
    key: &Key,
    seen: impl Into<Fence>,
    step: &str,
    result: &T,
) -> Result<i64, Error>
where
    T: Serialize + DeserializeOwned,
{
    let (result, seen) = (encode_result(step, result)?, seen.into());
    decided(pool, async |conn| store_result_of_step(conn, Record::unprepared(key), &seen, step, &result).await).await
}

/// Permits one more attempt of an operation that was released or has lapsed, even if it exceeds
/// [`max_attempts`](crate::lease::LeaseOptions::max_attempts): of an [exhausted](Error::Exhausted) one, when the cause
/// of its failures is repaired. The next caller or a resumer makes the attempt. `token` is the token in that error. The
/// record keeps `reason` for the next operator. Returns the new token, which fences an owner that was only suspended.
///
/// Finished steps stay. The permission ends with this attempt, but a claim that never began does not use it up.
///
/// # Errors
///
/// [`Error::Changed`] if the record has another token by now, or does not wait for another attempt: it is completed,
/// under a live lease, [indeterminate](Error::Indeterminate), past its retention, in transaction mode, or its first
/// claim never began; errors of the database.
///
/// # Cancellation
///
/// Done or not done.
pub async fn grant_attempt(pool: &PgPool, key: &Key, token: i64, reason: &str) -> Result<i64, Error> {
    decided(pool, async |conn| Record::unprepared(key).grant_attempt(conn, token, reason).await).await
}

/// Runs the statements of an operator's decision in their own transaction, which is durable on the workers too, if
/// there are any. `None` means that the record is not as the operator saw it.
async fn decided<R>(
    pool: &PgPool,
    decision: impl AsyncFnOnce(&mut PgConnection) -> Result<Option<R>, Error>,
) -> Result<R, Error> {
    let decided = async |conn: &mut PgConnection| {
        migrate::trusted(conn).await?;
        decision(conn).await
    };
    in_pooled_transaction(pool, Opening::DurableAllRows, decided).await?.ok_or(Error::Changed)
}
