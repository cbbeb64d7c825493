//! The options of a call in transaction mode.

use std::time::Duration;

use crate::limits::{DEFAULT_RETENTION, assert_retention, assert_wait};
use crate::observe::Trace;
use crate::{Deployment, OnDuplicate};

/// The options of transaction mode.
///
/// The setters are `const`, so the options can be a constant of your service. [`ensure`](Self::ensure) and
/// [`ensure_isolated`](Self::ensure_isolated) make a call in your transaction, and [`run`](Self::run) makes one on a
/// pool. The guide's page `settings` lists all settings.
///
/// ```
/// # use pg_idempotency::{Idempotency, OnDuplicate};
/// # use std::time::Duration;
/// const ORDERS: Idempotency = Idempotency::new().retention(Duration::from_secs(3 * 3600));
///
/// let nonces = Idempotency::new().retention(Duration::from_secs(300)).on_duplicate(OnDuplicate::Reject);
/// # let _ = (ORDERS, nonces);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idempotency {
    pub(crate) retention: Duration,
    pub(crate) on_duplicate: Option<OnDuplicate>,
    pub(crate) deployment: Deployment,
    pub(crate) round_trips: RoundTrips,
    pub(crate) trace: Trace,
}

impl Idempotency {
    /// The defaults are a retention of 24 hours, a wait of at most 5 seconds, and [`Deployment::new`].
    #[must_use]
    pub const fn new() -> Self {
        Self {
            retention: DEFAULT_RETENTION,
            on_duplicate: None,
            deployment: Deployment::new(),
            round_trips: RoundTrips::Plain,
            trace: Trace::NONE,
        }
    }

    /// How long a key is remembered, counted from its claim by the database's clock. The default is 24 hours. **A retry
    /// that comes later is performed again.** Make the retention longer than your longest transaction: a transaction
    /// that outlives it gets [`OutlivedRetention`](crate::Error::OutlivedRetention).
    ///
    /// # Panics
    ///
    /// Under a millisecond or over ten years. In a constant, this is a compile error.
    #[must_use]
    #[track_caller]
    pub const fn retention(self, retention: Duration) -> Self {
        assert_retention(retention);
        Self { retention, ..self }
    }

    /// What to do about a concurrent duplicate. The default is to wait for 5 seconds, or for half the retention if that
    /// is shorter. Behind the HTTP layer the default is [`OnDuplicate::Reject`].
    ///
    /// The wait must be shorter than the [retention](Self::retention), because the first response may be forgotten at
    /// its end. A call with a longer wait returns [`Misuse`](crate::Misuse), and no SQL runs.
    ///
    /// # Panics
    ///
    /// For a wait under a millisecond (use [`OnDuplicate::Reject`]) or over an hour.
    #[must_use]
    #[track_caller]
    pub const fn on_duplicate(self, on_duplicate: OnDuplicate) -> Self {
        assert_wait(on_duplicate);
        Self { on_duplicate: Some(on_duplicate), ..self }
    }

    /// The trace of this call, a `traceparent` of W3C Trace Context. The default is none. A text that is not valid by
    /// that standard counts as none. The HTTP layer passes on the trace of each request.
    ///
    /// The record keeps the trace of its last claim, so a completed operation has the trace of the call that did the
    /// work. [`operator::show`](crate::operator::show) returns it, and the span of each replay names it: see the
    /// guide's page `metrics`.
    #[must_use]
    pub fn trace(self, traceparent: &str) -> Self {
        Self { trace: Trace::of(traceparent), ..self }
    }

    /// How the service reaches the database, for example behind a pooler.
    #[must_use]
    pub const fn deployment(self, deployment: Deployment) -> Self {
        Self { deployment, ..self }
    }

    /// Which round trips [`run`](Self::run) saves. The default is [`RoundTrips::Plain`]. The setting has no effect on a
    /// call in your transaction, where your next statement would have to wait for the answer to a ROLLBACK.
    #[must_use]
    pub const fn round_trips(self, round_trips: RoundTrips) -> Self {
        Self { round_trips, ..self }
    }
}

/// Which round trips [`Idempotency::run`] and the transactional HTTP layer save. The answers are the same under each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RoundTrips {
    /// The claim and the completion are separate statements. A first call takes two round trips more than its bare
    /// transaction, and a replay takes four.
    #[default]
    Plain,
    /// Look for a stored response before the transaction begins. Use this if most calls are retries. A replay then
    /// takes one round trip instead of four, and a first call takes one more.
    ///
    /// This has no effect on a [distributed](Deployment::distributed) table. It also has no effect without [prepared
    /// statements](Deployment::prepared_statements), because a pooler could mix up unprepared statements outside a
    /// transaction.
    SelectFirst,
    /// Send the claim with BEGIN, and the completion with COMMIT. Use this if the database is distant: a first call
    /// takes two round trips fewer than under [`Plain`](Self::Plain). On a Unix socket it is slower.
    /// `docs/performance.md` of the package has measurements. The price:
    /// - **Each call that finds the key taken writes an ERROR to the server's log**, with SQLSTATE IK001 and the key.
    ///   Such a call is a duplicate, or its record has expired or was released. It takes one or two round trips more
    ///   than under `Plain`, but a replay takes two fewer.
    /// - **The text of a statement contains the key and the response** (in hexadecimal digits), so do not use this if a
    ///   response must not appear in logs. PostgreSQL logs a statement that fails (`log_min_error_statement`) or is
    ///   slow, `pg_stat_activity` shows it, and sqlx logs it at DEBUG, or at WARN if it is slow. A separate statement
    ///   stores a response over 16 KiB.
    /// - A COMMIT that fails also writes a WARNING about a missing transaction.
    /// - If the future of a duplicate is dropped, the pool may lose its connection.
    /// - In `pg_stat_database`, each first call of [`Idempotency::run`] counts as a commit and as a rollback. Its
    ///   connection returns to the pool with an empty transaction, which the pool rolls back. So round trips are saved
    ///   only if the pool has another connection for the next call.
    /// - Roles need EXECUTE on `idempotency.claim_at_begin`, `idempotency.try_claim` and `idempotency.store_response`.
    ///   PUBLIC has it by default.
    ///
    /// This has no effect on a [distributed](Deployment::distributed) table.
    Fewest,
}

impl Default for Idempotency {
    fn default() -> Self {
        Self::new()
    }
}
