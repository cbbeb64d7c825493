//! The classic mistakes of a hand-made idempotency middleware.

/// Each switch makes one mistake, and leaves the rest of the server right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mistake {
    /// The payment commits on its own, and the key is claimed afterwards.
    EffectBeforeClaim,
    /// The transaction of the payment commits, and the key is stored afterwards.
    KeyAfterCommit,
    /// The key commits with the payment, and the answer is stored afterwards. A retry that finds no answer is told of
    /// success, and not of the payment.
    AnswerAfterCommit,
    /// The lock and the answer are in a store with expiry outside the database, as Redis is.
    LockElsewhere,
    /// The response is stored as `jsonb`, which normalises it.
    JsonbResponse,
    /// A failure is stored under the key as its answer.
    FailureStored,
    /// The key does not contain the user.
    KeyWithoutScope,
    /// The claim commits before the payment, and nothing ever takes it over.
    ProcessingForever,
    /// Another body under the same key gets the answer of the first.
    BodyNotCompared,
    /// The payment is written through the pool, and so outside the transaction of the key.
    WriteThroughPool,
    /// A duplicate is answered from memory, where the answer is put before it is committed.
    UncommittedAnswer,
    /// A middleware commits after the answer was sent.
    AnswerBeforeCommit,
    /// Each duplicate enqueues a job, which pays again after some seconds.
    DuplicateEnqueued,
    /// What breaks a body off counts as its end, and a request outlives its client.
    BrokenBodyPerformed,
    /// A request outlives its client from the moment at which its body ends. For hyper, a reset with NO_ERROR is an
    /// end, and only its next poll drops the request.
    DetachedAtOnce,
}

impl Mistake {
    pub(crate) const ALL: [Self; 15] = [
        Self::EffectBeforeClaim,
        Self::KeyAfterCommit,
        Self::AnswerAfterCommit,
        Self::LockElsewhere,
        Self::JsonbResponse,
        Self::FailureStored,
        Self::KeyWithoutScope,
        Self::ProcessingForever,
        Self::BodyNotCompared,
        Self::WriteThroughPool,
        Self::UncommittedAnswer,
        Self::AnswerBeforeCommit,
        Self::DuplicateEnqueued,
        Self::BrokenBodyPerformed,
        Self::DetachedAtOnce,
    ];

    /// `none` is the server without a mistake.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let found = Self::ALL.into_iter().find(|mistake| mistake.name() == name);
        assert!(found.is_some() || name == "none", "no mistake is called {name}");
        found
    }

    pub(crate) fn name(self) -> String {
        format!("{self:?}")
    }
}
