//! Transactions that the crate begins and ends itself, on connections of a pool.
//!
//! The pool pings each connection that is returned to it. The ping sends a queued ROLLBACK. If a statement failed after
//! its future was dropped, the ping gets the error, and the pool closes the connection. So no call gets an old error.

use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Instant;

use sqlx::pool::PoolConnection;
use sqlx::{Executor as _, PgConnection, PgPool, Postgres, SqlSafeStr as _, SqlStr};

use super::nesting::{begin, commit_innermost, depth, queue_rollbacks, roll_back_to};
use crate::error::sqlstate;
use crate::record::{self, opening};
use crate::{Deployment, Error, Misuse};

/// A connection of the pool, and the transaction that the crate has begun on it, if there is one. If the session is
/// dropped, the transaction is rolled back.
pub(crate) struct Session {
    conn: PoolConnection<Postgres>,
    /// A message with BEGIN or ROLLBACK is on its way, or has failed: sqlx may count no transaction, and the server
    /// have one.
    uncounted: bool,
    /// When the BEGIN of the open transaction was sent, if nothing has checked that it began the transaction.
    unchecked_since: Option<Instant>,
}

impl Session {
    pub(crate) async fn of(pool: &PgPool) -> Result<Self, Error> {
        let mut session = Self { conn: pool.acquire().await?, uncounted: false, unchecked_since: None };
        // sqlx counts the transaction of a forgotten guard. Not even a look may happen in it.
        session.roll_back().await;
        Ok(session)
    }

    /// Begins a transaction. `false` means that the claim in the message did not win, and no transaction is open.
    ///
    /// If other code has left a transaction open on the connection, this function rolls it back, and begins again. Such
    /// a transaction comes from a forgotten guard, which sqlx counts, or from a raw BEGIN, which the opening detects.
    pub(crate) async fn begin(&mut self, opening: &Opening) -> Result<bool, Error> {
        self.roll_back().await;
        self.uncounted = true;
        let begun = match self.send(opening).await? {
            Begun::Foreign(_) => {
                self.conn.execute("rollback").await?;
                self.send(opening.checked()).await?
            }
            begun => begun,
        };
        // After the ROLLBACK no foreign transaction is left, so this error has another cause.
        if let Begun::Foreign(error) = begun {
            return Err(Error::of_statement(error));
        }
        self.uncounted = false;
        Ok(matches!(begun, Begun::Open))
    }

    async fn send(&mut self, opening: &Opening) -> Result<Begun, Error> {
        self.unchecked_since = (!opening.is_checked()).then(Instant::now);
        opening.judge(begin(&mut self.conn, opening.sql()).await)
    }

    /// When the BEGIN was sent, if only the age of the transaction can show that it began the transaction: see
    /// [`Opening::BeforeClaim`].
    pub(crate) fn unchecked_since(&self) -> Option<Instant> {
        self.unchecked_since
    }

    pub(crate) fn is_open(&self) -> bool {
        depth(&self.conn) > 0
    }

    /// Fails if the transaction cannot be committed because sqlx would send something else than a COMMIT: the service's
    /// code has forgotten the guard of a nested transaction, or has dropped a nested `begin` while it waited.
    pub(crate) fn check_depth(&self) -> Result<(), Error> {
        match depth(&self.conn) {
            0 => Err(Error::Misuse(Misuse::NotInTransaction)),
            1 => Ok(()),
            _ => Err(Error::Misuse(Misuse::NestedTransaction)),
        }
    }

    /// Commits the transaction. After an error drop the session, or roll back.
    pub(crate) async fn commit(&mut self) -> Result<(), Error> {
        self.check_depth()?;
        Ok(commit_innermost(&mut self.conn).await?)
    }

    /// Commits a transaction that began as [`Opening::Exempt`] and has no claim, so no completion could fail.
    /// PostgreSQL answers the COMMIT of an aborted transaction with a ROLLBACK, and the handler may have ended the
    /// transaction and begun another one. The setting of the opening ends with its transaction.
    #[cfg(feature = "http")]
    pub(crate) async fn commit_exempt(&mut self) -> Result<(), Error> {
        self.check_depth()?;
        self.conn.execute(opening::IS_EXEMPT).await.map_err(|error| match sqlstate(&error).as_deref() {
            Some(sqlstate::DIVISION_BY_ZERO | sqlstate::NO_ACTIVE_TRANSACTION) => {
                Error::Misuse(Misuse::NotInTransaction)
            }
            _ => error.into(),
        })?;
        self.commit().await
    }

    /// Rolls back everything.
    pub(crate) async fn roll_back(&mut self) {
        self.uncounted = true;
        roll_back_to(&mut self.conn, 0).await;
        self.uncounted = false;
    }
}

impl Deref for Session {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.conn
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.conn
    }
}

impl Drop for Session {
    /// Queues a ROLLBACK, which the pool's ping sends. To close the connection instead would let a service collapse
    /// under short time-outs: each connection has to be opened again, and a connect takes longer than the time-out. If
    /// the future was dropped during BEGIN, or during the ROLLBACK that follows a cancelled one, sqlx counts no
    /// transaction. The next caller would then write into an open transaction, and lose the write. In this case, `drop`
    /// queues a second ROLLBACK: it polls `begin` once, with `rollback` as the statement. One poll is enough, because
    /// `begin` queues its statement before it waits.
    ///
    /// All transactions that sqlx counts are rolled back, because otherwise the pool would get an open one.
    fn drop(&mut self) {
        queue_rollbacks(&mut self.conn, 0);
        if self.uncounted {
            let _ =
                pin!(begin(&mut self.conn, "rollback".into_sql_str())).poll(&mut Context::from_waker(Waker::noop()));
        }
    }
}

