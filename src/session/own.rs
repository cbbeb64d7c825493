//! Transactions that the crate begins and ends itself.
//!
//! The crate lends such a transaction to a closure. A value that begins, derefs and rolls back on drop would read
//! better. But sqlx 0.9 counts its transactions behind a trait that it does not export, so only sqlx's own guard can
//! end a transaction (DESIGN.md).

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};

use sqlx::{Connection, Executor, PgConnection, PgTransaction, SqlSafeStr as _, SqlStr};

use crate::error::sqlstate;
use crate::{Deployment, Error};

/// How many unread errors a call reads at most. They are errors of earlier statements whose futures were dropped.
/// Reading one of them takes a ping.
const STALE_ERRORS: usize = 3;

/// How a transaction begins.
#[derive(Clone, Debug)]
pub(crate) enum Opening {
    /// With the session's settings.
    Plain,
    /// With `synchronous_commit = on`, if the session has a weaker setting. For a claim that guards an effect
    /// elsewhere: if the server lost the claim, a second caller could repeat the effect.
    ///
    /// The setting `idempotency.transaction` is `open` until this transaction ends, so a later statement can tell
    /// whether it is still in it.
    Durable,
    /// As `Durable`, and the workers of a distributed table commit with the same setting. Otherwise each has its own.
    DurableOnWorkers,
    /// With this message, which contains a claim and BEGIN. The claim contains the check.
    Claiming(SqlStr),
}

/// Refuses a connection on which somebody sent a raw `BEGIN`, which sqlx does not count. There `now()` is older than
/// this message, and the division by zero aborts that transaction. Without the check the crate would commit it.
///
/// The check comes before BEGIN in the same message, and the message is one transaction. So if the check fails, the
/// crate has no open transaction.
macro_rules! check {
    () => {
        "select 1 / (pg_catalog.now() = pg_catalog.statement_timestamp())::int"
    };
}

const BEGIN: &str = concat!(check!(), "; begin");
const BEGIN_DURABLE: &str = concat!(
    check!(),
    ", case when pg_catalog.current_setting('synchronous_commit') in ('off', 'local')
    then pg_catalog.set_config('synchronous_commit', 'on', true) end,
    pg_catalog.set_config('idempotency.transaction', 'open', true); begin"
);
/// Citus passes on `set local`, and nothing that a function sets. The session's `lock_timeout` bounds the waits for a row
/// on a worker. On a server without Citus the settings stay what they are.
const BEGIN_DURABLE_ON_WORKERS: &str = concat!(
    check!(),
    "; begin; set local idempotency.transaction = 'open';
    set local citus.propagate_set_commands = 'local'; do $$ begin
        execute pg_catalog.format('set local synchronous_commit = %L', case
            when pg_catalog.current_setting('synchronous_commit') in ('off', 'local') then 'on'
            else pg_catalog.current_setting('synchronous_commit')
        end);
        if pg_catalog.current_setting('lock_timeout') <> '0' then
            execute pg_catalog.format('set local lock_timeout = %L', pg_catalog.current_setting('lock_timeout'));
        end if;
    end $$"
);

pub(crate) const COMMIT_OUTERMOST: &str = "commit and chain";

/// Ends a transaction that the crate has begun, after the future of the `begin` was dropped. If the check has aborted a
/// foreign transaction, the first statement fails and the ROLLBACK is not reached. So the foreign transaction stays
/// aborted, and its owner's next statement fails.
const ROLL_BACK_OURS: &str = "select 1; rollback";

impl Opening {
    /// [`Durable`](Self::Durable), on every server of this deployment.
    pub(crate) fn durable(deployment: Deployment) -> Self {
        if deployment.distributed { Self::DurableOnWorkers } else { Self::Durable }
    }

    pub(super) fn sql(&self) -> SqlStr {
        match self {
            Self::Plain => BEGIN.into_sql_str(),
            Self::Durable => BEGIN_DURABLE.into_sql_str(),
            Self::DurableOnWorkers => BEGIN_DURABLE_ON_WORKERS.into_sql_str(),
            Self::Claiming(message) => message.clone(),
        }
    }

