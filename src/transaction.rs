//! Transactions that the crate opens and ends itself.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};

#[cfg(feature = "http")]
use sqlx::PgTransaction;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool, SqlSafeStr as _, SqlStr};

use crate::Error;
#[cfg(feature = "http")]
use crate::connections::FOREIGN_TRANSACTIONS;
use crate::connections::{Connections, unless_foreign};
use crate::error::sqlstate;
use crate::record::is_taken;

/// How many errors of earlier statements, whose futures were dropped, may wait to be read. Each takes a ping.
const STALE_ERRORS: usize = 3;

/// How long the pool takes to have a connection back, which it pings first. Waited for only after a mistake elsewhere.
#[cfg(feature = "http")]
const RELEASE: std::time::Duration = std::time::Duration::from_millis(20);

/// How a transaction begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    /// With what the session has.
    Plain,
    /// With `synchronous_commit = on` where the session has less than that; never lowered. For a claim that guards an effect
    /// elsewhere: lost with the server, it would let a second caller repeat the effect.
    Durable,
    /// With a claim in the same message, whose text this is; where that fails, nothing begins.
    Claiming(String),
}

/// In a transaction that is open already, by a raw `BEGIN` that sqlx's depth does not count, `now()` is older than this
/// message: a division by zero. Without the check the crate would commit it.
const BEGIN: &str = "begin; select 1 / (now() = statement_timestamp())::int";
const BEGIN_DURABLE: &str = "begin; select 1 / (now() = statement_timestamp())::int, \
     case when current_setting('synchronous_commit') in ('off', 'local') \
     then set_config('synchronous_commit', 'on', true) end";

impl Opening {
    fn sql(&self) -> SqlStr {
        match self {
            Self::Plain => BEGIN.into_sql_str(),
            Self::Durable => BEGIN_DURABLE.into_sql_str(),
            Self::Claiming(claim) => AssertSqlSafe(format!("{BEGIN}; {claim}")).into_sql_str(),
        }
    }
}

/// Why nothing began: `work` was not called, and the connection is in no transaction of this crate's.
#[derive(Debug)]
pub(crate) enum NotBegun {
    /// Somebody else's transaction is open on the connection.
    Foreign,
    /// An error of an earlier statement was in the way, whose future was dropped. It is read now.
    Stale,
    /// The opening's own error, or the connection's.
    Failed(sqlx::Error),
}

impl From<sqlx::Error> for NotBegun {
    fn from(error: sqlx::Error) -> Self {
        Self::Failed(error)
    }
}

impl From<NotBegun> for Error {
    fn from(not_begun: NotBegun) -> Self {
        match not_begun {
            NotBegun::Foreign | NotBegun::Stale => Self::UnknownTransaction,
            NotBegun::Failed(error) => error.into(),
        }
    }
}

/// What work makes of the transaction that it was given.
#[derive(Debug)]
pub(crate) enum Settled<R> {
    /// Still to be committed.
    Open(R),
    /// Committed by a `commit and chain`: sqlx's depth still stands for a transaction, the empty one that is chained to it.
    /// For connections that go back to a pool at once.
    Committed(R),
}

/// Runs `work` in a transaction of its own, on one of the pool's [`Connections`]. It is called once at most: where nothing
/// began, it was not called.
pub(crate) async fn in_pooled_transaction<R, E, F>(pool: &PgPool, opening: &Opening, work: F) -> Result<R, E>
where
    E: From<Error>,
    F: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
{
    let mut work = Some(work);
    let mut connections = Connections::of(pool);
    loop {
        let mut conn = connections.next().await?;
        let attempt = in_own_transaction(&mut conn, opening, async |conn| match work.take() {
            Some(work) => work(conn).await,
            None => Err(Error::UnknownTransaction.into()),
        })
        .await;
        if let Some(settled) = unless_foreign(conn, attempt).await {
            return settled;
        }
    }
}

