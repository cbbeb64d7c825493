//! Transactions of the crate's own on a pool's connections.

use sqlx::pool::PoolConnection;
use sqlx::{Connection as _, PgPool, Postgres};

use super::own::{Attempt, NotBegun, Opening, in_own_transaction};
use crate::Error;

/// How many connections with a foreign transaction one call closes before it gives up. Such transactions come from a
/// bug elsewhere, and one call should not empty the pool because of that bug.
pub(super) const FOREIGN_TRANSACTIONS: usize = 3;

/// The connections that one call tries, one after the other.
pub(crate) struct Connections<'p> {
    pool: &'p PgPool,
    left: usize,
}

impl<'p> Connections<'p> {
    pub(crate) fn of(pool: &'p PgPool) -> Self {
        Self { pool, left: FOREIGN_TRANSACTIONS }
    }

    /// Returns the next connection on which sqlx counts no transaction. After [`FOREIGN_TRANSACTIONS`] other
    /// connections, returns [`Error::UnknownTransaction`].
    pub(crate) async fn next(&mut self) -> Result<PoolConnection<Postgres>, Error> {
        while self.left > 0 {
            self.left -= 1;
            let conn = self.pool.acquire().await?;
            if !conn.is_in_transaction() {
                return Ok(conn);
            }
            close(conn).await;
        }
        Err(Error::UnknownTransaction)
    }

    /// Closes a connection with a foreign transaction. So that transaction is not committed, and the connection does
    /// not return to the pool. Returns the next connection.
    pub(crate) async fn replace(
        &mut self,
        foreign: PoolConnection<Postgres>,
    ) -> Result<PoolConnection<Postgres>, Error> {
        close(foreign).await;
        self.next().await
    }

    /// Runs `work` in a transaction on this connection, or on another one if this has a foreign transaction. Calls the
    /// work at most once.
    pub(crate) async fn in_transaction<R, E, W>(
        mut self,
        mut conn: PoolConnection<Postgres>,
        opening: &Opening,
        mut work: W,
    ) -> Result<R, E>
    where
        E: From<Error>,
        W: AsyncFnOnce(&mut sqlx::PgConnection) -> Result<R, E>,
    {
        loop {
            match in_own_transaction(&mut conn, opening, work).await {
                Attempt::NotBegun(NotBegun::Foreign, uncalled) => {
                    work = uncalled;
                    conn = self.replace(conn).await?;
                }
                attempt => {
                    if conn.is_in_transaction() {
                        // The work has forgotten a guard of sqlx. The next user of the pool would take sqlx's count for a
                        // transaction of their own.
                        close(conn).await;
                    }
                    return attempt.into_result();
                }
            }
        }
    }
}

/// Runs `work` in a transaction of its own, on one of the pool's [`Connections`]. Calls the work at most once.
pub(crate) async fn in_pooled_transaction<R, E, W>(pool: &PgPool, opening: Opening, work: W) -> Result<R, E>
where
    E: From<Error>,
    W: AsyncFnOnce(&mut sqlx::PgConnection) -> Result<R, E>,
{
    let mut connections = Connections::of(pool);
    let first = connections.next().await?;
    connections.in_transaction(first, &opening, work).await
}

/// The connection has left the pool, so an error while it closes changes nothing.
async fn close(conn: PoolConnection<Postgres>) {
    let _ = conn.close().await;
}
