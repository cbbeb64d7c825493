//! How an operator settles a claim whose owner is gone.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgPool;

use crate::limits::{RETENTION, within};
use crate::outcome::encode;
use crate::record::{Actor, Record};
use crate::session::{Opening, in_pooled_transaction};
use crate::{Deployment, Error, Key};

/// An operator sends a statement once, so it is not worth preparing. Its form is the same for every deployment, and it
/// is durable on the workers too if there are any.
const UNPREPARED: Deployment = Deployment::new().with_prepared_statements(false);

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
/// at once, under either policy. `token` is the token in that error. The record keeps `reason` for the next operator.
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

/// Runs one fenced statement in its own transaction.
pub(super) async fn committed<F>(pool: &PgPool, opening: Opening, statement: F) -> Result<(), Error>
where
    F: AsyncFnOnce(&mut sqlx::PgConnection) -> Result<bool, Error>,
{
    if in_pooled_transaction(pool, opening, statement).await? { Ok(()) } else { Err(Error::LeaseLost) }
}
