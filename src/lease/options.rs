//! The options of lease mode, and the policy, which only the service can choose.

use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::limits::{DEFAULT_RETENTION, RETENTION, assert_retention, assert_wait, check_wait, in_range, is_in};
use crate::{Error, Misuse, Mode, OnDuplicate};

/// The permitted lengths of a lease. 10 ms is short enough for tests. A lease of more than 12 hours is probably meant
/// as a retention.
const LEASE: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(12 * 60 * 60);
/// The default of `resume_after` is a minute, which is longer than the pauses between the retries of most clients.
const RESUME_AFTER: Duration = Duration::from_secs(60);
/// The permitted values of `resume_after`. After a day, an operation with the default retention is forgotten.
const RESUMES: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(24 * 60 * 60);

/// What the next caller does when the owner of a claim is gone. There is no default policy. The guide's page `promises`
/// helps you to choose a policy.
///
/// `lease` is the time for which a claim lasts without a renewal. After a crash, the next callers get
/// [`InFlight`](crate::Error::InFlight) for one lease at most. A lease is between 10 ms and 12 hours long, and usually
/// 40 s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The next caller does the work again. Use this policy for effects that may repeat, or that the other service
    /// deduplicates.
    AtLeastOnce {
        /// The length of the lease.
        lease: Duration,
    },
    /// The next caller continues after the last stored [step](super::Lease::step). Work outside a step may repeat. A
    /// [`step_at_most_once`](super::Lease::step_at_most_once) in doubt blocks the operation until an operator or a
    /// [`Reconciler`](super::Reconciler) settles the step, or until the retention ends.
    ///
    /// This policy does not continue an operation that has begun under `AtLeastOnce`: see the guide's page `steps`.
    InSteps {
        /// The length of the lease.
        lease: Duration,
    },
    /// The work is not done again until an operator or a [`Reconciler`](super::Reconciler) settles the key, or the
    /// retention of the key ends. Use this policy for effects that must not repeat.
    AtMostOnce {
        /// The length of the lease.
        lease: Duration,
    },
}

impl Policy {
    pub(crate) const fn lease(self) -> Duration {
        match self {
            Self::AtLeastOnce { lease } | Self::InSteps { lease } | Self::AtMostOnce { lease } => lease,
        }
    }

    pub(crate) const fn mode(self) -> Mode {
        match self {
            Self::AtLeastOnce { .. } => Mode::AtLeastOnce,
            Self::InSteps { .. } => Mode::InSteps,
            Self::AtMostOnce { .. } => Mode::AtMostOnce,
        }
    }
}

/// The options of lease mode. The setters are `const`, so the options can be a constant of your service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseOptions {
    pub(super) policy: Policy,
    pub(super) retention: Duration,
    pub(super) max_attempts: Option<NonZeroU32>,
    on_duplicate: OnDuplicate,
    pub(crate) persistent: bool,
    pub(super) stored_request: bool,
    pub(super) resume_after: Duration,
}

impl LeaseOptions {
    /// Creates options with a retention of 24 hours, unlimited attempts, and no waiting.
    ///
    /// # Panics
    ///
    /// Panics if the lease is shorter than 10 ms or longer than 12 hours. In a constant, this is a compile error.
    #[must_use]
    #[track_caller]
    pub const fn new(policy: Policy) -> Self {
        assert!(is_in(&LEASE, policy.lease()), "a lease must be between 10 ms and 12 hours");
        Self {
            policy,
            retention: DEFAULT_RETENTION,
            max_attempts: None,
            on_duplicate: OnDuplicate::Reject,
            persistent: true,
            stored_request: false,
            resume_after: RESUME_AFTER,
        }
    }

    #[cfg(feature = "http")]
    pub(crate) fn stores_requests(&self) -> bool {
        self.stored_request
    }

    #[cfg(feature = "http")]
    pub(crate) fn mode(&self) -> Mode {
        self.policy.mode()
    }

    /// Sets the retention, which is the time for which a key is remembered. The default is 24 hours. After the
    /// retention, a call with the key is a new operation. The retention starts anew:
    ///
    /// - at the completion;
    /// - at the beginning of a `step_at_most_once`, because a crash may leave the step in doubt;
    /// - at a failure under `AtMostOnce` or with a step in doubt, because the effect of the failed attempt is unknown;
    /// - at each probe of a reconciler.
    ///
    /// Until one of these events, the retention counts from the claim. The renewals of a live owner prolong the
    /// retention. If the process dies after the end of the original retention, the key is remembered for one lease
    /// after the lapse. **After that, a retry does the work again, also under `AtMostOnce`.** So the retention must be
    /// longer than the work and the time to settle the key.
    ///
    /// The retention must be at least twice the lease, because a claim must not be forgotten while it is renewed. A
    /// call with a shorter retention returns [`Misuse`] before any SQL runs.
    ///
    /// # Panics
    ///
    /// Panics if the retention is shorter than a millisecond or longer than ten years.
    #[must_use]
    #[track_caller]
    pub const fn retention(self, retention: Duration) -> Self {
        assert_retention(retention);
        Self { retention, ..self }
    }