/// Begins a transaction on a connection of the pool, for a caller who cannot lend it to a closure. **Not safe under
/// cancellation** (sqlx would give an open transaction back to the pool): call it in a task of its own.
///
/// One on which somebody left an open transaction is closed, neither committed nor given back, and another one taken.
#[cfg(feature = "http")]
pub(crate) async fn begin_pooled(pool: &PgPool) -> Result<PgTransaction<'static>, Error> {
    for _ in 0..FOREIGN_TRANSACTIONS {
        match pool.begin_with(BEGIN).await {
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
        let begun = in_own_transaction(&mut conn, &Opening::Plain, async |_| Ok::<_, Error>(())).await;
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
    if conn.is_in_transaction() { work(conn).await } else { in_own_transaction(conn, &Opening::Plain, work).await? }
}

/// Runs `work` in a transaction of its own: committed if it returns `Ok`, else rolled back before this returns.
///
/// The outer error says that nothing began, and so that `work` was not called; all else is in the inner result.
///
/// # Cancellation
///
/// As [`in_transaction_to_end`].
pub(crate) async fn in_own_transaction<R, E, F>(
    conn: &mut PgConnection,
    opening: &Opening,
    work: F,
) -> Result<Result<R, E>, Error>
where
    E: From<Error>,
    F: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
{
    Ok(in_transaction_to_end(conn, opening, async |conn| work(conn).await.map(Settled::Open)).await?)
}

/// [`in_own_transaction`], for work that may commit by itself, and openings that may fail by design.
///
/// # Cancellation
///
/// Dropped at any await, the transaction is rolled back, or the COMMIT that was under way decides. The ROLLBACK is on the
/// wire before this future is gone.
pub(crate) async fn in_transaction_to_end<R, E, F>(
    conn: &mut PgConnection,
    opening: &Opening,
    work: F,
) -> Result<Result<R, E>, NotBegun>
where
    E: From<Error>,
    F: AsyncFnOnce(&mut PgConnection) -> Result<Settled<R>, E>,
{
    let stage = Stage::default();
    let rollback_on_drop = RollbackOnDrop { conn, stage: &stage };
    let mut transaction = 'begun: {
        let error = match rollback_on_drop.conn.begin_with(opening.sql()).await {
            Ok(transaction) => break 'begun transaction,
            Err(error) => error,
        };
        if error.as_database_error().is_none() {
            return Err(error.into());
        }
        // A claim that met another says so by a code that nothing else has.
        let not_begun = match is_taken(&error) {
            true => NotBegun::Failed(error),
            false => what_failed(rollback_on_drop.conn, error).await?,
        };
        if matches!(not_begun, NotBegun::Foreign) {
            // The transaction is somebody else's: it is not ours to roll back.
            stage.ended.store(true, Ordering::Relaxed);
            return Err(not_begun);
        }
        rollback_on_drop.conn.execute("rollback").await?;
        match (not_begun, opening) {
            (NotBegun::Stale, Opening::Plain | Opening::Durable) => {
                rollback_on_drop.conn.begin_with(opening.sql()).await?
            }
            (not_begun, _) => {
                stage.ended.store(true, Ordering::Relaxed);
                return Err(not_begun);
            }
        }
    };
    stage.begun.store(true, Ordering::Relaxed);

    match work(&mut transaction).await {
        Ok(Settled::Open(value)) => {
            if let Err(error) = transaction.commit().await {
                return Ok(Err(Error::from(error).into()));
            }
            stage.ended.store(true, Ordering::Relaxed);
            Ok(Ok(value))
        }
        // sqlx has queued a ROLLBACK of the empty transaction; the ping with which the pool takes the connection back sends it.
        Ok(Settled::Committed(value)) => {
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

/// What a `begin` failed by.
///
/// Its error may be a stale one, of a statement that was under way when its future was dropped, and then the `begin` itself
/// may have succeeded. So all errors are read first: the last one is its own, if nothing works in the transaction any more.
async fn what_failed(conn: &mut PgConnection, error: sqlx::Error) -> Result<NotBegun, sqlx::Error> {
    let mut last = error;
    for _ in 0..STALE_ERRORS {
        match conn.ping().await {
            Ok(()) => break,
            Err(error) => last = error,
        }
    }
    match conn.execute("select 1").await {
        Ok(_) => Ok(NotBegun::Stale),
        Err(error) if sqlstate(&error).as_deref() == Some("25P02") => match sqlstate(&last).as_deref() {
            // The check of `BEGIN`, or an aborted transaction in which it was not even reached.
            Some("22012" | "25P02") => Ok(NotBegun::Foreign),
            _ => Ok(NotBegun::Failed(last)),
        },
        Err(error) => Err(error),
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
