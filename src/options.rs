//! The settings of a call: how long to remember, and what to do about a concurrent duplicate.

use std::ops::RangeInclusive;
use std::time::Duration;

/// How long a key is remembered unless told. A day: what Stripe documents for its idempotency keys, and longer than any sane
/// client retries.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// From the smallest unit in which anybody plans to ten years, past which a typing error is likelier than a plan.
pub(crate) const RETENTION: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// Long enough for the first call of an ordinary request to finish, shorter than the time-outs of common proxies.
pub(crate) const DEFAULT_WAIT: Duration = Duration::from_secs(5);
/// PostgreSQL's `lock_timeout` counts milliseconds, and 0 would mean for ever. A wait holds a connection: an hour is absurd.
pub(crate) const WAIT: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60 * 60);

/// How operations are made idempotent: retention, in-flight policy, prepared statements, and what saves round trips.
///
/// Cheap to copy, and its setters are `const`: meant to be a constant of your service. The calls are [`ensure`](Self::ensure),
/// [`ensure_isolated`](Self::ensure_isolated) and [`run`](Self::run).
///
/// ```
/// # use pg_idempotency::{Idempotency, InFlight, InvalidDuration};
/// # use std::time::Duration;
/// const ORDERS: Idempotency = match Idempotency::new().with_retention(Duration::from_secs(3 * 3600)) {
///     Ok(options) => options,
///     Err(_) => panic!("three hours are a retention"),
/// };
///
/// let nonces = Idempotency::new().with_retention(Duration::from_secs(300))?.with_in_flight(InFlight::Reject)?;
/// # let _ = (ORDERS, nonces);
/// # Ok::<(), InvalidDuration>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idempotency {
    pub(crate) retention: Duration,
    pub(crate) in_flight: InFlight,
    pub(crate) prepared: bool,
    pub(crate) select_first: bool,
    pub(crate) combined_begin: bool,
    pub(crate) combined_commit: bool,
}

/// What to do when another caller is performing the same operation at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InFlight {
    /// Wait for the other's transaction: replay its response if it commits, perform if it rolls back. The limit holds for
    /// each owner that is waited for; past it the answer is [`Error::InFlight`](crate::Error::InFlight), and a transaction
    /// of the caller's own is aborted.
    ///
    /// **Whoever waits holds his connection.** A storm of duplicates of one slow operation can hold a whole pool, and others
    /// queue for it: give the pool an `acquire_timeout` longer than the limit, or take [`Reject`](Self::Reject), with a
    /// `Retry-After` for the client, where anybody may call.
    ///
    /// An owner whose process died is waited for until the server notices, which it does when the statement under way
    /// ends: set `client_connection_check_interval` (PostgreSQL 14) where statements are long.
    ///
    /// A shorter `lock_timeout` or `statement_timeout` that the caller has set stays in force and stays his error.
    Wait(Duration),
    /// Answer [`Error::InFlight`](crate::Error::InFlight) at once and leave the transaction usable.
    ///
    /// Where that cannot be, because the row itself is locked by a sweep that is deleting it or by an owner who could not get
    /// the advisory lock, the claim waits a tenth of a second, the transaction is aborted, and the answer is
    /// [`Error::Retryable`](crate::Error::Retryable).
    ///
    /// To tell in time, the owner is seen by an advisory lock that its transaction holds. So are transactions that have
    /// only *replayed* the key: should its record expire or be purged while one of those is still open, a new claim is
    /// told to retry although nobody performs.
    Reject,
}