    /// Sets the number of attempts after which a call returns [`Error::Exhausted`](crate::Error::Exhausted). By
    /// default, the number of attempts is unlimited. Attempts that lapsed also count, so roll-outs that kill workers
    /// can exhaust a healthy operation. An operator can permit one more attempt with
    /// [`grant`](crate::operator::Shown::grant).
    #[must_use]
    pub const fn max_attempts(self, max_attempts: NonZeroU32) -> Self {
        Self { max_attempts: Some(max_attempts), ..self }
    }

    /// Sets what a call does while another owner holds the key. The default is [`OnDuplicate::Reject`]. A waiting call
    /// polls with jitter, and holds no connection between two polls. Under both values, each try to claim waits for up
    /// to a second for an open transaction that has the key, such as the claim of another call.
    ///
    /// The wait must be shorter than the [retention](Self::retention). A call with a wait of at least
    /// the retention returns [`Misuse`] and runs no SQL.
    ///
    /// # Panics
    ///
    /// Panics if the wait is shorter than a millisecond or longer than an hour.
    #[must_use]
    #[track_caller]
    pub const fn on_duplicate(self, on_duplicate: OnDuplicate) -> Self {
        assert_wait(on_duplicate);
        Self { on_duplicate, ..self }
    }

    /// Sets whether the claim stores the request. With a stored request, a [`Resumer`](super::Resumer) can do the work
    /// if no caller comes back, and a [`Reconciler`](super::Reconciler) can settle an operation in doubt. The default
    /// is `false`. Storing the request costs one more round trip.
    ///
    /// The request is stored as JSON, **in plain text**, until the operation is complete. WAL and backups may contain
    /// the request even after the completion. So put a reference to a secret into the body, and not the secret itself.
    /// A leased layer of the feature `http` stores the HTTP request, for an `http::RequestResumer`.
    ///
    /// If requests are stored, a call with a [`Fingerprint`](crate::Fingerprint) instead of a body returns [`Misuse`].
    #[must_use]
    pub const fn store_request(self, stored_request: bool) -> Self {
        Self { stored_request, ..self }
    }

    /// Sets how long a resumer waits after the claim before it takes over an operation that has lapsed or was released.
    /// The time doubles with each attempt. The default is a minute. Make this time longer than the pauses between your
    /// clients' retries, so that usually the client gets the response.
    ///
    /// # Panics
    ///
    /// Panics if the time is longer than a day.
    #[must_use]
    #[track_caller]
    pub const fn resume_after(self, resume_after: Duration) -> Self {
        assert!(is_in(&RESUMES, resume_after), "the time before an operation is resumed must be at most a day");
        Self { resume_after, ..self }
    }

    /// Sets whether each connection keeps the crate's statements prepared. The default is `true`. Behind PgBouncer in
    /// transaction mode, `false` may be necessary: see [`Idempotency::persistent`](crate::Idempotency::persistent).
    #[must_use]
    pub const fn persistent(self, persistent: bool) -> Self {
        Self { persistent, ..self }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        in_range("retention", self.retention, self.policy.lease().saturating_mul(2)..=*RETENTION.end())?;
        check_wait(Some(self.on_duplicate), self.retention)
    }

    /// Refuses a policy under which no caller and no resumer may do the work again.
    pub(super) fn check_resumable(&self) -> Result<(), Error> {
        match self.policy {
            Policy::AtMostOnce { .. } => Err(Misuse::options(
                "under Policy::AtMostOnce the work is not done again; use Policy::InSteps or AtLeastOnce",
            )),
            Policy::AtLeastOnce { .. } | Policy::InSteps { .. } => Ok(()),
        }
    }

    /// How long a call waits. The time is zero under [`OnDuplicate::Reject`].
    pub(crate) fn wait(&self) -> Duration {
        match self.on_duplicate {
            OnDuplicate::Wait(limit) => limit,
            OnDuplicate::Reject => Duration::ZERO,
        }
    }
}
