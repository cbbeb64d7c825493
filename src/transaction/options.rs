//! The options of a call in transaction mode.

use std::time::Duration;

use crate::limits::{DEFAULT_RETENTION, RETENTION, checked, in_flight_within, within};
use crate::{Deployment, InFlight, InvalidDuration};

/// How operations are made idempotent: retention, in-flight policy, deployment, and two options that save round trips.
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
    in_flight: Option<InFlight>,
    pub(crate) deployment: Deployment,
    pub(crate) select_first: bool,
    pub(crate) fewest_round_trips: bool,
}

impl Idempotency {
    /// A retention of 24 hours, a wait of at most 5 seconds, a plain [`Deployment`].
    #[must_use]
    pub const fn new() -> Self {
        Self {
            retention: DEFAULT_RETENTION,
            in_flight: None,
            deployment: Deployment::new(),
            select_first: false,
            fewest_round_trips: false,
        }
    }

    /// How long a key is remembered, counted from its claim by the database's clock. The default is 24 hours. **It is the
    /// protection window**: a repeat that comes later is performed again. Make it longer than the transaction that holds the
    /// claim: a transaction that outlives it cannot be completed
    /// ([`OutlivedRetention`](crate::Error::OutlivedRetention)).
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

    /// What to do about a concurrent duplicate. The default is to wait for 5 seconds, or half the retention where that is
    /// shorter.
    ///
    /// A wait must be shorter than the retention, or the first response could be forgotten meanwhile; because the setters may
    /// come in any order, a longer one is [`Error::InvalidDuration`](crate::Error::InvalidDuration) when a call is made.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] for a wait under a millisecond (take [`InFlight::Reject`]) or over an hour.
    pub const fn with_in_flight(self, in_flight: InFlight) -> Result<Self, InvalidDuration> {
        match checked(in_flight) {
            Ok(in_flight) => Ok(Self { in_flight: Some(in_flight), ..self }),
            Err(invalid) => Err(invalid),
        }
    }

    pub(crate) fn in_flight(&self) -> Result<InFlight, InvalidDuration> {
        in_flight_within(self.in_flight, self.retention)
    }

    /// How the database is reached: behind a pooler, for one.
    #[must_use]
    pub const fn with_deployment(self, deployment: Deployment) -> Self {
        Self { deployment, ..self }
    }

    /// Whether to look for a stored response before anything is begun: for services where most calls are repeats. The default
    /// is not to.
    ///
    /// A replay then takes one round trip in place of four, and a first call one more. It works for [`run`](Self::run) and on a
    /// connection in no transaction. It changes nothing in a transaction of the caller's own, nor without [prepared
    /// statements](Deployment::with_prepared_statements), which a pooler could mix up outside a transaction.
    #[must_use]
    pub const fn with_select_first(self, select_first: bool) -> Self {
        Self { select_first, ..self }
    }

    /// Whether [`run`](Self::run) sends the claim together with BEGIN, and the completion together with COMMIT. The default is
    /// not to. A first call then takes the round trips of its bare transaction, two fewer than without; it pays where a round
    /// trip takes half a millisecond or more.
    ///
    /// The price:
    /// - **Each call that finds a record writes an ERROR to the server's log**, with SQLSTATE IK001 and the key in hexadecimal
    ///   digits: each duplicate, and a first call where the record is expired or released. Such a call takes one or two round
    ///   trips more than a plain one, but a replay two fewer.
    /// - The response is in the text of a statement, in hexadecimal digits. PostgreSQL logs that text where the statement fails
    ///   (`log_min_error_statement`) or is slow, `pg_stat_activity` shows it, and sqlx logs it at DEBUG and, if slow, at WARN:
    ///   **not for responses that logs must not have**. Responses over 16 KiB are completed apart.
    /// - A COMMIT that fails also leaves a WARNING about a transaction that is not there. A duplicate whose future is dropped
    ///   may cost the pool its connection.
    ///
    /// It saves its trips only if the pool has another connection for the next call: this one is given back with an empty
    /// transaction that ends there. Isolated calls, and calls on a connection of the caller's, ignore it. Roles need EXECUTE on
    /// `idempotency.claim` and `idempotency.complete`, which PUBLIC has unless you have revoked it.
    #[must_use]
    pub const fn with_fewest_round_trips(self, fewest_round_trips: bool) -> Self {
        Self { fewest_round_trips, ..self }
    }
}

impl Default for Idempotency {
    fn default() -> Self {
        Self::new()
    }
}
