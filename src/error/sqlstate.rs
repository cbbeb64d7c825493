//! The SQLSTATEs that the crate tells apart, by the names that PostgreSQL's manual gives them in its appendix A.

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
pub(crate) const INVALID_SAVEPOINT: &str = "3B001";
pub(crate) const INVALID_SCHEMA_NAME: &str = "3F000";
pub(crate) const SERIALIZATION_FAILURE: &str = "40001";
pub(crate) const DEADLOCK_DETECTED: &str = "40P01";
pub(crate) const INSUFFICIENT_PRIVILEGE: &str = "42501";
pub(crate) const SYNTAX_ERROR: &str = "42601";
pub(crate) const INVALID_NAME: &str = "42602";
pub(crate) const UNDEFINED_COLUMN: &str = "42703";
pub(crate) const UNDEFINED_FUNCTION: &str = "42883";
pub(crate) const UNDEFINED_TABLE: &str = "42P01";
pub(crate) const DUPLICATE_SCHEMA: &str = "42P06";
pub(crate) const DUPLICATE_TABLE: &str = "42P07";
pub(crate) const INSUFFICIENT_RESOURCES: &str = "53";
pub(crate) const LOCK_NOT_AVAILABLE: &str = "55P03";
pub(crate) const QUERY_CANCELED: &str = "57014";
pub(crate) const SHUTDOWN_OR_STARTUP: &str = "57P";
pub(crate) const INTERNAL_ERROR: &str = "XX000";

/// Of `idempotency.claim_at_begin`: a record is there, or an open transaction claims the key.
pub(crate) const KEY_TAKEN: &str = "IK001";
/// Of `idempotency.store_response`: the claim has ended.
pub(crate) const CLAIM_ENDED: &str = "IK002";
/// Of `idempotency.store_response`: the retention has ended.
pub(crate) const RETENTION_ENDED: &str = "IK003";
/// Of `idempotency.claim_at_begin`: the message did not begin this transaction.
pub(crate) const FOREIGN_TRANSACTION: &str = "IK005";

/// Of `idempotency.protect`: this relation cannot be protected.
pub(crate) const NOT_PROTECTED: &str = "IK007";

/// The SQLSTATE of an error of the server.
pub(crate) fn sqlstate(error: &sqlx::Error) -> Option<String> {
    Some(error.as_database_error()?.code()?.into_owned())
}
