//! Callers, or servers, with one broken part. They prove that the faults of this suite happen and are seen: if a
//! scenario misses a broken variant, it would also miss the mistake in the crate. `script/interleave --mutants` tries
//! each condition of the crate's own SQL. Calls in transaction mode are plain SQL (`plain_sql.rs`).
//! Leases, steps and handlers over HTTP use the crate wrongly.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub(crate) enum Mutant {
    /// Is not broken. It shows that the others fail because of their broken part.
    PlainSql,
    /// Lease mode: an owner that has lost its lease takes its result for stored.
    LossIgnored,
    /// The claim commits before the effect.
    AutocommitClaim,
    /// Ignores the errors of `perform` and of the completion.
    ErrorsSwallowed,
    /// A service does not start on a schema with migrations that it does not know.
    NewerSchemaRefused,
    /// Lease mode: takes over a lapsed claim also at most once.
    TakesOverAtMostOnce,
    /// Reconcilers: the first probe without a trace releases the key.
    OneProbeSuffices,
    /// Reconcilers: the quiet time counts from the claim.
    QuietFromClaim,
    /// Reconcilers: a release permits one more attempt.
    NoTraceGrants,
    /// Lease mode: stores the result before the effect happens.
    CompletesFirst,
    /// Steps: a task of its own writes the row, and no step.
    RowOutside,
    /// Steps: sends the text at least once.
    BegunNotWritten,
    /// Steps: the mark of an at-most-once step is committed, but not yet on disk when the step is performed.
    BegunNotDurable,
    /// Takes a COMMIT without an answer for a failed one, and repeats the operation under another claim.
    LostAnswerIsFailure,
    /// Commits are acknowledged before they are on disk.
    SynchronousCommitOff,
    /// sqlx's own `begin` where a future can be dropped.
    PlainBegin,
    /// Over HTTP: the handler writes through the pool, and not in the layer's transaction.
    WritesApart,
    /// Over HTTP: the handler answers the client itself, before the layer commits.
    AnswersBeforeCommit,
    /// Two services in one database: their operations have no name of the service.
    OneOperation,
    /// The SQL functions: the effect happens whatever `ensure` answers.
    EffectBeforeAnswer,
    /// The SQL functions: `complete` is called in a transaction of its own.
    CompletesApart,
}

impl Mutant {
    /// Whether the calls are the crate's, and a handler behind the layer or a caller of the SQL functions is broken.
    pub(crate) fn is_a_caller(self) -> bool {
        matches!(
            self,
            Self::WritesApart
                | Self::AnswersBeforeCommit
                | Self::EffectBeforeAnswer
                | Self::CompletesApart
                | Self::OneOperation
        )
    }

    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}
