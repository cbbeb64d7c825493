//! The errors below a variant of `Error`. A caller reacts to all of them in the same way, and the log shows their text.

use crate::{InvalidBody, InvalidKey};

/// Why a request cannot be made idempotent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRequest {
    /// A part of the key is not valid. No call of the crate returns this, because each takes a valid [`Key`](crate::Key).
    /// Use it in a function of yours that makes a key and returns this crate's error.
    #[error(transparent)]
    Key(#[from] InvalidKey),

    /// The body has no fingerprint.
    #[error("the request body has no fingerprint")]
    Body(#[from] InvalidBody),
}

/// How a service uses the crate wrongly, or runs in an environment where the crate cannot work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Misuse {
    /// The options contradict each other or do not fit this call, or a duration is out of range. No SQL ran.
    #[error("the options do not allow this: {problem}")]
    #[non_exhaustive]
    Options {
        /// What is wrong, and what to do.
        problem: String,
    },

    /// The step was refused, and not stored. If the problem is [`TooLarge`](InvalidStep::TooLarge) for a result, the
    /// effect of a step outside the database may have happened.
    #[error("the step {step:?} was refused: {problem}")]
    #[non_exhaustive]
    Step {
        /// The name of the step.
        step: String,
        /// The reason.
        problem: InvalidStep,
    },

    /// A batch of marks has more than 100 different keys. No SQL ran.
    #[error("the batch has {keys} different keys, and the limit is 100; divide it, and commit after each part")]
    #[non_exhaustive]
    TooManyKeys {
        /// How many different keys the batch has.
        keys: usize,
    },

    /// The same transaction has claimed this key and not completed it. Either `perform` has made a call with the same
    /// key, or the caller went on after an earlier call had failed. Roll back.
    #[error("this transaction has claimed the key before without completing it; roll back and start over")]
    AlreadyInTransaction,

    /// The transaction was aborted before the end of a call, or before [`commit`](crate::commit()): an earlier
    /// statement had failed, and the code ignored its error. Nothing was saved: acknowledge nothing. Roll back, unless
    /// the call was isolated, which has undone its own part.
    #[error(
        "the transaction was aborted by an earlier error, so nothing was saved; do not ignore errors of its statements"
    )]
    TransactionAborted(#[source] sqlx::Error),

    /// The connection is not in the transaction that the call needs.
    ///
    /// - A mark, or a call with a connection, was made outside a transaction that sqlx has begun. Nothing was done.
    ///   Begin one with `conn.begin()`, or use [`Idempotency::run`](crate::Idempotency::run) with a pool.
    /// - `perform` has ended the transaction that holds the claim, by a COMMIT, a ROLLBACK, or a nested `conn.begin()`
    ///   that failed or whose future was dropped while it waited. The response was not stored, and nothing was
    ///   acknowledged. **Later writes of `perform` stay.**
    /// - The transaction that [`commit`](crate::commit()) got had ended in one of these ways.
    #[error(
        "the connection is not in the transaction that the call needs, so nothing was stored; begin a transaction \
         before the call, and do not commit, roll back or drop a pending begin inside `perform`"
    )]
    NotInTransaction,

    /// A nested transaction was still open at the end of the transaction around it: its guard was forgotten
    /// (`std::mem::forget`, a leak), or [`commit`](crate::commit()) got the nested transaction. sqlx would have
    /// released a savepoint instead of sending COMMIT. No response was stored, and nothing was acknowledged.
    ///
    /// - `perform` forgot it in the caller's transaction: the nested writes are undone. Roll back. After an isolated
    ///   call, the key is released, and the transaction is usable.
    /// - `perform`, a handler or a step forgot it in a transaction of the crate: everything was rolled back.
    /// - [`commit`](crate::commit()) got it: everything was rolled back, **also the transactions around it**.
    #[error(
        "a nested transaction was still open, so no response was stored; roll back the transaction around it, end each \
         nested transaction by its own commit or rollback, and pass only the outermost one to `commit`"
    )]
    NestedTransaction,

    /// Citus distributes the table, and the [`Deployment`](crate::Deployment::distributed) of the call does not say so.
    /// Either nothing was performed, or the transaction must be rolled back.
    #[error(
        "the deployment does not fit the table idempotency.record; \
         if Citus distributes it, set Deployment::distributed(true)"
    )]
    #[non_exhaustive]
    WrongDeployment {
        /// The server's error (SQLSTATE 0A000).
        source: sqlx::Error,
    },

    /// The operating system has no random number for the token of a claim. Nothing was performed.
    #[error("the operating system has no random numbers, so nothing was claimed")]
    #[non_exhaustive]
    NoRandomness {
        /// The error of the operating system.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A record or a schema that this release cannot use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Incompatible {
    /// The fingerprint of the record has a version that this call cannot compare with its own. Nothing was performed. A
    /// newer release may be rolled out at the moment: send the request there, or retry later. Until the key expires,
    /// other causes are a change of the settings that decide which requests are the same, and an operation that some
    /// calls compare as [bytes](crate::Fingerprint::of_bytes) and others as JSON.
    #[error(
        "the record's fingerprint has version {version} and cannot be compared with this request's: a newer release \
         made it, or the settings that decide which requests are the same have changed"
    )]
    #[non_exhaustive]
    UnknownFingerprint {
        /// The stored fingerprint's version byte.
        version: u8,
    },

    /// The record is in a mode that this release does not know. Nothing was performed or replayed. A newer release may
    /// be rolled out at the moment: send the request there, or retry later.
    #[error("the record's mode is {mode:?}, which this release does not know; upgrade this process")]
    #[non_exhaustive]
    UnknownMode {
        /// The mode in the record.
        mode: String,
    },

    /// The schema [cannot be trusted](crate::operator::Warning::UntrustedSchema), or an applied migration is not this
    /// release's. Nothing was changed.
    #[error("the schema idempotency cannot be set up or used in this database: {problem}")]
    #[non_exhaustive]
    Schema {
        /// What is wrong, and what to do.
        problem: String,
    },
}

pub(crate) const MAX_NAME_BYTES: usize = 255;
/// Each completion of a step writes all results again, so a larger operation needs a table of its own.
pub(crate) const MAX_STEPS: usize = 100;
pub(crate) const MAX_RESULT_BYTES: usize = 64 * 1024;
pub(crate) const MAX_STEPS_BYTES: usize = 256 * 1024;

/// Why a step was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidStep {
    /// The name is empty, too long, or contains a NUL.
    #[error("a name takes 1 to {MAX_NAME_BYTES} bytes without NUL")]
    Name,
    /// This attempt has called the step before. It has its result, or still performs it.
    #[error("this attempt has called it before; names are unique, so put the index of a loop into the name")]
    Repeated,
    /// The step was called inside another step of the same operation.
    #[error("it was called inside another step of the same operation; perform one after the other")]
    Nested,
    /// The operation has another policy.
    #[error("the policy of the operation is not Policy::InSteps, so the step would not be stored")]
    Policy,
    /// Too many steps, or too large a result.
    #[error(
        "an operation takes {MAX_STEPS} steps, a result {MAX_RESULT_BYTES} bytes, and all results \
         {MAX_STEPS_BYTES} bytes; store large values in a table of your own, and return their key"
    )]
    TooLarge,
}
