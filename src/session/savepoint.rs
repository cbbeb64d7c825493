//! The savepoint of an isolated call.

use sqlx::{AssertSqlSafe, Executor, PgConnection};

use crate::Error;
use crate::error::sqlstate;

/// A savepoint in plain SQL, because a cancelled nested `conn.begin()` of sqlx rolls back the outer transaction. Its
/// name contains the claim's token. An inner call that was dropped leaves its savepoint behind. If all savepoints had
/// one name, the undo of the outer call would stop at that savepoint.
///
/// The name is formatted at run time, from sixteen hexadecimal digits, because it cannot be a parameter.
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

    /// Undoes everything after the savepoint, and removes the savepoint, in one round trip.
    pub(crate) async fn undo(self, conn: &mut PgConnection) -> Result<(), Error> {
        let name = format!("idempotency_{:016x}", self.token);
        command(conn, format!("rollback to savepoint {name}; release savepoint {name}")).await
    }
}

async fn command(conn: &mut PgConnection, sql: String) -> Result<(), Error> {
    conn.execute(AssertSqlSafe(sql)).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // No such savepoint, or no transaction: `perform` has ended it.
        Some(sqlstate::INVALID_SAVEPOINT | sqlstate::NO_ACTIVE_TRANSACTION) => Error::NotInTransaction,
        _ => error.into(),
    })
}
