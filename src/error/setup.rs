//! The errors of the functions that set up the schema, and of the verbs of operators.

use super::MayContainError;
use crate::Error;

/// The reason why [`migrate`](crate::migrate()), [`protect`](crate::protect()) or [`unprotect`](crate::unprotect())
/// changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// This database or this table cannot be set up.
    #[error("{problem}")]
    #[non_exhaustive]
    Refused {
        /// A description of the problem and of the remedy.
        problem: String,
        /// The server's error, if the server caused the failure.
        source: Option<sqlx::Error>,
    },

    /// Another session holds the lock of [`migrate`](crate::migrate()) for longer than this call waits. Nothing was
    /// changed. Any role can take that lock. The error's text contains a query that finds the session.
    /// `pg_terminate_backend` ends a session that hangs.
    #[error(
        "another session holds the lock of the migrations of this database for longer than this session waits (its \
         lock_timeout, at most a minute); wait and migrate again, or end that session if it hangs; this query finds \
         it: `select pid, usename, application_name, state from pg_stat_activity join pg_locks using (pid) \
         where datname = current_database() and granted and locktype = 'advisory' \
         and classid = '1885825380' and objid = '1701671023'`"
    )]
    #[non_exhaustive]
    Locked {
        /// The server's error `lock_not_available` (SQLSTATE 55P03).
        source: sqlx::Error,
    },

    /// An error that a call can also return.
    #[error(transparent)]
    Other(#[from] Error),
}

impl SetupError {
    /// Whether the same call, repeated unchanged after a moment, may succeed. See also [`Error::is_transient`].
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Locked { .. } => true,
            Self::Other(error) => error.is_transient(),
            Self::Refused { .. } => false,
        }
    }
}

impl MayContainError for SetupError {
    fn contained(&self) -> Option<&Error> {
        if let Self::Other(error) = self { Some(error) } else { None }
    }
}

impl From<sqlx::Error> for SetupError {
    fn from(error: sqlx::Error) -> Self {
        Self::Other(error.into())
    }
}

/// The reason why a verb of [`Shown`](crate::operator::Shown) settled nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettleError {
    /// The record has changed since it was shown. For example, the record was claimed again, settled, completed or
    /// deleted, its lease was renewed, or one of its steps has ended. A verb also returns this error if the verb does
    /// not apply to the state of the record. The verb changed nothing. Show the record again, and decide again.
    #[error(
        "the record has changed since it was shown, is under a live lease, or cannot be settled in this way, so \
         nothing was done; show it again"
    )]
    Changed,

    /// An error that a call can also return.
    #[error(transparent)]
    Other(#[from] Error),
}

impl SettleError {
    /// Whether the same decision, repeated unchanged after a moment, may succeed. See also [`Error::is_transient`].
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Changed => false,
            Self::Other(error) => error.is_transient(),
        }
    }
}

impl MayContainError for SettleError {
    fn contained(&self) -> Option<&Error> {
        if let Self::Other(error) = self { Some(error) } else { None }
    }
}

impl From<sqlx::Error> for SettleError {
    fn from(error: sqlx::Error) -> Self {
        Self::Other(error.into())
    }
}
