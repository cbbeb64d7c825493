//! How long: to remember a key, and to wait for another caller.

use std::ops::RangeInclusive;
use std::time::Duration;

/// The default retention. A day: what Stripe documents for its idempotency keys, and longer than any sane
/// client retries.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// From the smallest unit in which anybody plans to ten years, past which a typing error is likelier than a plan.
pub(crate) const RETENTION: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// Long enough for the first call of an ordinary request to finish, shorter than the time-outs of common proxies.
pub(crate) const DEFAULT_WAIT: Duration = Duration::from_secs(5);
/// PostgreSQL's `lock_timeout` counts milliseconds, and 0 would mean for ever. A wait holds a connection: an hour is absurd.
pub(crate) const WAIT: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60 * 60);

/// What to do when another caller is performing the same operation at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InFlight {
    /// Wait for the other transaction, this long in all: replay its response if it commits, perform if it rolls back. When
    /// the time is over the answer is [`Error::InFlight`](crate::Error::InFlight), and **a transaction of the caller's own is
    /// still usable**. A shorter `lock_timeout` of the caller's session ends the wait earlier, in the same way; a
    /// `statement_timeout` is an error, and aborts the transaction.
    ///
    /// **A caller that waits holds its connection.** A storm of duplicates of one slow operation can hold a whole pool, and
    /// other calls queue for it: give the pool an `acquire_timeout` longer than the limit, or use [`Reject`](Self::Reject),
    /// with a `Retry-After` for the client, where anybody may call.
    ///
    /// An owner whose process died is waited for until the server notices, which it does when the statement under way
    /// ends: set `client_connection_check_interval` (PostgreSQL 14) where statements are long.
    Wait(Duration),
    /// Answer [`Error::InFlight`](crate::Error::InFlight) at once and leave the transaction usable.
    Reject,
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

/// The policy that was chosen, or the default: a wait that is shorter than the time for which a key is remembered.
pub(crate) fn in_flight_within(chosen: Option<InFlight>, remembered: Duration) -> Result<InFlight, InvalidDuration> {
    match chosen {
        None => Ok(InFlight::Wait(DEFAULT_WAIT.min(remembered / 2).max(*WAIT.start()))),
        Some(InFlight::Wait(limit)) if limit >= remembered => {
            Err(InvalidDuration { option: "wait", given: limit, shortest: *WAIT.start(), longest: remembered })
        }
        Some(in_flight) => Ok(in_flight),
    }
}

/// The policy, if its wait is in range.
pub(crate) const fn checked(in_flight: InFlight) -> Result<InFlight, InvalidDuration> {
    if let InFlight::Wait(limit) = in_flight
        && let Err(invalid) = within("wait", limit, WAIT)
    {
        return Err(invalid);
    }
    Ok(in_flight)
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