    /// Whether the error says that the key is taken, which is an answer and not a failure.
    pub(super) fn is_taken(&self, error: &sqlx::Error) -> bool {
        matches!(self, Self::Claiming(_)) && sqlstate(error).as_deref() == Some("IK001")
    }
}

/// An attempt to run `W` in a transaction.
#[derive(Debug)]
pub(crate) enum Attempt<R, W> {
    /// The work was called and has ended, and so has the transaction.
    Ended(R),
    /// No transaction of the crate's is open. The work was not called.
    NotBegun(NotBegun, W),
}

/// Why no transaction began.
#[derive(Debug)]
pub(crate) enum NotBegun {
    /// Somebody's raw `BEGIN` had opened a transaction on the connection. The check has aborted it.
    Foreign,
    /// The claim in the message found the key taken.
    Taken,
    /// The error of the opening itself, or of the connection.
    Failed(sqlx::Error),
}

impl From<NotBegun> for Error {
    fn from(not_begun: NotBegun) -> Self {
        match not_begun {
            NotBegun::Foreign => Self::UnknownTransaction,
            NotBegun::Taken => Self::InFlight { retry_after: std::time::Duration::ZERO },
            NotBegun::Failed(error) => Self::of_statement(error),
        }
    }
}

impl<R, E: From<Error>, W> Attempt<Result<R, E>, W> {
    pub(crate) fn into_result(self) -> Result<R, E> {
        match self {
            Self::Ended(result) => result,
            Self::NotBegun(not_begun, _) => Err(Error::from(not_begun).into()),
        }
    }
}

/// Runs `work` in the caller's transaction, or in a new one if there is none.
pub(crate) async fn in_any_transaction<R, E, W>(conn: &mut PgConnection, work: W) -> Result<R, E>
where
    E: From<Error>,
    W: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
{
    if conn.is_in_transaction() {
        work(conn).await
    } else {
        in_own_transaction(conn, &Opening::Plain, work).await.into_result()
    }
}

/// Runs `work` in a new transaction, which commits if the work returns `Ok` and is rolled back otherwise.
///
/// # Cancellation
///
/// As [`begin_and_lend`].
pub(crate) async fn in_own_transaction<R, E, W>(
    conn: &mut PgConnection,
    opening: &Opening,
    work: W,
) -> Attempt<Result<R, E>, W>
where
    E: From<Error>,
    W: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
{
    let ended = begin_and_lend(conn, opening, work, async |mut transaction: PgTransaction<'_>, work: W| {
        match work(&mut transaction).await {
            Ok(value) => transaction.commit().await.map(|()| value).map_err(|error| Error::from(error).into()),
            Err(error) => {
                // A ROLLBACK fails only if the connection is broken, and then the server rolls back. The caller needs
                // the first error.
                let _ = transaction.rollback().await;
                Err(error)
            }
        }
    });
    match ended.await {
        // The work has begun a nested transaction and forgotten its guard: sqlx released a savepoint in place of the
        // COMMIT.
        Attempt::Ended(Ok(_)) if conn.is_in_transaction() => Attempt::Ended(match conn.execute("rollback").await {
            Ok(_) => Err(Error::NotInTransaction.into()),
            Err(error) => Err(Error::from(error).into()),
        }),
        ended => ended,
    }
}

/// Commits a transaction that the crate has begun, whatever sqlx counts. If the caller's code has begun a nested
/// transaction and forgotten its guard, sqlx's own `commit` releases a savepoint in place of the COMMIT, and returns `Ok`.
///
/// AND CHAIN, because sqlx still counts a transaction. The chained transaction is empty and holds neither lock nor
/// snapshot. sqlx queues a ROLLBACK for it, which the pool's ping at the connection's return sends, so no caller waits for
/// it. If a guard was forgotten, sqlx queues a ROLLBACK TO SAVEPOINT. This fails, and the pool closes the connection.
pub(crate) async fn commit_outermost(mut transaction: PgTransaction<'_>) -> Result<(), Error> {
    transaction.execute(COMMIT_OUTERMOST).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // The caller's code has ended the transaction.
        Some("25P01") => Error::NotInTransaction,
        _ => error.into(),
    })
}