impl Idempotency {
    /// A retention of 24 hours, a wait of 5 seconds, prepared statements.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            retention: DEFAULT_RETENTION,
            in_flight: InFlight::Wait(DEFAULT_WAIT),
            prepared: true,
            select_first: false,
            combined_begin: false,
            combined_commit: false,
        }
    }

    /// How long a key is remembered, counted from its claim by the database's clock. **It is the protection window**: a
    /// repeat that comes later is performed again.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] under a millisecond or over ten years.
    pub const fn with_retention(self, retention: Duration) -> Result<Self, InvalidDuration> {
        match within("retention", retention, RETENTION) {
            Ok(retention) => Ok(Self { retention, ..self }),
            Err(invalid) => Err(invalid),
        }
    }

    /// What to do about a concurrent duplicate.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] for a wait under a millisecond (take [`InFlight::Reject`]) or over an hour.
    pub const fn with_in_flight(self, in_flight: InFlight) -> Result<Self, InvalidDuration> {
        if let InFlight::Wait(limit) = in_flight
            && let Err(invalid) = within("wait", limit, WAIT)
        {
            return Err(invalid);
        }
        Ok(Self { in_flight, ..self })
    }

    /// Whether the crate's statements are prepared once per connection and kept (the default), or prepared anew each time,
    /// at one round trip more per statement.
    ///
    /// **Turn it off behind PgBouncer in transaction mode** unless that tracks prepared statements
    /// (`max_prepared_statements`, from 1.21): a kept statement's name means another statement on another server
    /// connection. Your own statements need `.persistent(false)` there too.
    #[must_use]
    pub const fn with_prepared_statements(self, prepared: bool) -> Self {
        Self { prepared, ..self }
    }

    /// Whether to look for a stored response before anything is begun: where most calls are repeats. Off unless told.
    ///
    /// A replay then takes one round trip in place of four, and a first call one more than without. It is for [`run`](Self::run)
    /// and for a connection in no transaction; in a transaction of the caller's own it changes nothing, nor without
    /// [prepared statements](Self::with_prepared_statements), which a pooler could mix up outside a transaction.
    #[must_use]
    pub const fn with_select_first(self, select_first: bool) -> Self {
        Self { select_first, ..self }
    }

    /// Whether [`run`](Self::run) stores the response and commits in one message. Off unless told. It saves a first call one
    /// round trip, if the pool has another connection for the next call: an empty transaction is left, which ends while the
    /// pool takes this one back.
    ///
    /// What it asks for in return: the message is a text that holds the response, as hexadecimal digits, and so is what
    /// PostgreSQL logs where it fails (`log_min_error_statement`) or is slow (`log_min_duration_statement`), what
    /// `pg_stat_activity` shows, and what sqlx logs at DEBUG and, if slow, at WARN: **not for responses that logs must not
    /// have**. A COMMIT that fails leaves a WARNING too, about a transaction that is not there. Responses over 16 KiB are
    /// completed apart, and so are isolated calls and those on a connection of the caller's. Roles need EXECUTE on
    /// `idempotency.complete`, which PUBLIC has unless you have revoked it.
    #[must_use]
    pub const fn with_combined_commit(self, combined_commit: bool) -> Self {
        Self { combined_commit, ..self }
    }

    /// Whether [`run`](Self::run) claims the key in the message that begins the transaction. Off unless told. It saves a first
    /// call one round trip; with [`with_combined_commit`](Self::with_combined_commit), the crate adds none to the transaction.
    ///
    /// What it asks for in return: **every call that finds a record writes an ERROR to the server's log**, with SQLSTATE IK001
    /// and the key in hexadecimal digits: duplicates, and first calls where one is expired or released. A replay takes three
    /// round trips, unless it is found [first](Self::with_select_first); who is told anything else takes two or three more than
    /// without. A duplicate whose future is dropped may cost the pool its connection. Isolated calls and those on a
    /// connection of the caller's claim apart. Roles need EXECUTE on `idempotency.claim_waiting` and
    /// `idempotency.claim_rejecting`, which PUBLIC has unless you have revoked it.
    #[must_use]
    pub const fn with_combined_begin(self, combined_begin: bool) -> Self {
        Self { combined_begin, ..self }
    }
}

impl Default for Idempotency {
    fn default() -> Self {
        Self::new()
    }
}

/// A duration that makes no sense for the option it was given to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a {option} of {given:?} was asked for; it must be between {shortest:?} and {longest:?}")]
#[non_exhaustive]
pub struct InvalidDuration {
    /// The option.
    pub option: &'static str,
    /// What was given.
    pub given: Duration,
    /// The shortest that is taken.
    pub shortest: Duration,
    /// The longest that is taken.
    pub longest: Duration,
}

pub(crate) const fn within(
    option: &'static str,
    given: Duration,
    range: RangeInclusive<Duration>,
) -> Result<Duration, InvalidDuration> {
    let (shortest, longest) = (*range.start(), *range.end());
    // Durations are not compared in a const fn by themselves.
    if shortest.as_nanos() <= given.as_nanos() && given.as_nanos() <= longest.as_nanos() {
        Ok(given)
    } else {
        Err(InvalidDuration { option, given, shortest, longest })
    }
}
