//! Statements that end a claim from outside: an operator's, and the transaction of each.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgPool;

use crate::limits::{RETENTION, within};
use crate::record::{Actor, Record};
use crate::session::{Opening, in_pooled_transaction};
use crate::transaction::encode;
use crate::{Deployment, Error, Key};

/// An operator's statement is sent once: to prepare it would be in vain.
const UNPREPARED: Deployment = Deployment::new().with_prepared_statements(false);

/// Says what became of an [indeterminate](Error::Indeterminate) or [exhausted](Error::Exhausted) operation: every repeat
/// gets this response from now on, for `retention`. `token` is the one in that error.
///
/// # Errors
///
/// [`Error::LeaseLost`] where the claim is another one by now, completed, or under a live lease; [`Error::Unencodable`];
/// the database's.
///
/// # Cancellation
///
/// Safe at every point: done, or not.
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
    committed(pool, Opening::Durable, async |conn| {
        record.complete_lease(conn, token, &encoded, retention, Actor::Operator).await
    })
    .await
}

/// Says that an [indeterminate](Error::Indeterminate) operation did not take effect: the next caller may claim it at once,
/// under either policy. `token` is the one in that error; `reason` is kept for the next operator.
///
/// # Errors
///
/// As [`resolve`].
///
/// # Cancellation
///
/// Safe at every point: done, or not.
pub async fn release(pool: &PgPool, key: &Key, token: i64, reason: &str) -> Result<(), Error> {
    let record = Record { key, deployment: UNPREPARED };
    committed(pool, Opening::Durable, async |conn| record.release_lease(conn, token, reason, Actor::Operator).await)
        .await
}

/// Runs one fenced statement in a transaction of its own.
pub(super) async fn committed<F>(pool: &PgPool, opening: Opening, statement: F) -> Result<(), Error>
where
    F: AsyncFnOnce(&mut sqlx::PgConnection) -> Result<bool, Error>,
{
    if in_pooled_transaction(pool, opening, statement).await? { Ok(()) } else { Err(Error::LeaseLost) }
}
