//! The options of a call in transaction mode.

use std::time::Duration;

use crate::limits::{DEFAULT_RETENTION, assert_retention, assert_wait};
use crate::trace::Trace;
use crate::{Deployment, OnDuplicate};

/// The options of transaction mode: retention, what a duplicate is told, deployment and round trips.
///
/// It is cheap to copy, and its setters are `const`, so it can be a constant of your service. The calls are
/// [`ensure`](Self::ensure) and [`ensure_isolated`](Self::ensure_isolated), in a transaction, and [`run`](Self::run),
/// on a pool.
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

    /// How long a key is remembered, counted from its claim by the database's clock. The default is 24 hours. **A
    /// retry that comes later is performed again.** Make the retention longer than the transaction that holds the
    /// claim. If the transaction outlives it, the call returns [`OutlivedRetention`](crate::Error::OutlivedRetention).
    ///
    /// # Panics
    ///
    /// Under a millisecond or over ten years. In a constant, this is an error of the compiler.
    #[must_use]
    #[track_caller]
    pub const fn retention(self, retention: Duration) -> Self {
        assert_retention(retention);
        Self { retention, ..self }
    }

    /// What to do about a concurrent duplicate. The default is to wait for 5 seconds, or for half the retention if that
    /// is shorter. Behind the HTTP layer the default is [`OnDuplicate::Reject`].
    ///
    /// The wait must be shorter than the [retention](Self::retention), whose end would forget the first response during
    /// the wait. A call with such options returns [`Misuse`](crate::Misuse), and no SQL runs.
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

    /// The trace of this call, a `traceparent` of W3C Trace Context. A text that is not valid by that standard counts
    /// as none, which is the default.
    ///
    /// A claim keeps the trace in the record, and a take-over replaces it. So the record of a completed operation has
    /// the trace of the call that did the work: [`operator::show`](crate::operator::show) returns it, and the span of
    /// each replay names it (the guide's page `metrics`). The HTTP layer passes on the trace of each request.
    ///
    /// ```
    /// use pg_idempotency::Idempotency;
    ///
    /// const ORDERS: Idempotency = Idempotency::new();
    ///
    /// let traceparent = Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    /// let call = ORDERS.trace(traceparent.unwrap_or_default());
    /// # let _ = call;
    /// ```
    #[must_use]
    pub fn trace(self, traceparent: &str) -> Self {
        Self { trace: Trace::of(traceparent), ..self }
    }

    /// How the service reaches the database, for example behind a pooler.
    #[must_use]
    pub const fn deployment(self, deployment: Deployment) -> Self {
        Self { deployment, ..self }
    }

    /// Which round trips [`run`](Self::run) saves. The default is [`RoundTrips::Plain`]. In a transaction of the caller
    /// the setting has no effect: there the caller's next statement would have to wait for the answer to a ROLLBACK.
    #[must_use]
    pub const fn round_trips(self, round_trips: RoundTrips) -> Self {
        Self { round_trips, ..self }
    }
}

/// Which round trips a call in a transaction of the crate's own saves, for [`Idempotency::round_trips`] and for
/// the transactional HTTP layer. The answers are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RoundTrips {
    /// The claim and the completion are statements of their own: a first call takes two round trips more than its bare
    /// transaction, and a replay takes four.
    #[default]
    Plain,
    /// Look for a stored response before the transaction begins. For services where most calls are retries.
    ///
    /// A replay then takes one round trip instead of four, and a first call takes one more. This has no effect without
    /// [prepared statements](Deployment::prepared_statements), because a pooler could mix up unprepared statements
    /// outside a transaction, nor on a [distributed](Deployment::distributed) table.
    SelectFirst,
    /// Send the claim together with BEGIN, and the completion together with COMMIT. A first call then takes as many
    /// round trips as its bare transaction, two fewer than [`Plain`](Self::Plain). It pays off if the database is
    /// distant, and not on a Unix socket: `docs/performance.md` of the package has measurements.
    ///
    /// The price:
    /// - **Each call that finds the key taken writes an ERROR to the server's log**, with SQLSTATE IK001 and the key.
    ///   Such a call is a duplicate, or the record is expired or released. It takes one or two round trips more than
    ///   under `Plain`, but a replay takes two fewer.
    /// - The text of a statement contains the key, and the response in hexadecimal digits. PostgreSQL logs this text if
    ///   the statement fails (`log_min_error_statement`) or is slow, `pg_stat_activity` shows it, and sqlx logs it at
    ///   DEBUG or, if slow, at WARN. **Do not use this if a response must not appear in logs.** Responses over 16 KiB
    ///   are stored by a statement of their own.
    /// - A COMMIT that fails also leaves a WARNING about a missing transaction. If the future of a duplicate is
    ///   dropped, the pool may lose that duplicate's connection.
    /// - Each first call of [`Idempotency::run`] counts as a commit and as a rollback in `pg_stat_database`: its
    ///   connection returns to the pool with an empty transaction, and the pool rolls that transaction back first. So
    ///   the round trips are saved only if the pool has another connection for the next call.
    ///
    /// It has no effect on a [distributed](Deployment::distributed) table. Roles need
    /// EXECUTE on `idempotency.claim_at_begin`, `idempotency.try_claim` and `idempotency.store_response`. PUBLIC has it
    /// by default.
    Fewest,
}

impl Default for Idempotency {
    fn default() -> Self {
        Self::new()
    }
}
