//! Transactions that the crate opens and ends itself, and its savepoints.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};

#[cfg(feature = "http")]
use sqlx::PgTransaction;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};

use crate::Error;
use crate::error::sqlstate;

/// How many connections with somebody's open transaction are closed before a call gives up. They are a bug elsewhere, and
/// one call should not empty the pool over it.
const FOREIGN_TRANSACTIONS: usize = 3;

/// How many errors of earlier statements, whose futures were dropped, may wait to be read. Each takes a ping.
const STALE_ERRORS: usize = 3;

/// How long the pool takes to have a connection back, which it pings first. Waited for only after a mistake elsewhere.
#[cfg(feature = "http")]
const RELEASE: std::time::Duration = std::time::Duration::from_millis(20);

/// How durable the commit is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durability {
    /// As the session has it.
    AsItIs,
    /// Raised to `synchronous_commit = on` where it is less than that; never lowered. For a claim that guards an effect
    /// elsewhere: lost with the server, it would let a second caller repeat the effect.
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

/// Runs `work` in a transaction of its own, on a connection of the pool.
///
/// One on which somebody left an open transaction is closed, neither committed nor given back, and another one taken.
/// `work` is called once at most: where nothing began, it was not called.
pub(crate) async fn in_pooled_transaction<R, E, F>(pool: &PgPool, durability: Durability, work: F) -> Result<R, E>
where
    E: From<Error>,
    F: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
{
    let mut work = Some(work);
    for _ in 0..FOREIGN_TRANSACTIONS {
        let mut conn = pool.acquire().await.map_err(Error::from)?;
        if !conn.is_in_transaction() {
            let result = in_own_transaction(&mut conn, durability, async |conn| match work.take() {
                Some(work) => work(conn).await,
                None => Err(Error::UnknownTransaction.into()),
            })
            .await;
            match result {
                Ok(result) => return result,
                Err(Error::UnknownTransaction) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // Whatever goes wrong while it closes, it is gone from the pool.
        let _ = conn.close().await;
    }
    Err(Error::UnknownTransaction.into())
}

/// Begins a transaction on a connection of the pool, for a caller who cannot lend it to a closure. **Not safe under
/// cancellation** (sqlx would give an open transaction back to the pool): call it in a task of its own.
///
/// One on which somebody left an open transaction is closed, neither committed nor given back, and another one taken.
#[cfg(feature = "http")]
pub(crate) async fn begin_pooled(pool: &PgPool) -> Result<PgTransaction<'static>, Error> {
    for _ in 0..FOREIGN_TRANSACTIONS {
        match pool.begin_with(Durability::AsItIs.begin()).await {
            // Nothing else in this text divides or can be in an aborted transaction.
            Err(error) if matches!(sqlstate(&error).as_deref(), Some("22012" | "25P02")) => close_foreign(pool).await,
            // One that sqlx knows of, because somebody has forgotten its guard. The attempt has rolled it back.
            Err(sqlx::Error::InvalidSavePointStatement) => {}
            begun => return Ok(begun?),
        }
    }
    Err(Error::UnknownTransaction)
}

/// Commits what holds no claim, and so has no completion that would fail: a COMMIT of an aborted transaction succeeds and
/// saves nothing, and so does one that sqlx leaves out because a cancelled nested `begin` has ended the transaction.
#[cfg(feature = "http")]
pub(crate) async fn commit_unclaimed(mut transaction: PgTransaction<'static>) -> Result<(), Error> {
    if !transaction.is_in_transaction() {
        return Err(Error::NotInTransaction);
    }
    transaction.execute("select 1").await?;
    Ok(transaction.commit().await?)
}

/// Closes the connections at rest that have somebody's transaction on them: a `begin_with` of the pool's own does not say
/// which one it failed on, and gives it back.
#[cfg(feature = "http")]
async fn close_foreign(pool: &PgPool) {
    tokio::time::sleep(RELEASE).await;
    let idle: Vec<_> = std::iter::from_fn(|| pool.try_acquire()).collect();
    for mut conn in idle {
        let begun = in_own_transaction(&mut conn, Durability::AsItIs, async |_| Ok::<_, Error>(())).await;
        if matches!(begun, Err(Error::UnknownTransaction)) {
            let _ = conn.close().await;
        }
    }
}

/// Runs `work` in the caller's transaction, or in one of its own where there is none.
pub(crate) async fn in_any_transaction<R, F>(conn: &mut PgConnection, work: F) -> Result<R, Error>
where
    F: AsyncFnOnce(&mut PgConnection) -> Result<R, Error>,
{
    if conn.is_in_transaction() { work(conn).await } else { in_own_transaction(conn, Durability::AsItIs, work).await? }
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
    let mut transaction = 'begun: {
        let error = match rollback_on_drop.conn.begin_with(durability.begin()).await {
            Ok(transaction) => break 'begun transaction,
            Err(error) => error,
        };
        if error.as_database_error().is_none() {
            return Err(error.into());
        }
        if is_foreign(rollback_on_drop.conn).await? {
            // The transaction is somebody else's: it is not ours to roll back.
            stage.ended.store(true, Ordering::Relaxed);
            return Err(Error::UnknownTransaction);
        }
        rollback_on_drop.conn.execute("rollback").await?;
        rollback_on_drop.conn.begin_with(durability.begin()).await?
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

/// Whether a `begin` that failed met a transaction of somebody else's.
///
/// Its error may be a stale one, of a statement that was under way when its future was dropped, and then the `begin` itself
/// has succeeded. So all errors are read first. What tells is the next statement: a division by zero in `begin`'s check has
/// aborted the other's transaction, in which nothing works any more.
async fn is_foreign(conn: &mut PgConnection) -> Result<bool, Error> {
    for _ in 0..STALE_ERRORS {
        if conn.ping().await.is_ok() {
            break;
        }
    }
    match conn.execute("select 1").await {
        Ok(_) => Ok(false),
        Err(error) if sqlstate(&error).as_deref() == Some("25P02") => Ok(true),
        Err(error) => Err(error.into()),
    }
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

/// A savepoint of one call's own. Plain SQL, because a cancelled nested `conn.begin()` of sqlx rolls back the outer
/// transaction. And a name of its own, from the claim's token: an inner call that was dropped leaves its savepoint behind,
/// and an undo to a shared name would stop there.
///
/// This is the only SQL that is put together at run time: sixteen hexadecimal digits, because a savepoint's name takes no
/// parameter.
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
