//! A call in mark mode.

use std::time::Duration;

use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{Outcome, commit};
use sqlx::PgPool;

use crate::request::{Failure, Request, key};

/// Longer than any run.
const RETENTION: Duration = Duration::from_secs(24 * 3600);

/// A mark stores no response. A duplicate reads the effect, as a consumer would look for what it has done.
pub(super) async fn call(pool: &PgPool, request: &Request) -> Result<Outcome<String>, Failure> {
    let mut tx = pool.begin().await?;
    let marking = MarkOptions::new(RETENTION);
    if marking.mark(&mut tx, &key(&request.key)).await? == Marked::First {
        let response = request.effect(&mut tx).await?;
        commit(tx).await?;
        return Ok(Outcome::Performed(response));
    }
    let first: Option<String> = sqlx::query_scalar("select call from effect where key = $1::text limit 1")
        .bind(&request.key)
        .fetch_optional(&mut *tx)
        .await?;
    tx.rollback().await?;
    // The mark and the effect are in one transaction, so no duplicate can see the mark alone.
    Ok(Outcome::Replayed(first.ok_or(Failure::Barred("a mark without its effect"))?))
}
