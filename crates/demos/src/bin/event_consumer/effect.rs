//! The outside world: effects that no rollback undoes and no constraint dedupes.

use std::process;
use std::time::Duration;

use pg_idempotency::Error;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::time::sleep;

use crate::plan::Body;
use crate::queue::Delivery;

/// As an answer from a near service takes.
const PLAIN: Duration = Duration::from_millis(20);

/// Longer than the lease, which has to be renewed, and than the queue's visibility; and so long that whoever looks
/// every tenth of a second kills in the middle of it.
const SLOW: Duration = Duration::from_millis(1500);

/// The result of a request, stored once and given to every repeat.
#[derive(Serialize, Deserialize)]
pub(crate) struct Receipt {
    worker: u32,
    delivery: i64,
    attempt: u32,
}

/// Why a request was neither handled nor replayed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Idempotency(#[from] Error),

    /// With its cause in the text, which is all that the record keeps.
    #[error("the other side could not be reached: {0}")]
    Unreachable(sqlx::Error),

    /// The worst case of a failure: it comes after the effect.
    #[error("the other side took the request and answered 500")]
    Refused,
}

pub(crate) struct Outside {
    /// Of connections that are never in a transaction, and none of the queue's.
    pub(crate) pool: PgPool,
}

impl Outside {
    /// Has the effect, which takes a while; the worker may die in the meantime.
    pub(crate) async fn affect(&self, delivery: &Delivery, attempt: u32) -> Result<Receipt, Failure> {
        sqlx::query("insert into effect (request_id, delivery, attempt) values ($1::text, $2::int8, $3::int8)")
            .bind(&delivery.request_id)
            .bind(delivery.number)
            .bind(i64::from(attempt))
            .execute(&self.pool)
            .await
            .map_err(Failure::Unreachable)?;
        match delivery.body {
            Body::Plain => sleep(PLAIN).await,
            Body::Slow => sleep(SLOW).await,
            Body::FailsTwice if attempt > 2 => sleep(PLAIN).await,
            Body::FailsTwice | Body::AlwaysFails => return Err(Failure::Refused),
        }
        Ok(Receipt { worker: process::id(), delivery: delivery.number, attempt })
    }
}
