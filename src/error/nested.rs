//! The errors that a variant of `Error` contains. A caller reacts to all errors of one variant in the same way, and the
//! log shows their text.

use crate::{InvalidBody, InvalidKey};

/// The reason why a request cannot be made idempotent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRequest {
    /// A part of the key is not valid. No call of the crate returns this variant, because each call takes a valid
    /// [`Key`](crate::Key). The variant is for a function of your own that makes a key and returns this crate's error.
    #[error(transparent)]
    Key(#[from] InvalidKey),

    /// The body has no fingerprint.
    #[error("the request body has no fingerprint")]
    Body(#[from] InvalidBody),
}

/// A wrong use of the crate by a service, or an environment in which the crate cannot work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Misuse {
    /// The options contradict each other or do not fit this call, or a duration is out of range. No SQL ran.
    #[error("the options do not allow this: {problem}")]
    #[non_exhaustive]
    Options {
        /// A description of the problem and of the remedy.
        problem: String,
    },

    /// The step was refused and was not stored. If a result is [`TooLarge`](InvalidStep::TooLarge), the step may have
    /// had its effect outside the database.
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
        /// The number of different keys in the batch.
        keys: usize,
    },

    /// This transaction has already claimed the key, and has not completed the claim. Either `perform` has made a call
    /// with the same key, or the caller continued after an earlier call had failed. Roll back.
    #[error("this transaction has claimed the key before without completing it; roll back and start over")]
    AlreadyInTransaction,

    /// The transaction was aborted before the end of a call, or before [`commit`](crate::commit()), because an earlier
    /// statement had failed and the code ignored the error. Nothing was saved, so acknowledge nothing. Roll back. After
    /// an isolated call, no rollback is necessary, because the call has undone its own part.
    #[error(
        "the transaction was aborted by an earlier error, so nothing was saved; do not ignore errors of its statements"
    )]
    TransactionAborted(#[source] sqlx::Error),

    /// The connection is not in the transaction that the call needs.
    ///
    /// - A mark, or a call with a connection, was made outside a transaction that sqlx has begun. Nothing was done.
    ///   Begin a transaction with `conn.begin()`, or use [`Idempotency::run`](crate::Idempotency::run) with a pool.
    /// - `perform` has ended the claim. The cause is a COMMIT, a ROLLBACK, a ROLLBACK TO a savepoint that is older than
    ///   the call, or a nested `conn.begin()` that failed or was dropped before its end. The response was not stored,
    ///   and nothing was acknowledged. **Writes that `perform` committed, or made after the end of the claim, can
    ///   stay.** A [step](crate::lease::Lease::step) is in doubt then.
    /// - [`commit`](crate::commit()) got a transaction that had already ended, by a COMMIT, a ROLLBACK or such a nested
    ///   `begin`.
    #[error(
        "the connection is not in the transaction that the call needs, so no response was stored; begin a transaction \
         before the call, and do not commit, roll back or drop a pending begin inside `perform`, whose writes may stay"
    )]
    NotInTransaction,

    /// A nested transaction was still open at the end of the transaction around it. Either the guard of the nested
    /// transaction was forgotten (`std::mem::forget`, a leak), or [`commit`](crate::commit()) got the nested
    /// transaction. While a nested transaction is open, sqlx's commit releases a savepoint, and sends no COMMIT. No
    /// response was stored, and nothing was acknowledged.
    ///
    /// - If `perform` forgot the guard in the caller's transaction, the nested writes are undone. Roll back. If the
    ///   call was isolated, the key is released, and the transaction is usable.
    /// - If `perform`, a handler or a step forgot the guard in a transaction of the crate, everything was rolled back.
    /// - If [`commit`](crate::commit()) got the nested transaction, everything was rolled back, **also the transactions
    ///   around it**.
    #[error(
        "a nested transaction was still open, so no response was stored; roll back the transaction around it, end each \
         nested transaction by its own commit or rollback, and pass only the outermost one to `commit`"
    )]
    NestedTransaction,

    /// The key is free, but the database has twice stored no claim of this call, or hides the record of the key from
    /// this role. Nothing was performed. The cause is a BEFORE trigger that returns null, or a policy of row level
    /// security, on `idempotency.record`. [`health`](crate::operator::health()) names both. An AFTER trigger is never
    /// the cause.
    #[error(
        "the key is free, but the database stores no record for it, or hides its record from this role; look for a \
         BEFORE trigger that returns null, or a policy of row level security, on idempotency.record, which \
         `idempotency-janitor health` names"
    )]
    ClaimSwallowed,

    /// The operating system returned no random number for the token of a claim. Nothing was performed.
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
    /// This call cannot compare the fingerprint of the record with the fingerprint of its own request. Nothing was
    /// performed. During the roll-out of a newer release, send the request to a process of that release, or retry
    /// later. There are two other causes: the settings that decide which requests are the same have changed, or some
    /// calls compare the operation as [bytes](crate::Fingerprint::of_bytes) and others as JSON. In these cases, a retry
    /// gets this error until the key expires.
    #[error(
        "the record's fingerprint has version {version} and cannot be compared with this request's: a newer release \
         made it, or the settings that decide which requests are the same have changed"
    )]
    #[non_exhaustive]
    UnknownFingerprint {
        /// The stored fingerprint's version byte.
        version: u8,
    },

    /// The record is in a mode that this release does not know. Nothing was performed or replayed. During the roll-out
    /// of a newer release, send the request to a process of that release, or retry later.
    #[error("the record's mode is {mode:?}, which this release does not know; upgrade this process")]
    #[non_exhaustive]
    UnknownMode {
        /// The mode in the record.
        mode: String,
    },

    /// The schema [cannot be trusted](crate::operator::Warning::UntrustedSchema), or an applied migration differs from
    /// the same migration in this release. Nothing was changed.
    #[error("the schema idempotency cannot be set up or used in this database: {problem}")]
    #[non_exhaustive]
    Schema {
        /// A description of the problem and of the remedy.
        problem: String,
    },
}

pub(crate) const MAX_NAME_BYTES: usize = 255;
/// Each completion of a step writes all results again, so an operation with more steps must store its progress in a
/// table of the service.
pub(crate) const MAX_STEPS: usize = 100;
pub(crate) const MAX_RESULT_BYTES: usize = 64 * 1024;
pub(crate) const MAX_STEPS_BYTES: usize = 256 * 1024;

/// The reason why a step was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidStep {
    /// The name is empty, too long, or contains a NUL.
    #[error("a name takes 1 to {MAX_NAME_BYTES} bytes without NUL")]
    Name,
    /// This attempt has called the step before. Either the attempt already has the result of the step, or the step is
    /// still running.
    #[error("this attempt has called it before; names are unique, so put the index of a loop into the name")]
    Repeated,
    /// The step was called inside another step of the same operation.
    #[error("it was called inside another step of the same operation; perform one after the other")]
    Nested,
    /// The policy of the operation is not `InSteps`.
    #[error("the policy of the operation is not Policy::InSteps, so the step would not be stored")]
    Policy,
    /// The operation has too many steps, or a result is too large.
    #[error(
        "an operation takes {MAX_STEPS} steps, a result {MAX_RESULT_BYTES} bytes, and all results \
         {MAX_STEPS_BYTES} bytes; store large values in a table of your own, and return their key"
    )]
    TooLarge,
}
