//! Savepoints of the crate's own.

use sqlx::{AssertSqlSafe, Executor, PgConnection};

use crate::Error;
use crate::error::sqlstate;

/// A savepoint of one call's own. Plain SQL, because a cancelled nested `conn.begin()` of sqlx rolls back the outer
/// transaction. And a name of its own, from the claim's token: an inner call that was dropped leaves its savepoint behind,
/// and an undo to a shared name would stop there.
///
/// Put together at run time, of sixteen hexadecimal digits: a savepoint's name takes no parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Savepoint {
    token: i64,
}

impl Savepoint {
    pub(crate) async fn set(conn: &mut PgConnection, token: i64) -> Result<Self, Error> {
        command(conn, format!("savepoint idempotency_{token:016x}")).await?;
        Ok(Self { token })
    }

    pub(crate) async fn release(self, conn: &mut PgConnection) -> Result<(), Error> {
        command(conn, format!("release savepoint idempotency_{:016x}", self.token)).await
    }

    /// Undoes what came after it and removes it, in one round trip.
    pub(crate) async fn undo(self, conn: &mut PgConnection) -> Result<(), Error> {
        let name = format!("idempotency_{:016x}", self.token);
        command(conn, format!("rollback to savepoint {name}; release savepoint {name}")).await
    }
}

async fn command(conn: &mut PgConnection, sql: String) -> Result<(), Error> {
    conn.execute(AssertSqlSafe(sql)).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // No such savepoint, or no transaction to have one in: `perform` has ended it.
        Some("3B001" | "25P01") => Error::NotInTransaction,
        _ => error.into(),
    })
}