/// Runs `work` in a transaction of its own, which commits if the work returns `Ok` and is rolled back otherwise.
///
/// # Cancellation
///
/// If the future is dropped, the transaction is rolled back, or the COMMIT was already sent and may take effect.
pub(crate) async fn in_pooled_transaction<R, E, W>(pool: &PgPool, opening: Opening, work: W) -> Result<R, E>
where
    E: From<Error>,
    W: AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
{
    let mut session = Session::of(pool).await?;
    session.begin(&opening).await?;
    let worked = work(&mut session).await;
    if worked.is_ok() && opening.commits() {
        session.commit().await?;
    } else {
        session.roll_back().await;
    }
    worked
}

/// How a transaction begins.
#[derive(Clone, Debug)]
pub(crate) enum Opening {
    /// With the session's settings.
    Plain,
    /// As `Plain`, without the check, for a claim that returns the age of its transaction. It detects a foreign
    /// transaction only if a query has run in it, if it has a savepoint, or if it is aborted. The caller of the claim
    /// detects another one by its age, unless it began shortly before the call.
    BeforeClaim,
    /// For a handler without a key. It claims nothing, and may write the tables that are protected
    /// ([`protect`](crate::protect())).
    #[cfg(feature = "http")]
    Exempt,
    /// For code of the service that must not write. It is never committed, because a NOTIFY or a SET is not a write.
    #[cfg(feature = "http")]
    ReadOnly,
    /// Sets `synchronous_commit` to `on` if the session has a weaker setting. For a claim that guards an effect
    /// elsewhere: if the server lost the claim, a second caller could repeat the effect.
    ///
    /// The setting `idempotency.claim` begins with [`own_transaction`](opening::own_transaction) until this transaction
    /// ends. So a step, which claims nothing, may write the tables that are protected, and a later statement can tell
    /// whether it is still in this transaction.
    ///
    /// It is durable on every server of the deployment.
    Durable(Deployment),
    /// As `Plain`, for a search of the crate's own. If row level security could hide a record from the role, the server
    /// refuses the statement (42501). Otherwise an empty result would not prove that no record exists.
    ///
    /// The setting is local to the transaction, because the connection is the service's or a pooler's. It applies to
    /// all tables, so no code of the service may run in such a transaction.
    AllRows,
    /// As `Durable` and `AllRows`, for the decision of an operator, but without the setting `idempotency.claim`.
    DurableAllRows(Deployment),
    /// At READ COMMITTED, whatever the session's own level is, and without a snapshot yet: the first statement takes a
    /// lock, and the second one must see everything that was committed before that.
    ReadCommitted,
    /// With this message, which contains a claim and BEGIN. The claim contains the check.
    Claiming(SqlStr),
}

/// The result of an attempt to begin.
#[derive(Debug)]
enum Begun {
    Open,
    /// The claim in the message did not win: the key is taken, or the claim lost against a concurrent transaction.
    Taken,
    /// The pool gave out a connection on which other code had left a transaction open. The error has aborted this
    /// transaction.
    Foreign(sqlx::Error),
}

impl Opening {
    /// [`BeforeClaim`](Self::BeforeClaim), if the claims of this deployment return the age of their transaction.
    pub(crate) fn before_claim(deployment: Deployment) -> &'static Self {
        if deployment.claims_tell_the_age() { &Self::BeforeClaim } else { &Self::Plain }
    }

    /// Whether the transaction commits if its work succeeds.
    fn commits(&self) -> bool {
        match self {
            #[cfg(feature = "http")]
            Self::ReadOnly => false,
            _ => true,
        }
    }

    fn sql(&self) -> SqlStr {
        match self {
            Self::Plain => opening::BEGIN.into_sql_str(),
            Self::BeforeClaim => opening::BEGIN_BEFORE_CLAIM.into_sql_str(),
            #[cfg(feature = "http")]
            Self::Exempt => opening::BEGIN_EXEMPT.into_sql_str(),
            #[cfg(feature = "http")]
            Self::ReadOnly => opening::BEGIN_READ_ONLY.into_sql_str(),
            Self::Durable(deployment) => record::durable_opening(*deployment).into_sql_str(),
            Self::AllRows => opening::BEGIN_ALL_ROWS.into_sql_str(),
            Self::DurableAllRows(deployment) => record::durable_opening_of_all_rows(*deployment).into_sql_str(),
            Self::ReadCommitted => opening::BEGIN_READ_COMMITTED.into_sql_str(),
            Self::Claiming(message) => message.clone(),
        }
    }

    /// The same transaction, with the check.
    fn checked(&self) -> &Self {
        match self {
            Self::BeforeClaim => &Self::Plain,
            checked => checked,
        }
    }

    fn is_checked(&self) -> bool {
        !matches!(self, Self::BeforeClaim)
    }

    /// The result of an attempt to begin with this message.
    fn judge(&self, begun: sqlx::Result<()>) -> Result<Begun, Error> {
        let Err(error) = begun else { return Ok(Begun::Open) };
        match (self, sqlstate(&error).as_deref()) {
            (
                Self::Claiming(_),
                Some(sqlstate::KEY_TAKEN | sqlstate::SERIALIZATION_FAILURE | sqlstate::DEADLOCK_DETECTED),
            ) => Ok(Begun::Taken),
            (Self::Claiming(_), Some(sqlstate::FOREIGN_TRANSACTION))
            | (Self::BeforeClaim, Some(sqlstate::ACTIVE_TRANSACTION))
            // The check has found a foreign transaction, or that transaction is already aborted.
            | (_, Some(sqlstate::DIVISION_BY_ZERO | sqlstate::IN_FAILED_TRANSACTION)) => Ok(Begun::Foreign(error)),
            _ => Err(Error::of_statement(error)),
        }
    }
}
