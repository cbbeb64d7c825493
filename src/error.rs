//! What can go wrong, told apart by what the caller should do about it.

mod lock_holder;
#[cfg(test)]
mod table;

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::{InvalidBody, InvalidDuration, InvalidKey, Key, Mode};

pub use lock_holder::LockHolder;

/// An error from another library, kept as the cause.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why an operation was neither performed nor replayed.
///
/// Database errors are told apart by SQLSTATE alone. **An error while committing is ambiguous**: the effect and its response
/// are either both there or both not, and only asking again with the same key tells.
///
/// # What to do on each
///
/// *Transient* is what [`is_transient`](Self::is_transient) says: the same call may succeed in a moment. The HTTP status is the
/// one to answer with, and the layer of the feature `http` does; a 409 of `InFlight` and every 503 come with `Retry-After`.
///
#[doc = include_str!("error/table.md")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The key was used before for a request with another body. Nothing was performed. Do not retry: the client has to
    /// take a new key for a new request. Over HTTP this is a 422.
    #[error("the key was used before with another body; take a new key for a new request ({key:?})")]
    #[non_exhaustive]
    KeyReused {
        /// The key.
        key: Key,
    },

    /// Another caller is performing the same operation right now. Safe to retry with the same key after `retry_after`.
    /// Over HTTP this is a 409.
    ///
    /// A transaction of the caller's own is still usable.
    #[error("the operation is in flight elsewhere; retry with the same key after {retry_after:?}")]
    #[non_exhaustive]
    InFlight {
        /// How long to wait before the next attempt: what is left of a lease, else a second.
        retry_after: Duration,
    },

    /// The operation was claimed and never completed, its owner is gone, and nobody knows whether it took effect. It stays
    /// so until it is resolved, released or past its retention. In transaction mode this is what is left when a caller
    /// commits although the call failed, or when `perform` itself commits.
    #[error(
        "the operation was claimed at {claimed_at} (attempt {attempt}, token {token}) and never completed{}; \
         find out whether it took effect, then resolve or release it",
        last_error.as_deref().map(|error| format!(" ({error})")).unwrap_or_default()
    )]
    #[non_exhaustive]
    Indeterminate {
        /// How often the operation was claimed.
        attempt: u32,
        /// When the last claim was made, by the database's clock.
        claimed_at: DateTime<Utc>,
        /// Why the latest attempt failed that could say so: this one, or one before.
        last_error: Option<String>,
        /// The fencing token of the claim: what [`resolve`](crate::lease::resolve()) and [`release`](crate::lease::release())
        /// ask for.
        token: i64,
    },

    /// The same transaction has claimed this key and not completed it: `perform` calls itself, or an earlier call failed
    /// and the transaction went on. Roll back.
    #[error("this transaction has claimed the key before without completing it; roll back and start over")]
    AlreadyInTransaction,

    /// The transaction that was to be [committed](crate::commit()) was aborted: an earlier statement in it had failed, and its
    /// error was not let out. Nothing was saved, and the transaction is rolled back. Acknowledge nothing.
    #[error("the transaction was aborted by an earlier error, so nothing was saved; let errors of its statements out")]
    TransactionAborted(#[source] sqlx::Error),

    /// There is no transaction where one is needed.
    ///
    /// - A mark was asked for on a connection in autocommit: begin one, and process in it.
    /// - The transaction that holds the claim was gone when the response was to be stored, because `perform` ended it: a
    ///   COMMIT, a ROLLBACK, or a nested `conn.begin()` whose future was dropped while it waited. Nothing was acknowledged;
    ///   **what `perform` wrote outside the transaction stays**.
    /// - The transaction that was to be [committed](crate::commit()) had ended before, in one of these ways.
    #[error(
        "the connection is not in the transaction that is needed, so nothing was stored; mark inside a transaction, \
         and let `perform` neither commit, roll back nor drop a pending begin"
    )]
    NotInTransaction,

    /// The call took longer than the key's retention: another caller may have performed since. Nothing was stored.
    #[error(
        "the transaction outlived the key's retention, so the response was not stored; retain longer than it takes"
    )]
    OutlivedRetention,

    /// The key belongs to another mode: a mark, a lease and a transaction never share one.
    #[error(
        "the key belongs to mode {stored} and was asked for in mode {asked}; give each mode its own operations ({key:?})"
    )]
    #[non_exhaustive]
    OtherMode {
        /// The key: one of many, where many were marked.
        key: Key,
        /// The mode of the record.
        stored: Mode,
        /// The mode that was asked for.
        asked: Mode,
    },

    /// The connection is in a transaction that sqlx does not know of: somebody sent a raw `BEGIN`. Nothing was performed
    /// and that transaction was not committed; it is aborted. Begin with `conn.begin()`.
    #[error("the connection is in a transaction that sqlx does not know of (a raw BEGIN); begin it with sqlx")]
    UnknownTransaction,

    /// There is a response, and it does not decode into the type that was asked for. The operation is never performed
    /// again: teach the type to read old responses (`#[serde(default)]`, an enum of versions).
    #[error("the stored response does not decode into the response type; keep the type able to read older responses")]
    #[non_exhaustive]
    Undecodable {
        /// What the decoder says.
        source: BoxError,
    },

    /// The response cannot be encoded as JSON, or not so that it can be decoded again. Nothing was stored: roll back.
    ///
    /// So it is with a float that is not finite, and with a `Some` whose value is `null` in JSON (`Some(())`, `Some(None)`,
    /// `Some(Value::Null)`): it would be replayed as `None`. **Two things go unnoticed**: a field under `#[serde(skip)]` is
    /// replayed as its default, and an `#[serde(untagged)]` enum as the first of its variants that can read the JSON.
    #[error("the response cannot be stored as JSON and read back, so a repeat could not get it; change its type")]
    #[non_exhaustive]
    Unencodable {
        /// What the encoder or decoder says.
        source: BoxError,
    },

    /// The key was refused. No SQL ran. Here for a `perform`, or a function around it, that returns this error.
    #[error(transparent)]
    InvalidKey(#[from] InvalidKey),

    /// The request body has no fingerprint. No SQL ran.
    #[error("the request body has no fingerprint")]
    #[non_exhaustive]
    InvalidBody {
        /// Why not.
        #[from]
        source: InvalidBody,
    },

    /// The record was stored with a fingerprint that this call cannot compare with its own. Nothing was performed. It happens
    /// while a newer release is being rolled out: send the request there, or retry later. And it happens over HTTP, until the
    /// key expires, after a change of the choice of what makes two requests the same.
    #[error(
        "the record's fingerprint has version {version} and cannot be compared with this request's: a newer release made it, \
         or another choice of what makes two requests the same"
    )]
    #[non_exhaustive]
    UnknownFingerprint {
        /// The stored fingerprint's version byte.
        version: u8,
    },

    /// The record is in a mode that this release does not know. Nothing was performed, and nothing replayed. It happens while
    /// a newer release is being rolled out: send the request there, or retry later.
    #[error("the record's mode is {mode:?}, which this release does not know; upgrade this process")]
    #[non_exhaustive]
    UnknownMode {
        /// As the record has it.
        mode: String,
    },

    /// The claim is no longer this owner's: its lease lapsed and another took it over, or it was released, resolved or
    /// purged. Nothing was stored. The effect may have happened: what is stored, or will be, is the other owner's result.
    #[error("the lease was lost, so the response was not stored; ask again with the same key for what became of it")]
    LeaseLost,

    /// The operation was attempted as often as it may be, and failed or lapsed every time: a poison message. It stays so
    /// until it is resolved, or its retention ends.
    #[error("the operation was attempted {attempts} times without completing, which is the limit; set it aside")]
    #[non_exhaustive]
    Exhausted {
        /// How often it was attempted.
        attempts: u32,
        /// Why the latest attempt failed that could say so.
        last_error: Option<String>,
        /// The fencing token of the last claim.
        token: i64,
    },

    /// A duration that was given makes no sense: a lease, a retention, a window, a wait.
    #[error(transparent)]
    InvalidDuration(#[from] InvalidDuration),

    /// The table is missing or older than this release. Run [`migrate`](crate::migrate()), or have the SQL of
    /// [`schema_sql`](crate::schema_sql) run.
    #[error(
        "the table idempotency.record is missing or too old; run pg_idempotency::migrate or `idempotency-janitor migrate`"
    )]
    #[non_exhaustive]
    SchemaMissing {
        /// The server's error (SQLSTATE 42P01, 42703, 42883 or 3F000), or the migration that is missing.
        source: sqlx::Error,
    },

    /// Another session has held the lock of [`migrate`](crate::migrate()) for longer than that waits. Any role can take that
    /// lock: where no migration is under way, look at the session, and end it by `pg_terminate_backend`.
    #[error(
        "another session has held the lock of the migration for {waited:.1?}{}; try again, or end that session",
        holder.as_ref().map(|holder| format!(" ({holder})")).unwrap_or_default()
    )]
    #[non_exhaustive]
    MigrationLocked {
        /// The session; `None` where it let go while it was looked up.
        holder: Option<LockHolder>,
        /// How long this call has waited.
        waited: Duration,
    },

    /// A serialization failure (SQLSTATE 40001) or a deadlock (40P01). Nothing was stored and the transaction is aborted: retry
    /// all of it.
    #[error("the transaction lost against a concurrent one; retry the whole transaction")]
    Retryable(#[source] sqlx::Error),

    /// A [`Fixture`](crate::testing::Fixture) in a state that no call leaves behind. Nothing was written.
    #[cfg(feature = "testing")]
    #[cfg_attr(docsrs, doc(cfg(feature = "testing")))]
    #[error(
        "no call leaves such a record behind: it breaks the rule {rule} of migrations/strict.sql; change the fixture"
    )]
    #[non_exhaustive]
    ImpossibleRecord {
        /// The name of the rule.
        rule: &'static str,
    },

    /// Any other error of the database or the connection.
    #[error("the database failed; ask again with the same key")]
    Database(#[source] sqlx::Error),
}

