//! The statements of an owner: each in its own transaction, and tried again where the work is done.

use std::time::Duration;

use sqlx::{PgConnection, PgPool};
use tokio::time::Instant;

use crate::background::jittered;
use crate::session::{ANSWER_TIME, Opening, bounded, in_pooled_transaction};
use crate::{Error, Misuse};

/// The number of tries to store a result that fit into one lease, if each try takes its longest time.
const TRIES: u32 = 3;
/// The pause between two tries, as a share of the lease: 2 s for a lease of 40 s.
const PAUSES: u32 = 20;

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
        match bounded((lease / TRIES).min(ANSWER_TIME * 2), statement()).await {
            Ok(value) => return Ok(value),
            // Another try would get the same error.
            Err(error @ (Error::LeaseLost | Error::SchemaMissing { .. } | Error::Misuse(Misuse::Step { .. }))) => {
                return Err(error);
            }
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
