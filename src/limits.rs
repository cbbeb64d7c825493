//! Limits of durations: how long a key is remembered, and how long a call waits for another caller. Setters check them,
//! because `lock_timeout` takes zero for no limit, and a retention of zero would protect nothing.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// The default retention: 24 hours. Stripe documents the same for its idempotency keys, and it is longer than clients
/// usually retry.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// A retention above ten years is probably a typing error.
pub(crate) const RETENTION: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// Long enough for the first call of an ordinary request to finish, and shorter than the time-outs of common proxies.
pub(crate) const DEFAULT_WAIT: Duration = Duration::from_secs(5);
/// PostgreSQL's `lock_timeout` counts milliseconds, and 0 means no limit. The longest wait is an hour, because a call
/// that waits holds a connection.
pub(crate) const WAIT: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60 * 60);

/// What to do when another caller is performing the same operation at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InFlight {
    /// Wait for the other transaction, at most this long in total. If it commits, replay its response. If it rolls
    /// back, perform. When the time is over, return [`Error::InFlight`](crate::Error::InFlight): **a transaction of the
    /// caller is still usable** then. A shorter `lock_timeout` of the caller's session ends the wait earlier, in the
    /// same way. A `statement_timeout` is an error, and aborts the transaction.
    ///
    /// **In transaction and mark mode, a caller that waits holds its connection.** Many duplicates of one slow
    /// operation can hold all connections of a pool, and other calls then wait for a connection, so make the limit
    /// shorter than the pool's `acquire_timeout`. If anybody may call, use [`Reject`](Self::Reject), and send the
    /// client a `Retry-After`. In lease mode and behind the HTTP layer, a caller polls and holds no connection between
    /// two polls.
    ///
    /// PostgreSQL measures `lock_timeout` by the server's clock. If that clock is set back during a wait in transaction or
    /// mark mode, the wait lasts longer by as much, or until the other transaction ends.
    ///
    /// If the owner's process dies, the server notices this only when the owner's current statement ends. If statements
    /// are long, set `client_connection_check_interval` (PostgreSQL 14).
    Wait(Duration),
    /// Return [`Error::InFlight`](crate::Error::InFlight) at once, and leave the transaction usable.
    Reject,
}

/// A duration that is out of range for its option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a {option} of {given:?} is out of range; it must be between {shortest:?} and {longest:?}")]
#[non_exhaustive]
pub struct InvalidDuration {
    /// The option.
    pub option: &'static str,
    /// The duration that was given.
    pub given: Duration,
    /// The shortest that is allowed.
    pub shortest: Duration,
    /// The longest that is allowed.
    pub longest: Duration,
}

/// Returns the option if its wait is in range, and shorter than the retention: otherwise the first response could be
/// forgotten during the wait.
pub(crate) const fn checked(in_flight: InFlight, retention: Duration) -> Result<InFlight, InvalidDuration> {
    if let InFlight::Wait(limit) = in_flight {
        if let Err(invalid) = within("wait", limit, WAIT) {
            return Err(invalid);
        }
        if limit.as_nanos() >= retention.as_nanos() {
            let longest = retention.saturating_sub(Duration::from_nanos(1));
            return Err(InvalidDuration { option: "wait", given: limit, shortest: *WAIT.start(), longest });
        }
    }
    Ok(in_flight)
}

/// Returns the retention if it is in range, and longer than a wait that was chosen before.
pub(crate) const fn retention_checked(
    retention: Duration,
    range: RangeInclusive<Duration>,
    in_flight: Option<InFlight>,
) -> Result<Duration, InvalidDuration> {
    if let Some(in_flight) = in_flight
        && let Err(invalid) = checked(in_flight, retention)
    {
        return Err(invalid);
    }
    within("retention", retention, range)
}

pub(crate) const fn within(
    option: &'static str,
    given: Duration,
    range: RangeInclusive<Duration>,
) -> Result<Duration, InvalidDuration> {
    let (shortest, longest) = (*range.start(), *range.end());
    // `Duration` cannot be compared in a const fn.
    if shortest.as_nanos() <= given.as_nanos() && given.as_nanos() <= longest.as_nanos() {
        Ok(given)
    } else {
        Err(InvalidDuration { option, given, shortest, longest })
    }
}

/// The time for which a call may still wait. The call holds its connection while it waits.
pub(crate) struct Patience(Option<Instant>);

impl Patience {
    /// The default is a wait of 5 seconds, or of half the retention if that is shorter.
    pub(crate) fn of(in_flight: Option<InFlight>, retention: Duration) -> Self {
        Self(match in_flight {
            Some(InFlight::Reject) => None,
            Some(InFlight::Wait(limit)) => Some(Instant::now() + limit),
            None => Some(Instant::now() + DEFAULT_WAIT.min(retention / 2)),
        })
    }

    /// `None` if the call does not wait, or has no time left.
    pub(crate) fn left(&self) -> Option<Duration> {
        let left = self.0?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    pub(crate) fn end(&mut self) {
        self.0 = None;
    }
}
