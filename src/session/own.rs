//! Transactions that the crate opens and ends itself.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};

use sqlx::{Connection, Executor, PgConnection, PgPool, PgTransaction, SqlSafeStr as _, SqlStr};

#[cfg(feature = "http")]
use super::pooled::FOREIGN_TRANSACTIONS;
use super::pooled::{Connections, unless_foreign};
use crate::Error;
use crate::error::sqlstate;

/// How many errors of earlier statements, whose futures were dropped, may wait to be read. Each takes a ping.
const STALE_ERRORS: usize = 3;

/// How long the pool takes to have a connection back, which it pings first. Waited for only after a mistake elsewhere.
#[cfg(feature = "http")]
const RELEASE: std::time::Duration = std::time::Duration::from_millis(20);

/// How a transaction begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    /// With the session's settings.
    Plain,
    /// With `synchronous_commit = on` where the session has less than that; never lowered. For a claim that guards an effect
    /// elsewhere: lost with the server, it would let a second caller repeat the effect.
    Durable,
}

macro_rules! check {
    () => {
        "select 1 / (pg_catalog.now() = pg_catalog.statement_timestamp())::int"
    };
}

/// Refuses a connection with an open transaction that sqlx does not count, from somebody's raw `BEGIN`: there `now()` is older
/// than this message, and the division by zero aborts that transaction. Without the check the crate would commit it.
///
/// It comes before the BEGIN of the same message, which makes one transaction of both. So an error leaves no transaction of
/// ours behind, and an idle connection where there was none of somebody else's.
pub(crate) const CHECK: &str = check!();
const BEGIN: &str = concat!(check!(), "; begin");
const BEGIN_DURABLE: &str = concat!(
    check!(),
    ", case when pg_catalog.current_setting('synchronous_commit') in ('off', 'local')
    then pg_catalog.set_config('synchronous_commit', 'on', true) end; begin"
);

/// Ends a transaction of ours that a dropped future has begun. In a transaction that the check has aborted the first statement
/// fails, and the second is not reached: it is somebody else's, and stays aborted, so that its owner's next statement fails.
const ROLL_BACK_OURS: &str = "select 1; rollback";

impl Opening {
    fn sql(self) -> SqlStr {
        match self {
            Self::Plain => BEGIN.into_sql_str(),
            Self::Durable => BEGIN_DURABLE.into_sql_str(),
        }
    }
}

/// Why nothing began: the work was not called, and no transaction of the crate's is open.
#[derive(Debug)]
pub(crate) enum NotBegun {
    /// Somebody else's transaction is open on the connection; it is aborted now.
    Foreign,
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
            NotBegun::Foreign => Self::UnknownTransaction,
            NotBegun::Failed(error) => error.into(),
        }
    }
}

/// Runs `work` in a transaction of its own, on one of the pool's [`Connections`]. It is called once at most: where nothing
/// began, it was not called.
pub(crate) async fn in_pooled_transaction<R, E, F>(pool: &PgPool, opening: Opening, work: F) -> Result<R, E>
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
        let begun = in_own_transaction(&mut conn, Opening::Plain, async |_| Ok::<_, Error>(())).await;
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
    if conn.is_in_transaction() { work(conn).await } else { in_own_transaction(conn, Opening::Plain, work).await? }
}

/// Runs `work` in a transaction of its own: committed if it returns `Ok`, else rolled back before this returns.
///
/// The outer error says that nothing began, and so that `work` was not called; all else is in the inner result.
///
/// # Cancellation
///
/// As [`begin_and_lend`].
pub(crate) async fn in_own_transaction<R, E, F>(
    conn: &mut PgConnection,
    opening: Opening,
    work: F,
) -> Result<Result<R, E>, Error>
where
    E: From<Error>,
    F: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
{
    let ended = begin_and_lend(&mut *conn, opening.sql(), false, async |mut transaction: PgTransaction<'_>| {
        match work(&mut transaction).await {
            Ok(value) => transaction.commit().await.map(|()| value).map_err(|error| Error::from(error).into()),
            Err(error) => {
                // A failure to roll back is a broken connection, which has rolled back: the caller's error is the news.
                let _ = transaction.rollback().await;
                Err(error)
            }
        }
    });
    let ended = ended.await?;
    // sqlx has released a savepoint in place of the COMMIT: the work has begun a nested transaction and forgotten its guard.
    if ended.is_ok() && conn.is_in_transaction() {
        conn.execute("rollback").await.map_err(Error::from)?;
        return Ok(Err(Error::NotInTransaction.into()));
    }
    Ok(ended)
}

/// Begins a transaction and gives it to `work`, which ends it. `claims` says that `begin` contains a claim, which may be taken.
///
/// # Cancellation
///
/// Dropped at any await, the transaction is rolled back, or the COMMIT that was under way decides. The ROLLBACK is on the
/// wire before this future is gone.
pub(crate) async fn begin_and_lend<R, E, F>(
    conn: &mut PgConnection,
    begin: SqlStr,
    claims: bool,
    work: F,
) -> Result<Result<R, E>, NotBegun>
where
    F: AsyncFnOnce(PgTransaction<'_>) -> Result<R, E>,
{
    let stage = Stage::default();
    let guard = RollbackOnDrop { conn, stage: &stage };
    let transaction = 'begun: {
        let error = match guard.conn.begin_with(begin.clone()).await {
            Ok(transaction) => break 'begun transaction,
            Err(error) => error,
        };
        if error.as_database_error().is_none() {
            return Err(error.into());
        }
        // A claim that has met a record, by design. Nothing is left of it.
        if claims && is_taken(&error) {
            stage.ended.store(true, Ordering::Relaxed);
            return Err(error.into());
        }
        if let Err(not_begun) = clear(guard.conn).await {
            // What has failed may have begun; what is somebody else's stays aborted.
            stage.ended.store(matches!(not_begun, NotBegun::Foreign), Ordering::Relaxed);
            return Err(not_begun);
        }
        guard.conn.begin_with(begin).await?
    };
    stage.begun.store(true, Ordering::Relaxed);
    let ended = work(transaction).await;
    stage.ended.store(true, Ordering::Relaxed);
    Ok(ended)
}

/// The SQLSTATE with which `idempotency.claim` fails where the key is taken.
pub(crate) fn is_taken(error: &sqlx::Error) -> bool {
    sqlstate(error).as_deref() == Some("IK001")
}

/// Makes the connection fit for another `begin` after one that failed.
///
/// The error may be a stale one, of a statement that was under way when its future was dropped, and then the `begin` itself
/// may have succeeded. So all errors are read first. An error of the opening's own comes again at the second try.
async fn clear(conn: &mut PgConnection) -> Result<(), NotBegun> {
    for _ in 0..STALE_ERRORS {
        if conn.ping().await.is_ok() {
            break;
        }
    }
    match conn.execute("select 1").await {
        // Whether the begin succeeded is not known: where it did not, this is a WARNING in the server's log.
        Ok(_) => conn.execute("rollback").await.map(drop).map_err(NotBegun::Failed),
        Err(error) if sqlstate(&error).as_deref() == Some("25P02") => Err(NotBegun::Foreign),
        Err(error) => Err(NotBegun::Failed(error)),
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
            // `begin_with` writes its text before it waits, whatever the text is.
            poll_once(self.conn.begin_with(ROLL_BACK_OURS));
        }
    }
}

/// Starts a future and lets it go: what it writes before it waits is written.
fn poll_once(future: impl Future) {
    let _ = pin!(future).poll(&mut Context::from_waker(Waker::noop()));
}
