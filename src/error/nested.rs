//! The errors that no caller tells apart: the log shows their text.

use super::problem::InvalidStep;
use crate::{InvalidBody, InvalidKey};

/// Why a request cannot be made idempotent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRequest {
    /// A part of the key is not valid. The crate's calls take a valid [`Key`](crate::Key), so this variant is for
    /// functions that make a key and return this error.
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
    /// The options contradict each other, or do not fit this call, or a duration is out of range. No SQL ran.
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

    /// The same transaction has claimed this key and not completed it: `perform` has made a call with the same key, or
    /// the caller went on after an earlier call had failed. Roll back.
    #[error("this transaction has claimed the key before without completing it; roll back and start over")]
    AlreadyInTransaction,

    /// The end of a call, or [`commit`](crate::commit()), met an aborted transaction: an earlier statement had failed,
    /// and the code ignored its error. Nothing was saved, and the transaction can only be rolled back; an isolated call
    /// has undone its own part. Acknowledge nothing.
    #[error(
        "the transaction was aborted by an earlier error, so nothing was saved; do not ignore errors of its statements"
    )]
    TransactionAborted(#[source] sqlx::Error),

    /// The connection is not in the transaction that the call needs.
    ///
    /// - A mark or a call with a connection was made while the connection was in no transaction that sqlx has begun.
    ///   Begin one with `conn.begin()`, or use [`Idempotency::run`](crate::Idempotency::run), which takes a pool.
    ///   Nothing was done.
    /// - `perform` has ended the transaction that holds the claim, with a COMMIT, a ROLLBACK, or a nested
    ///   `conn.begin()` that failed, or whose future was dropped while it waited. The response was not stored, and
    ///   nothing was acknowledged. **Later writes of `perform` stay.**
    /// - [`commit`](crate::commit()) met a transaction that had ended in one of these ways.
    #[error(
        "the connection is not in the transaction that the call needs, so nothing was stored; begin a transaction \
         before the call, and do not commit, roll back or drop a pending begin inside `perform`"
    )]
    NotInTransaction,

    /// A nested transaction was still open where the transaction around it had to end: its guard was forgotten
    /// (`std::mem::forget`, a leak), or [`commit`](crate::commit()) got the nested transaction itself. sqlx would have
    /// released a savepoint in place of the COMMIT. No response was stored, and nothing was acknowledged.
    ///
    /// - `perform` has forgotten it in the caller's transaction: the nested writes are undone. Roll back. After an
    ///   isolated call, the key is released, and the transaction is usable.
    /// - `perform`, a handler or a step has forgotten it in a transaction of the crate: everything was rolled back.
    /// - [`commit`](crate::commit()): everything was rolled back, **also the transactions around the nested one**.
    #[error(
        "a nested transaction was still open, so no response was stored; roll back the transaction around it, end each \
         nested transaction by its own commit or rollback, and give `commit` only the outermost one"
    )]
    NestedTransaction,

    /// Citus distributes the table, and the [`Deployment`](crate::Deployment::distributed) of the call does not
    /// say so. Nothing was performed, or the transaction with what was performed must be rolled back.
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

/// What this release cannot read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Incompatible {
    /// The fingerprint of the record has a version that this call cannot compare with its own. Nothing was performed.
    /// This happens while a newer release is being rolled out: send the request there, or retry later. It also happens,
    /// until the key expires, if the settings that decide which requests are the same have changed, or if one call
    /// compares [bytes](crate::Fingerprint::of_bytes) and the other one JSON.
    #[error(
        "the record's fingerprint has version {version} and cannot be compared with this request's: a newer release \
         made it, or the settings that decide which requests are the same have changed"
    )]
    #[non_exhaustive]
    UnknownFingerprint {
        /// The stored fingerprint's version byte.
        version: u8,
    },

    /// The record is in a mode that this release does not know. Nothing was performed or replayed. This happens while a
    /// newer release is being rolled out: send the request there, or retry later.
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
