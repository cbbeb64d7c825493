//! The meaning of an error of the database at the place where a call meets it: `places.md` has the table.
//!
//! Before the work, some errors of the way to the server say nothing about the call, and the same call may succeed in a
//! moment. In the statements of the work and after them, the same SQLSTATEs mean a mistake of the service, and each
//! retry would do the work again.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

#[cfg(feature = "http")]
use super::sqlstate::READ_ONLY_TRANSACTION;
use super::sqlstate::{
    DUPLICATE_PREPARED_STATEMENT, INVALID_AUTHORIZATION_SPECIFICATION, INVALID_CATALOG_NAME, INVALID_PASSWORD,
    INVALID_SCHEMA_NAME, INVALID_SQL_STATEMENT_NAME, UNDEFINED_COLUMN, UNDEFINED_FUNCTION, UNDEFINED_TABLE, sqlstate,
};
use super::unreached::Unreached;
use crate::Error;

impl Error {
    /// Makes an [`Error`] from an error of one of the crate's own statements.
    pub(crate) fn of_statement(error: sqlx::Error) -> Self {
        match sqlstate(&error).as_deref() {
            Some(UNDEFINED_TABLE | UNDEFINED_COLUMN | UNDEFINED_FUNCTION | INVALID_SCHEMA_NAME) => {
                Self::SchemaMissing { source: error.into() }
            }
            _ => {
                log_lost_statements(&error);
                error.into()
            }
        }
    }

    /// Makes an [`Error`] from an error of the pool. While a password is rotated or a database is restored, the server
    /// refuses new connections. The same call may succeed after that.
    pub(crate) fn of_pool(error: sqlx::Error) -> Self {
        match sqlstate(&error).as_deref() {
            Some(state @ (INVALID_PASSWORD | INVALID_AUTHORIZATION_SPECIFICATION | INVALID_CATALOG_NAME)) => {
                if is_due(state) {
                    tracing::error!(
                        error = &error as &dyn StdError,
                        "the database refuses the role, the password or the database's name of this service; calls are \
                         refused until the URL is right"
                    );
                }
                Self::Database(Unreached::of(error))
            }
            _ => error.into(),
        }
    }

    /// Marks an error of a call that has not begun its work, if the connection has lost its prepared statements. The
    /// next call prepares them again, or gets another connection.
    pub(crate) fn before_the_work(self) -> Self {
        match self {
            Self::Database(error) if has_lost_statements(&error) => Self::Database(Unreached::of(error)),
            error => error,
        }
    }

    /// Whether a read-only transaction has refused a write. After a fail-over a retry may succeed. If the service
    /// itself makes the transaction read only, a retry gets the same error.
    #[cfg(feature = "http")]
    pub(crate) fn is_write_in_read_only(&self) -> bool {
        matches!(self, Self::Database(error) if sqlstate(error).as_deref() == Some(READ_ONLY_TRANSACTION))
    }

    /// Whether the connection no longer has the prepared statements that sqlx remembers. The causes are a pooler in
    /// transaction mode, DISCARD ALL and DEALLOCATE ALL.
    pub(crate) fn has_lost_statements(&self) -> bool {
        matches!(self, Self::Database(error) if has_lost_statements(error))
    }
}

fn has_lost_statements(error: &sqlx::Error) -> bool {
    matches!(sqlstate(error).as_deref(), Some(INVALID_SQL_STATEMENT_NAME | DUPLICATE_PREPARED_STATEMENT))
}

fn log_lost_statements(error: &sqlx::Error) {
    if has_lost_statements(error) && sqlstate(error).is_some_and(|state| is_due(&state)) {
        tracing::error!(
            error = error as &dyn StdError,
            "a connection has lost its prepared statements: DISCARD ALL and DEALLOCATE ALL remove them, and a pooler in \
             transaction mode exchanges the connection; see the guide's page poolers"
        );
    }
}

/// The log gets at most one line with each SQLSTATE in this time, because each call may meet the error.
const PACE: Duration = Duration::from_secs(60);

/// Whether a line with this SQLSTATE is due.
fn is_due(state: &str) -> bool {
    static WRITTEN: Mutex<BTreeMap<String, Instant>> = Mutex::new(BTreeMap::new());
    let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    let is_due = written.get(state).is_none_or(|last| now.duration_since(*last) >= PACE);
    if is_due {
        written.insert(state.to_owned(), now);
    }
    is_due
}
