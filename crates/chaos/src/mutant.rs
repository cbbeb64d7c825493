//! Callers, or servers, with one part broken: what a scenario does not catch here, it would not catch in the crate. They
//! prove that the faults of this suite happen and are seen. `script/interleave --mutants` tries each condition of the
//! crate's own SQL. Calls in transaction mode are plain SQL ([`plain_sql`](crate::plain_sql)). Leases and steps are the
//! crate's, used wrongly.

use std::str::FromStr;

use anyhow::Context as _;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// Not broken: it shows that the others fail for what is broken in them.
    PlainSql,
    /// Lease mode: an owner that has lost its lease takes its result for stored.
    LossIgnored,
    /// The sweep deletes by a list of keys, and does not look again.
    JanitorByKey,
    /// The claim commits before the effect.
    AutocommitClaim,
    /// The effect commits before the claim.
    EffectOutside,
    /// What `perform` or the completion is told by the database is not looked at.
    ErrorsSwallowed,
    /// A claim without a response is taken for one that failed, and for free.
    UnfinishedIsFree,
    /// Who has waited a little for the owner performs without a claim.
    ImpatientClaim,
    /// A deadlock or a serialization failure is taken for a claim that was won.
    ConflictsIgnored,
    /// An advisory lock of the session's, where the unique key should be.
    SessionLock,
    /// What a newer release has written is read like one's own.
    NewerIsRead,
    /// A service does not start on a schema with migrations that it does not know.
    NewerSchemaRefused,
    /// Lease mode: lapsed is lapsed, also at most once.
    TakesOverAtMostOnce,
    /// Lease mode: the result is stored first, and the effect comes after it.
    CompletesFirst,
    /// Steps: the row is written by a task of its own, and not by a step.
    RowOutside,
    /// Steps: the messages are sent at least once.
    BegunNotWritten,
    /// Steps: the mark of an at-most-once step is committed, and not yet on disk when the step is performed.
    BegunNotDurable,
    /// Steps: an operator finds out about one step in doubt, and their release forgets all.
    SettlesAllInDoubt,
    /// A COMMIT without an answer is taken for one that failed, and the operation repeated under another claim.
    LostAnswerIsFailure,
    /// Commits are acknowledged before they are on disk.
    SynchronousCommitOff,
    /// The records are in an unlogged table, and the effects are not.
    UnloggedRecord,
    /// sqlx's own `begin` where a future can be dropped.
    PlainBegin,
    /// The crate, with a wait that keeps the lock of a key that has a record.
    AwaitKeepsLock,
}

use Mutant::*;

const NAMES: &[(Mutant, &str)] = &[
    (PlainSql, "plain-sql"),
    (LossIgnored, "loss-ignored"),
    (JanitorByKey, "janitor-by-key"),
    (AutocommitClaim, "autocommit-claim"),
    (EffectOutside, "effect-outside"),
    (ErrorsSwallowed, "errors-swallowed"),
    (UnfinishedIsFree, "unfinished-is-free"),
    (ImpatientClaim, "impatient-claim"),
    (ConflictsIgnored, "conflicts-ignored"),
    (SessionLock, "session-lock"),
    (NewerIsRead, "newer-is-read"),
    (NewerSchemaRefused, "newer-schema-refused"),
    (TakesOverAtMostOnce, "takes-over-at-most-once"),
    (CompletesFirst, "completes-first"),
    (RowOutside, "row-outside"),
    (BegunNotWritten, "begun-not-written"),
    (BegunNotDurable, "begun-not-durable"),
    (SettlesAllInDoubt, "settles-all-in-doubt"),
    (LostAnswerIsFailure, "lost-answer-is-failure"),
    (SynchronousCommitOff, "synchronous-commit-off"),
    (UnloggedRecord, "unlogged-record"),
    (PlainBegin, "plain-begin"),
    (AwaitKeepsLock, "await-keeps-lock"),
];

impl Mutant {
    /// Whether it is the crate that calls, and only a function of the schema is broken.
    pub(crate) fn is_of_the_schema(self) -> bool {
        self == AwaitKeepsLock
    }

    /// Steps: whether nothing but the fault of its scenario may reveal it, and so nothing else goes wrong in an attempt.
    pub(crate) fn needs_the_fault(self) -> bool {
        matches!(self, RowOutside | BegunNotWritten | BegunNotDurable)
    }

    pub(crate) fn name(self) -> &'static str {
        NAMES.iter().find(|(mutant, _)| *mutant == self).map_or("?", |(_, name)| name)
    }
}

impl FromStr for Mutant {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Self> {
        let found = NAMES.iter().find(|(_, known)| *known == name);
        found.map(|(mutant, _)| *mutant).with_context(|| format!("there is no mutant {name:?}; --list shows them"))
    }
}