impl Error {
    /// Whether the same call may succeed in a moment, with nothing changed: another caller is in flight, a serialization
    /// failure or deadlock, a connection that broke or was not to be had, a server that restarts or is full. Over HTTP, a
    /// 409 or 503 with `Retry-After`, against a 4xx or 500 that says to stop.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::InFlight { .. } | Self::LeaseLost | Self::Retryable(_) | Self::MigrationLocked { .. } => true,
            Self::Database(error) => is_lost(error),
            _ => false,
        }
    }

    /// Sorts an error of one of this crate's own statements.
    pub(crate) fn of_statement(error: sqlx::Error) -> Self {
        match sqlstate(&error).as_deref() {
            Some("42P01" | "42703" | "42883" | "3F000") => Self::SchemaMissing { source: error },
            _ => error.into(),
        }
    }
}

/// For a `perform` that returns this crate's [`Error`]: 40001 and 40P01 become [`Error::Retryable`], all others
/// [`Error::Database`].
impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        match sqlstate(&error).as_deref() {
            Some("40001" | "40P01") => Self::Retryable(error),
            _ => Self::Database(error),
        }
    }
}

/// Whether there is no connection, or none any more, or the server has no room. A connection that is lost at COMMIT leaves open
/// whether it took effect, and only asking again tells.
fn is_lost(error: &sqlx::Error) -> bool {
    use sqlx::Error::{Io, PoolClosed, PoolTimedOut, Protocol, Tls};
    match error {
        Io(_) | Tls(_) | Protocol(_) | PoolTimedOut | PoolClosed => true,
        // 08: connection exceptions. 53: insufficient resources. 57P: the server shuts down or starts up. 25P03 and 25P04: a
        // time-out has ended the session.
        error => sqlstate(error).is_some_and(|state| {
            ["08", "53", "57P"].iter().any(|class| state.starts_with(class)) || matches!(&*state, "25P03" | "25P04")
        }),
    }
}

pub(crate) fn sqlstate(error: &sqlx::Error) -> Option<String> {
    Some(error.as_database_error()?.code()?.into_owned())
}
