//! Connections of a pool on which nobody has left a transaction.

use sqlx::pool::PoolConnection;
use sqlx::{Connection as _, PgPool, Postgres};

use crate::Error;

/// How many connections with somebody's open transaction are closed before a call gives up. They are a bug elsewhere, and
/// one call should not empty the pool over it.
pub(crate) const FOREIGN_TRANSACTIONS: usize = 3;

/// The connections that a call tries, one after the other.
pub(crate) struct Connections<'p> {
    pool: &'p PgPool,
    left: usize,
}

impl<'p> Connections<'p> {
    pub(crate) fn of(pool: &'p PgPool) -> Self {
        Self { pool, left: FOREIGN_TRANSACTIONS }
    }

    /// The next one that is in no transaction, as far as sqlx knows; [`Error::UnknownTransaction`] once enough were in vain.
    pub(crate) async fn next(&mut self) -> Result<PoolConnection<Postgres>, Error> {
        while self.left > 0 {
            self.left -= 1;
            let conn = self.pool.acquire().await?;
            if !conn.is_in_transaction() {
                return Ok(conn);
            }
            // Whatever goes wrong while it closes, it is gone from the pool.
            let _ = conn.close().await;
        }
        Err(Error::UnknownTransaction)
    }
}

/// What an attempt came to; `None` where it met somebody's transaction. That connection is closed, which neither commits it nor
/// gives it back, and another one is to be tried.
pub(crate) async fn unless_foreign<R, E>(
    conn: PoolConnection<Postgres>,
    attempt: Result<Result<R, E>, Error>,
) -> Option<Result<R, E>>
where
    E: From<Error>,
{
    match attempt {
        Ok(settled) => Some(settled),
        Err(Error::UnknownTransaction) => {
            let _ = conn.close().await;
            None
        }
        Err(error) => Some(Err(error.into())),
    }
}
