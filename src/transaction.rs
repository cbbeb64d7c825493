//! A transaction that the crate opens and ends itself, on a connection that is in none.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};

use sqlx::{Connection, Executor, PgConnection};

use crate::Error;
use crate::error::sqlstate;

/// How durable the commit is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durability {
    /// As the session has it.
    AsItIs,
    /// Raised to `synchronous_commit = on` where it is less than a local flush and standby's; never lowered. For a claim
    /// that guards an effect elsewhere: lost with the server, it would let a second caller repeat the effect.
    Raised,
}

impl Durability {
    /// `begin`, and a division by zero where it began nothing. In a transaction that is open already, by a raw `BEGIN` that
    /// sqlx's depth does not count, `now()` is older than this message; without the check the crate would commit it.
    const fn begin(self) -> &'static str {
        match self {
            Self::AsItIs => "begin; select 1 / (now() = statement_timestamp())::int",
            Self::Raised => {
                "begin; select 1 / (now() = statement_timestamp())::int, \
                 case when current_setting('synchronous_commit') in ('off', 'local') \
                 then set_config('synchronous_commit', 'on', true) end"
            }
        }
    }
}

/// Runs `work` in a transaction of its own: committed if it returns `Ok`, else rolled back before this returns.
///
/// The outer error says that nothing began, and so that `work` was not called; all else is in the inner result.
///
/// # Cancellation
///
/// Dropped at any await, the transaction is rolled back, or the COMMIT that was under way decides. The ROLLBACK is on the
/// wire before this future is gone.
pub(crate) async fn in_own_transaction<R, E, F>(
    conn: &mut PgConnection,
    durability: Durability,
    work: F,
) -> Result<Result<R, E>, Error>
where
    E: From<Error>,
    F: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
{
    let stage = Stage::default();
    let rollback_on_drop = RollbackOnDrop { conn, stage: &stage };
    let mut transaction = match rollback_on_drop.conn.begin_with(durability.begin()).await {
        Ok(transaction) => transaction,
        Err(error) if is_refusal(&error) => {
            // The transaction is somebody else's: it is not ours to roll back.
            stage.ended.store(true, Ordering::Relaxed);
            return Err(Error::UnknownTransaction);
        }
        Err(error) => return Err(error.into()),
    };
    stage.begun.store(true, Ordering::Relaxed);

    match work(&mut transaction).await {
        Ok(value) => {
            if let Err(error) = transaction.commit().await {
                return Ok(Err(Error::from(error).into()));
            }
            stage.ended.store(true, Ordering::Relaxed);
            Ok(Ok(value))
        }
        Err(error) => {
            // A failure to roll back is a broken connection, which has rolled back: the caller's error is the news.
            let rolled_back = transaction.rollback().await;
            stage.ended.store(rolled_back.is_ok(), Ordering::Relaxed);
            Ok(Err(error))
        }
    }
}

/// 22012 is the check in [`Durability::begin`]; 25P02 is what an aborted transaction says to any statement.
fn is_refusal(error: &sqlx::Error) -> bool {
    matches!(sqlstate(error).as_deref(), Some("22012" | "25P02"))
}

#[derive(Default)]
struct Stage {
    begun: AtomicBool,
    ended: AtomicBool,
}

/// Puts a ROLLBACK on the wire when a future is dropped. sqlx alone would leave the connection
/// - in an open transaction that it does not know of, when `begin` was cancelled after it was sent: the next statement in
///   autocommit would be acknowledged and lost;
/// - with a ROLLBACK that is only queued until the connection is used again, its locks still held, when it was cancelled
///   later.
struct RollbackOnDrop<'c, 's> {
    conn: &'c mut PgConnection,
    stage: &'s Stage,
}

impl Drop for RollbackOnDrop<'_, '_> {
    fn drop(&mut self) {
        if self.stage.ended.load(Ordering::Relaxed) {
            return;
        }
        if self.stage.begun.load(Ordering::Relaxed) {
            // sqlx's Transaction has queued a ROLLBACK when it was dropped, a moment ago: send it.
            poll_once(self.conn.ping());
        } else {
            // `begin_with` writes its text before it waits, whatever the text is. Where nothing began it is a WARNING.
            poll_once(self.conn.begin_with("rollback"));
        }
    }
}

/// Starts a future and lets it go: what it writes before it waits is written.
fn poll_once(future: impl Future) {
    let _ = pin!(future).poll(&mut Context::from_waker(Waker::noop()));
}

/// The crate's one savepoint. Plain SQL, because a cancelled nested `conn.begin()` of sqlx rolls back the outer transaction.
/// The name may repeat in nested calls: PostgreSQL takes the innermost.
pub(crate) async fn set_savepoint(conn: &mut PgConnection) -> Result<(), Error> {
    command(conn, "savepoint idempotency_perform").await
}

pub(crate) async fn release_savepoint(conn: &mut PgConnection) -> Result<(), Error> {
    command(conn, "release savepoint idempotency_perform").await
}

/// Undoes what came after the savepoint and removes it, in one round trip.
pub(crate) async fn undo_to_savepoint(conn: &mut PgConnection) -> Result<(), Error> {
    command(conn, "rollback to savepoint idempotency_perform; release savepoint idempotency_perform").await
}

async fn command(conn: &mut PgConnection, sql: &'static str) -> Result<(), Error> {
    conn.execute(sql).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // No such savepoint, or no transaction to have one in: `perform` has ended it.
        Some("3B001" | "25P01") => Error::NotInTransaction,
        _ => error.into(),
    })
}