/// Begins a transaction and lends it to `work`, which ends it.
///
/// # Cancellation
///
/// If the future is dropped, the transaction is rolled back, or the COMMIT was already sent and may take effect. The
/// ROLLBACK is on the wire before the future is gone.
pub(crate) async fn begin_and_lend<R, W, F>(
    conn: &mut PgConnection,
    opening: &Opening,
    given: W,
    work: F,
) -> Attempt<R, W>
where
    F: AsyncFnOnce(PgTransaction<'_>, W) -> R,
{
    let mut guard = RollbackOnDrop { conn, stage: Stage::Beginning };
    let transaction = 'begun: {
        let error = match guard.conn.begin_with(opening.sql()).await {
            Ok(transaction) => break 'begun transaction,
            Err(error) => error,
        };
        if opening.is_taken(&error) {
            guard.stage = Stage::Ended;
            return Attempt::NotBegun(NotBegun::Taken, given);
        }
        if error.as_database_error().is_none() {
            return Attempt::NotBegun(NotBegun::Failed(error), given);
        }
        if let Err(not_begun) = clear(guard.conn).await {
            if matches!(not_begun, NotBegun::Foreign) {
                guard.stage = Stage::Ended;
            }
            return Attempt::NotBegun(not_begun, given);
        }
        match guard.conn.begin_with(opening.sql()).await {
            Ok(transaction) => transaction,
            Err(error) if opening.is_taken(&error) => {
                guard.stage = Stage::Ended;
                return Attempt::NotBegun(NotBegun::Taken, given);
            }
            Err(error) => return Attempt::NotBegun(NotBegun::Failed(error), given),
        }
    };
    guard.stage = Stage::Begun;
    let ended = work(transaction, given).await;
    guard.stage = Stage::Ended;
    Attempt::Ended(ended)
}

/// Makes the connection ready for another `begin` after one that failed.
///
/// The error of the failed `begin` may belong to an earlier statement whose future was dropped. Then the `begin` itself
/// may have succeeded. So this function reads all errors first. If the error was the opening's own, the second try
/// fails with it again.
async fn clear(conn: &mut PgConnection) -> Result<(), NotBegun> {
    for _ in 0..STALE_ERRORS {
        if conn.ping().await.is_ok() {
            break;
        }
    }
    match conn.execute("select 1").await {
        // If no transaction had begun, this ROLLBACK leaves a WARNING in the server's log.
        Ok(_) => conn.execute("rollback").await.map(drop).map_err(NotBegun::Failed),
        Err(error) if sqlstate(&error).as_deref() == Some("25P02") => Err(NotBegun::Foreign),
        Err(error) => Err(NotBegun::Failed(error)),
    }
}

enum Stage {
    /// The message with BEGIN is on its way, or its error was not read.
    Beginning,
    /// sqlx's guard holds the transaction.
    Begun,
    Ended,
}

/// Puts a ROLLBACK on the wire when a future is dropped. Without it sqlx would leave the connection
/// - in an open transaction that sqlx does not count, if the future was dropped during BEGIN: the next statement would
///   look like autocommit, and would be lost;
/// - with a ROLLBACK that is queued until the next use of the connection, if it was dropped later: the transaction's
///   locks would last until then.
struct RollbackOnDrop<'c> {
    conn: &'c mut PgConnection,
    stage: Stage,
}

impl Drop for RollbackOnDrop<'_> {
    fn drop(&mut self) {
        match self.stage {
            // `begin_with` writes its text before it waits, whatever the text is.
            Stage::Beginning => poll_once(self.conn.begin_with(ROLL_BACK_OURS)),
            // sqlx's guard was dropped a moment ago and has queued a ROLLBACK: a ping sends it.
            Stage::Begun => poll_once(self.conn.ping()),
            Stage::Ended => {}
        }
    }
}

/// Polls a future once and drops it. The future has then written everything that it writes before its first wait.
fn poll_once(future: impl Future) {
    let _ = pin!(future).poll(&mut Context::from_waker(Waker::noop()));
}
