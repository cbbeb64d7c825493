//! The meaning of an error of the database. The names of the constants for PostgreSQL's SQLSTATEs follow appendix A of
//! PostgreSQL's manual.

use super::unreached::Unreached;
use crate::{Error, Misuse};

pub(crate) const CONNECTION_EXCEPTIONS: &str = "08";
pub(crate) const FEATURE_NOT_SUPPORTED: &str = "0A000";
pub(crate) const DIVISION_BY_ZERO: &str = "22012";
pub(crate) const UNIQUE_VIOLATION: &str = "23505";
pub(crate) const ACTIVE_TRANSACTION: &str = "25001";
pub(crate) const READ_ONLY_TRANSACTION: &str = "25006";
pub(crate) const NO_ACTIVE_TRANSACTION: &str = "25P01";
pub(crate) const IN_FAILED_TRANSACTION: &str = "25P02";
pub(crate) const IDLE_IN_TRANSACTION_SESSION_TIMEOUT: &str = "25P03";
pub(crate) const TRANSACTION_TIMEOUT: &str = "25P04";
pub(crate) const INVALID_SQL_STATEMENT_NAME: &str = "26000";
pub(crate) const INVALID_AUTHORIZATION_SPECIFICATION: &str = "28000";
pub(crate) const INVALID_PASSWORD: &str = "28P01";
pub(crate) const INVALID_SAVEPOINT: &str = "3B001";
pub(crate) const INVALID_CATALOG_NAME: &str = "3D000";
pub(crate) const INVALID_SCHEMA_NAME: &str = "3F000";
pub(crate) const SERIALIZATION_FAILURE: &str = "40001";
pub(crate) const DEADLOCK_DETECTED: &str = "40P01";
pub(crate) const INSUFFICIENT_PRIVILEGE: &str = "42501";
pub(crate) const SYNTAX_ERROR: &str = "42601";
pub(crate) const INVALID_NAME: &str = "42602";
pub(crate) const UNDEFINED_COLUMN: &str = "42703";
pub(crate) const UNDEFINED_FUNCTION: &str = "42883";
pub(crate) const UNDEFINED_TABLE: &str = "42P01";
pub(crate) const DUPLICATE_PREPARED_STATEMENT: &str = "42P05";
pub(crate) const DUPLICATE_SCHEMA: &str = "42P06";
pub(crate) const DUPLICATE_TABLE: &str = "42P07";
pub(crate) const INSUFFICIENT_RESOURCES: &str = "53";
pub(crate) const LOCK_NOT_AVAILABLE: &str = "55P03";
pub(crate) const QUERY_CANCELED: &str = "57014";
pub(crate) const SHUTDOWN_OR_STARTUP: &str = "57P";
pub(crate) const SYSTEM_ERROR: &str = "58000";
pub(crate) const INTERNAL_ERROR: &str = "XX000";

/// `idempotency.protect` fails with this code if the relation cannot be protected.
pub(crate) const NOT_PROTECTED: &str = "IK007";

pub(crate) fn sqlstate(error: &sqlx::Error) -> Option<String> {
    Some(error.as_database_error()?.code()?.into_owned())
}

/// The conversion for a `perform` that returns this crate's [`Error`]. A serialization failure (40001) or a deadlock
/// (40P01) becomes [`Error::Retryable`]. A statement in an aborted transaction (25P02) becomes
/// [`Misuse::TransactionAborted`](crate::Misuse::TransactionAborted). Every other error becomes [`Error::Database`].
impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        match sqlstate(&error).as_deref() {
            Some(SERIALIZATION_FAILURE | DEADLOCK_DETECTED) => Self::Retryable(error),
            Some(IN_FAILED_TRANSACTION) => Misuse::TransactionAborted(error).into(),
            _ => Self::Database(error),
        }
    }
}

pub(super) fn advice(error: &sqlx::Error) -> &'static str {
    match sqlstate(error).as_deref() {
        Some(INSUFFICIENT_PRIVILEGE) => {
            ": the role lacks a right; give it the grants of the guide's page production. If your code has sent SET \
             ROLE, let it send RESET ROLE before it returns. If row level security is on for the crate's tables, see \
             that page"
        }
        Some(INVALID_SQL_STATEMENT_NAME | DUPLICATE_PREPARED_STATEMENT) => {
            ": the connection has lost its prepared statements, or a pooler has put another server connection behind it; \
             see the guide's page poolers"
        }
        _ if is_lost(error) => "; ask again with the same key",
        // The error may come from a statement of the service, for which the crate has no advice.
        _ => "",
    }
}

/// Whether the error has a temporary cause. Temporary causes are a lost or unavailable connection, a server that has no
/// room or is no longer the primary, a time-out of the server, or [a way to the server](Unreached) that has failed
/// before the work. After an error at COMMIT, only another call with the same key shows whether the COMMIT took effect.
/// This is also true of a cancel request (57014). The request ends a deferred trigger, and then nothing is committed.
/// But a COMMIT that waits for a standby answers the request with a warning, and has taken effect.
pub(super) fn is_lost(error: &sqlx::Error) -> bool {
    use sqlx::Error::{Database, Io, PoolClosed, PoolTimedOut, Protocol, Tls};
    match error {
        Io(_) | Tls(_) | Protocol(_) | PoolTimedOut | PoolClosed => true,
        Database(error) if Unreached::is(&**error) => true,
        error => sqlstate(error).is_some_and(|state| {
            let classes = [CONNECTION_EXCEPTIONS, INSUFFICIENT_RESOURCES, SHUTDOWN_OR_STARTUP];
            classes.iter().any(|class| state.starts_with(class))
                || matches!(
                    &*state,
                    // A time-out has ended the session.
                    IDLE_IN_TRANSACTION_SESSION_TIMEOUT | TRANSACTION_TIMEOUT
                    // `statement_timeout` or a cancel request has ended the statement, or `lock_timeout` has ended its
                    // wait. The statement may succeed with less load.
                    | QUERY_CANCELED | LOCK_NOT_AVAILABLE
                    // A fail-over has demoted the primary. The next connection may reach the new primary.
                    | READ_ONLY_TRANSACTION
                    // Citus often reports the loss of a worker with this code.
                    | INTERNAL_ERROR
                    // PgCat and PgDog report with this code that they have no connection, or have lost one.
                    | SYSTEM_ERROR
                )
        }),
    }
}
