//! The limits of retentions and waits, which setters and calls check. The shortest time is a millisecond, because a
//! `lock_timeout` of zero would mean no limit, and a retention of zero would protect nothing. Each range below has the
//! reason for its longest time.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::{Error, Misuse};

/// The default retention is 24 hours, which is longer than most clients retry. Stripe documents the same retention.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// A retention above ten years is probably a typing error.
pub(crate) const RETENTION: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// The largest response of a record, in bytes. PostgreSQL refuses a value of a gigabyte, under a lease only after the
/// effect, and `pg_dump` fails at half of that size.
pub(crate) const LARGEST_RESPONSE: usize = 256 * 1024 * 1024;

/// The default wait is long enough for the first call of an ordinary request to finish, and shorter than the time-outs
/// of common proxies.
const DEFAULT_WAIT: Duration = Duration::from_secs(5);
/// PostgreSQL's `lock_timeout` counts milliseconds, and a value of 0 means no limit. The longest wait is an hour,
/// because a call that waits holds a connection.
const WAIT: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60 * 60);

/// The behaviour of a call while another caller is performing the same operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnDuplicate {
    /// Wait for the other transaction, for at most this time in total. If the other transaction commits, replay its
    /// response. If the other transaction rolls back, perform the operation. At the end of the wait, return
    /// [`Error::InFlight`](crate::Error::InFlight). **The caller's own transaction is then still usable.** A shorter
    /// `lock_timeout` of the session ends the wait earlier, in the same way. A `statement_timeout` causes an error, and
    /// aborts the transaction. A `transaction_timeout` ends the session.
    ///
    /// **In transaction and mark mode, a caller that waits holds its connection.** Many duplicates of one slow
    /// operation can hold all connections of a pool. So make the wait shorter than the pool's `acquire_timeout`, or use
    /// [`Reject`](Self::Reject) for operations that any client may call. In lease mode and behind the HTTP layer, a
    /// caller polls, and holds no connection between two polls.
    ///
    /// If the process of the first call dies, the server notices its death only when the current statement of that call
    /// ends. For long statements, set `client_connection_check_interval` (PostgreSQL 14). If the server's clock is set
    /// back during a wait, the wait lasts longer.
    Wait(Duration),
    /// Return [`Error::InFlight`](crate::Error::InFlight) at once, and leave the transaction usable.
    ///
    /// In lease mode, the call nevertheless waits for up to a second if an open transaction has the key. Usually,
    /// another call is just claiming the key in this transaction. The call holds its connection during this wait.
    Reject,
}

/// Whether the duration is in the range. (`Duration` cannot be compared in a const fn.)
pub(crate) const fn is_in(range: &RangeInclusive<Duration>, given: Duration) -> bool {
    range.start().as_nanos() <= given.as_nanos() && given.as_nanos() <= range.end().as_nanos()
}

#[track_caller]
pub(crate) const fn assert_wait(on_duplicate: OnDuplicate) {
    if let OnDuplicate::Wait(limit) = on_duplicate {
        assert!(is_in(&WAIT, limit), "a wait must be between a millisecond and an hour");
    }
}

#[track_caller]
pub(crate) const fn assert_retention(retention: Duration) {
    assert!(is_in(&RETENTION, retention), "a retention must be between a millisecond and ten years");
}

/// Returns the duration, or an error if the duration is out of range. The function checks an argument of a call, or a
/// relation between two settings.
pub(crate) fn in_range(what: &str, given: Duration, range: RangeInclusive<Duration>) -> Result<Duration, Error> {
    if range.contains(&given) {
        return Ok(given);
    }
    let (shortest, longest) = range.into_inner();
    let problem = format!("the {what} of {given:?} is out of range; it must be between {shortest:?} and {longest:?}");
    Err(Misuse::Options { problem }.into())
}

/// Refuses a wait that is not shorter than the retention, because the first response could expire during the wait.
pub(crate) fn check_wait(on_duplicate: Option<OnDuplicate>, retention: Duration) -> Result<(), Error> {
    match on_duplicate {
        Some(OnDuplicate::Wait(limit)) if limit >= retention => {
            let problem = format!("the wait of {limit:?} must be shorter than the retention of {retention:?}");
            Err(Misuse::Options { problem }.into())
        }
        _ => Ok(()),
    }
}

/// The time for which a call may still wait. The call holds its connection while it waits.
pub(crate) struct Patience(Option<Instant>);

impl Patience {
    /// By default, the call waits for 5 seconds, or for half the retention if that is shorter.
    pub(crate) fn of(on_duplicate: Option<OnDuplicate>, retention: Duration) -> Self {
        Self(match on_duplicate {
            Some(OnDuplicate::Reject) => None,
            Some(OnDuplicate::Wait(limit)) => Some(Instant::now() + limit),
            None => Some(Instant::now() + DEFAULT_WAIT.min(retention / 2)),
        })
    }

    /// Returns how long the call may still wait, or `None` if the call does not wait, or has no time left.
    pub(crate) fn left(&self) -> Option<Duration> {
        let left = self.0?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    pub(crate) fn end(&mut self) {
        self.0 = None;
    }
}
