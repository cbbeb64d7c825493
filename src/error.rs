//! The errors of the crate: one variant for each way in which the caller can react.

mod failure;
mod nested;
mod place;
mod setup;
pub(crate) mod sqlstate;
#[cfg(test)]
#[path = "../tests/unit/error/table.rs"]
mod table;
mod unreached;

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::state::{UnknownMode, Version};
use crate::{InvalidBody, InvalidKey, Key, Mode};

pub(crate) use failure::Failure;
pub use nested::{Incompatible, InvalidRequest, InvalidStep, Misuse};
pub(crate) use nested::{MAX_NAME_BYTES, MAX_RESULT_BYTES, MAX_STEPS, MAX_STEPS_BYTES};
pub use setup::{SettleError, SetupError};
pub(crate) use sqlstate::sqlstate;
use sqlstate::{advice, is_lost};

/// An error from another library, kept as the cause.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The reason why an operation was neither performed nor replayed.
///
/// The text of an error contains neither the scope nor the value of a key. [`KeyReused`](Self::KeyReused) and
/// [`OtherMode`](Self::OtherMode) have the key as a field. The `Debug` output of a database error contains the server's
/// detail, which may quote a key. So log the text and the sources, as the guide's page `metrics` shows.
///
/// **An error at COMMIT is ambiguous.** In transaction and mark mode, the effect and its record are stored together or
/// not at all. Under a lease, the effect may have happened although no result is stored. To learn the outcome, make the
/// call again with the same key. Under `AtLeastOnce` and `InSteps`, the second call may perform the operation again.
///
/// # What to do on each
///
/// The column *transient* shows whether the same call may succeed in a moment ([`is_transient`](Self::is_transient)).
/// The column *HTTP* contains the status with which the HTTP layer answers. The 409 for `InFlight` and every 503 have a
/// `Retry-After` header.
///
#[doc = include_str!("error/table.md")]
///
/// # An error of the database, and the place where a call meets it
///
/// The table shows which errors of the database are transient. *Opening* is the wait for a connection of the pool and
/// the BEGIN. *Before the work* are the statements that claim the key. *Completion* is the statement that stores the
/// response. The completion of a lease, and the COMMIT after it, are tried again for the length of the lease.
///
#[doc = include_str!("error/places.md")]
///
/// ¹ Over HTTP, 500 without `Retry-After`: the handler has made the transaction read only, and each retry would run it
/// again.
///
/// ² The outcome is unknown, as described above. A COMMIT that gets one of these errors may have taken effect, for
/// example if a pooler has lost its connection to the server.
///
/// ³ The connection has lost its prepared statements: see the guide's page `poolers`. The crate closes a connection of
/// the pool. On a caller's connection, the crate lets sqlx prepare the statements again. After an error of its own
/// statement, the crate logs an ERROR, before the work and after it.
///
/// ⁴ The pool cannot log in, for example while a password is rotated. A consumer keeps its message. The crate logs an
/// ERROR.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The key was used before for another request, and this call performed nothing. Send the first request again. Use
    /// a new key only for another operation. Under a lease, the first request may have taken effect in part, and a
    /// corrected request under a new key would be a second operation.
    #[error(
        "the key was used before for another request; send that request again, or use a new key for another \
         operation (operation {:?})",
        key.operation()
    )]
    #[non_exhaustive]
    KeyReused {
        /// The key.
        key: Key,
    },

    /// Another caller is performing the same operation. Retry with the same key after `retry_after`. Your own
    /// transaction is still usable. Under [`OnDuplicate::Reject`](crate::OnDuplicate::Reject), a call also gets this
    /// error while a sweep or an operator deletes the expired record of its key.
    #[error("the operation is in flight elsewhere; retry with the same key after {retry_after:?}")]
    #[non_exhaustive]
    InFlight {
        /// The time to wait before the next attempt. If the call has read the live lease of the owner, this time is
        /// the rest of the lease. Otherwise this time is one second: in transaction mode, while a claim of a lease is
        /// not committed yet, and for a duplicate of a request of the same process over HTTP.
        retry_after: Duration,
    },

    /// The operation was claimed and never completed, no live lease shows an owner, and its outcome is unknown. The key
    /// stays indeterminate until an operator or a [`Reconciler`](crate::lease::Reconciler) settles it, or its retention
    /// ends.
    ///
    /// In transaction mode, the cause is one of three mistakes: the caller committed although the call failed,
    /// `perform` sent a COMMIT, or a program in another language called `idempotency.ensure` in autocommit.
    #[error(
        "the operation was claimed at {claimed_at} (attempt {attempt}, token {token}) and never completed{}{}; \
         find out whether it took effect, then resolve or release it",
        last_error.as_deref().map(|error| format!(" ({error})")).unwrap_or_default(),
        if steps.is_empty() { String::new() } else { format!(", and is in doubt at {steps:?}") }
    )]
    #[non_exhaustive]
    Indeterminate {
        /// The number of claims of the operation.
        attempt: u32,
        /// The time of the last claim, by the database's clock.
        claimed_at: DateTime<Utc>,
        /// The error of the latest attempt that reported an error.
        last_error: Option<String>,
        /// The fencing token of the claim.
        token: i64,
        /// The version of the record, for a service that [settles](crate::operator) the operation itself.
        version: Box<Version>,
        /// The names of the [steps in doubt](crate::operator::Shown::step), sorted by their bytes.
        steps: Vec<String>,
    },

    /// This attempt has begun a [`step_at_most_once`](crate::lease::Lease::step_at_most_once), and the outcome of the
    /// step is unknown. Or a [`step`](crate::lease::Lease::step) of this attempt has ended its own transaction. The
    /// step was not performed again. Return this error, so that the operation becomes
    /// [indeterminate](Self::Indeterminate).
    #[error(
        "the step {step:?} was begun in this attempt and may have taken effect; return this error, so that the \
         operation can be settled"
    )]
    #[non_exhaustive]
    StepInDoubt {
        /// The name of the step.
        step: String,
    },

    /// The key or the body of a request was refused. No SQL ran.
    #[error(transparent)]
    InvalidRequest(#[from] InvalidRequest),

    /// The service uses the crate wrongly, or the service's environment lacks something. A retry gets the same error
    /// until a person has corrected the mistake.
    #[error(transparent)]
    Misuse(#[from] Misuse),

    /// The record or the schema comes from another release, was made under other settings, or is not from this crate.
    /// Nothing was performed or replayed.
    #[error(transparent)]
    Incompatible(#[from] Incompatible),

    /// `perform` took longer than the key's retention. Its response would be expired at once, and the next call would
    /// perform the operation again. Nothing was stored. **Roll back.** If a caller of
    /// [`ensure_idempotent`](crate::ensure_idempotent()) commits instead, the effect stays, and the key is new.
    #[error(
        "the transaction took longer than the key's retention, so the response was not stored; make the retention \
         longer"
    )]
    OutlivedRetention,

    /// The key belongs to another mode. Marks, leases and transactions never share a key. A call under `InSteps` also
    /// gets this error for an operation that has begun under `AtLeastOnce`. The guide's page `steps` explains this
    /// case.
    #[error(
        "the key belongs to mode {stored}, and the call is in mode {asked}; give each mode its own operations; before \
         a route changes to steps, let the operations end that began under AtLeastOnce (operation {:?})",
        key.operation()
    )]
    #[non_exhaustive]
    OtherMode {
        /// The key, or one of the keys if the call marked many keys.
        key: Key,
        /// The mode of the record.
        stored: Mode,
        /// The mode of the call.
        asked: Mode,
    },

    /// The stored response, the result of a step or the stored request does not decode into its type. The operation is
    /// not performed again. Let the type decode old values, for example by `#[serde(default)]` or an enum of versions.
    #[error(
        "the stored {} does not decode into its type; keep the type able to read older values",
        step.as_deref().map_or("response or request".to_owned(), |step| format!("result of the step {step:?}"))
    )]
    #[non_exhaustive]
    Undecodable {
        /// The name of the step. `None` if the response or the request does not decode.
        step: Option<String>,
        /// The error of the decoder.
        source: BoxError,
    },

    /// The response cannot be encoded as JSON and decoded again, or its JSON is larger than 256 MiB. Nothing was
    /// stored. Roll back. Instead of a large response, return an id with which the caller reads the rest.
    ///
    /// Examples are a float that is not finite, and a field that the encoder skips and that has no default. **The crate
    /// does not notice a response that decodes as another value**, as in these cases:
    ///
    /// - A `Some` whose value is `null` in JSON is replayed as `None`: `Some(())`, `Some(None)`, `Some(Value::Null)`,
    ///   and `Some` of a float that is not finite.
    /// - A field with `#[serde(skip)]` is replayed as its default.
    /// - An `#[serde(untagged)]` enum is replayed as its first variant that can decode the JSON.
    #[error(
        "the response cannot be stored as JSON and decoded again, so a repeat could not get it; change its type or size"
    )]
    #[non_exhaustive]
    Unencodable {
        /// The error of the encoder or decoder.
        source: BoxError,
    },

    /// The owner has stopped, because the owner has lost its claim. Either the owner could not renew its lease in time,
    /// or another owner has taken the claim over, or the claim was released, resolved or deleted. This call stored
    /// nothing, and its effect may have happened. Make the call again with the same key. Under `AtLeastOnce` and
    /// `InSteps`, the new call performs the operation again, unless another owner performs it. Under `AtMostOnce`, the
    /// key stays indeterminate until an operator or a reconciler settles the operation.
    #[error("the lease was lost, so nothing was stored, and the effect may have happened; ask again with the same key")]
    LeaseLost,

    /// The operation has used up its attempts. All attempts failed or lapsed, so the operation may be a poison message.
    /// The key stays exhausted until its retention ends, or until an operator [permits one more
    /// attempt](crate::operator::Shown::grant), or resolves or forgets the operation.
    #[error("the operation was attempted {attempts} times without completing, which is the limit; set it aside")]
    #[non_exhaustive]
    Exhausted {
        /// The number of attempts.
        attempts: u32,
        /// The error of the latest attempt that reported an error.
        last_error: Option<String>,
        /// The fencing token of the last claim.
        token: i64,
        /// The version of the record, for a service that [settles](crate::operator) the operation itself.
        version: Box<Version>,
    },

    /// The schema is missing or older than this release. Run [`migrate`](crate::migrate()), or ask a DBA to run the SQL
    /// of [`schema_sql`](crate::schema_sql).
    #[error(
        "the schema idempotency is missing or too old; run pg_idempotency::migrate or `idempotency-janitor migrate`"
    )]
    #[non_exhaustive]
    SchemaMissing {
        /// The server's error, or the name of the missing migration or schema. The server's error is about a missing
        /// table, column, function or schema (SQLSTATE 42P01, 42703, 42883 or 3F000).
        source: BoxError,
    },

    /// The database did not answer within the crate's time limit, or the runtime ended during the call. The connection
    /// is closed, and **the outcome is unknown**: make the call again with the same key.
    #[error("the database did not answer in time, and the outcome is unknown; ask again with the same key")]
    Unanswered,

    /// A serialization failure (SQLSTATE 40001) or a deadlock (40P01). Nothing was stored, and the transaction is
    /// aborted. Retry the whole transaction.
    #[error("the transaction lost against a concurrent one; retry the whole transaction")]
    Retryable(#[source] sqlx::Error),

    /// Any other error of the database or the connection.
    #[error("the database failed{}", advice(.0))]
    Database(#[source] sqlx::Error),
}

impl Error {
    /// Whether the same call, repeated unchanged after a moment, may succeed. The causes of such an error are:
    ///
    /// - another caller of the same operation, a lost lease, a serialization failure, or a deadlock;
    /// - a connection that broke or was not available, or a database that did not answer in time;
    /// - a server that restarts, has no free connection, or is no longer the primary;
    /// - a time-out of the server, such as `statement_timeout` or `lock_timeout`.
    ///
    /// Over HTTP, answer such an error with a 409 or 503 and `Retry-After`.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::InFlight { .. } | Self::LeaseLost | Self::Retryable(_) | Self::Unanswered => true,
            Self::Database(error) => is_lost(error),
            _ => false,
        }
    }
}

/// An error of the crate, or an error of a function that contains such an error.
pub(crate) trait MayContainError: From<Error> {
    fn contained(&self) -> Option<&Error>;
}

impl MayContainError for Error {
    fn contained(&self) -> Option<&Error> {
        Some(self)
    }
}

impl Misuse {
    pub(crate) fn options(problem: &str) -> Error {
        Self::Options { problem: problem.to_owned() }.into()
    }
}

impl From<UnknownMode> for Error {
    fn from(UnknownMode(mode): UnknownMode) -> Self {
        Incompatible::UnknownMode { mode }.into()
    }
}

impl From<InvalidKey> for Error {
    fn from(error: InvalidKey) -> Self {
        InvalidRequest::from(error).into()
    }
}

impl From<InvalidBody> for Error {
    fn from(error: InvalidBody) -> Self {
        InvalidRequest::from(error).into()
    }
}
