//! The variants of the protocol, each with one part broken: what a scenario does not catch here, it would not catch in
//! the crate. Transaction mode is in [`plain_sql`](crate::plain_sql), lease mode in
//! [`broken_lease`](crate::broken_lease), and operations in steps in [`broken_steps`](crate::broken_steps).

use std::str::FromStr;

use anyhow::Context as _;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// Not broken: it shows that the others fail for what is broken in them.
    PlainSql,
    /// Looks first and inserts then, with no unique key in the way.
    NoConflictTarget,
    /// Lease mode: the result is stored by the key alone.
    CompletionWithoutToken,
    /// The sweep deletes by a list of keys, and does not look again.
    JanitorByKey,
    /// Claim and effect commit, and no response.
    NoCompletion,
    /// The claim commits before the effect.
    AutocommitClaim,
    /// The effect commits before the claim.
    EffectOutside,
    /// What `perform` or the completion is told by the database is not looked at.
    ErrorsSwallowed,
    /// The completion does not ask whose transaction it is in.
    UnfencedCompletion,
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
    /// Steps: the statements of a step find the record by the key alone.
    StepWithoutFence,
    /// Steps: a result is stored also if there is one.
    StepStoredAgain,
    /// Steps: nothing is stored before an at-most-once step.
    BegunNotWritten,
    /// Steps: the mark of an at-most-once step is committed, and not yet on disk when the step is performed.
    BegunNotDurable,
    /// Steps: the client writes the document with all steps, as it was when the step began.
    StepsByTheClient,
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
    (NoConflictTarget, "no-conflict-target"),
    (CompletionWithoutToken, "completion-without-token"),
    (JanitorByKey, "janitor-by-key"),
    (NoCompletion, "no-completion"),
    (AutocommitClaim, "autocommit-claim"),
    (EffectOutside, "effect-outside"),
    (ErrorsSwallowed, "errors-swallowed"),
    (UnfencedCompletion, "unfenced-completion"),
    (UnfinishedIsFree, "unfinished-is-free"),
    (ImpatientClaim, "impatient-claim"),
    (ConflictsIgnored, "conflicts-ignored"),
    (SessionLock, "session-lock"),
    (NewerIsRead, "newer-is-read"),
    (NewerSchemaRefused, "newer-schema-refused"),
    (TakesOverAtMostOnce, "takes-over-at-most-once"),
    (CompletesFirst, "completes-first"),
    (StepWithoutFence, "step-without-fence"),
    (StepStoredAgain, "step-stored-again"),
    (BegunNotWritten, "begun-not-written"),
    (BegunNotDurable, "begun-not-durable"),
    (StepsByTheClient, "steps-by-the-client"),
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
        matches!(self, StepWithoutFence | BegunNotWritten | BegunNotDurable | StepsByTheClient)
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
