//! The options of a call in transaction mode.

use std::time::Duration;

use crate::limits::{DEFAULT_RETENTION, assert_retention, assert_wait};
use crate::{Deployment, OnDuplicate};

/// The options of transaction mode.
///
/// The setters are `const`, so the options can be a constant of your service. [`ensure`](Self::ensure) and
/// [`ensure_isolated`](Self::ensure_isolated) make a call in your transaction, and [`run`](Self::run) makes a call on a
/// pool.
///
/// **The database is the name space of operations**, so services that share a database need [different
/// operations](crate::Key).
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
}

impl Idempotency {
    /// Creates options with a retention of 24 hours, a wait of at most 5 seconds, and [`Deployment::new`].
    #[must_use]
    pub const fn new() -> Self {
        Self {
            retention: DEFAULT_RETENTION,
            on_duplicate: None,
            deployment: Deployment::new(),
            round_trips: RoundTrips::Plain,
        }
    }

    /// Sets how long a key is remembered. The retention starts at the claim, by the database's clock. The default is 24
    /// hours. **A retry after the retention performs the operation again.** Make the retention longer than your longest
    /// transaction. A call whose transaction outlives the retention returns
    /// [`OutlivedRetention`](crate::Error::OutlivedRetention).
    ///
    /// # Panics
    ///
    /// Panics if the retention is shorter than a millisecond or longer than ten years. In a constant, such a retention
    /// is a compile error.
    #[must_use]
    #[track_caller]
    pub const fn retention(self, retention: Duration) -> Self {
        assert_retention(retention);
        Self { retention, ..self }
    }

    /// Sets what a call does if it is a concurrent duplicate. The default is to wait for 5 seconds, or for half the
    /// retention if that is shorter. Behind the HTTP layer the default is [`OnDuplicate::Reject`].
    ///
    /// The wait must be shorter than the [retention](Self::retention), because the first response may be forgotten at
    /// the end of the wait. Otherwise a call returns [`Misuse`](crate::Misuse) before any SQL runs.
    ///
    /// # Panics
    ///
    /// Panics if the wait is shorter than a millisecond or longer than an hour. Instead of a shorter wait, use
    /// [`OnDuplicate::Reject`].
    #[must_use]
    #[track_caller]
    pub const fn on_duplicate(self, on_duplicate: OnDuplicate) -> Self {
        assert_wait(on_duplicate);
        Self { on_duplicate: Some(on_duplicate), ..self }
    }

    /// Sets how the service reaches the database, for example behind a pooler.
    #[must_use]
    pub const fn deployment(self, deployment: Deployment) -> Self {
        Self { deployment, ..self }
    }

    /// Sets which round trips [`run`](Self::run) saves. The default is [`RoundTrips::Plain`]. The setting has no effect
    /// on a call in your transaction, because your code begins and commits this transaction.
    #[must_use]
    pub const fn round_trips(self, round_trips: RoundTrips) -> Self {
        Self { round_trips, ..self }
    }
}

/// Which round trips [`Idempotency::run`] and the transactional HTTP layer save. All variants return the same
/// responses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RoundTrips {
    /// The claim and the completion are separate statements. A first call takes two round trips more than its
    /// transaction alone. A replay takes four round trips.
    #[default]
    Plain,
    /// A call looks for a stored response before its transaction begins. Use this variant if most calls are retries. A
    /// replay takes one round trip instead of four. A first call takes one round trip more than under `Plain`.
    ///
    /// The variant has no effect on a [distributed](Deployment::distributed) table. The variant also has no effect if
    /// [prepared statements](Deployment::prepared_statements) are turned off. sqlx would then send the statement in two
    /// messages, and a pooler could send the second message to another server connection.
    SelectFirst,
    /// A call sends the claim with BEGIN, and the completion with COMMIT. A first call takes two round trips fewer than
    /// under [`Plain`](Self::Plain), so use this variant if the database is distant. On a Unix socket, this variant is
    /// slower than `Plain`. `docs/performance.md` of the package has measurements. The costs of this variant:
    /// - **Each call that finds the key taken writes an ERROR to the server's log**, with SQLSTATE IK001 and the key. A
    ///   call finds the key taken if the call is a duplicate, or if the record of the key has expired or was released.
    ///   A replay takes two round trips fewer than under `Plain`. Every other call that finds the key taken takes one
    ///   or two round trips more than under `Plain`.
    /// - **The text of a statement contains the key and the response** (in hexadecimal digits). So do not use this
    ///   variant if a response must not appear in logs. PostgreSQL logs a statement that fails
    ///   (`log_min_error_statement`) or is slow. `pg_stat_activity` shows the statement. sqlx logs the statement at
    ///   DEBUG, or at WARN if the statement is slow. A separate statement stores a response over 16 KiB.
    /// - A COMMIT that fails also writes a WARNING about a missing transaction.
    /// - If the future of a duplicate is dropped, the pool may lose the connection of this call.
    /// - In `pg_stat_database`, each first call of [`Idempotency::run`] counts as a commit and as a rollback. The
    ///   connection of the call returns to the pool with an empty transaction, which the pool rolls back. So round
    ///   trips are saved only if the pool has another connection for the next call.
    /// - Roles need EXECUTE on `idempotency.claim_at_begin`, `idempotency.try_claim` and `idempotency.store_response`.
    ///   PUBLIC has this privilege by default.
    ///
    /// The variant has no effect on a [distributed](Deployment::distributed) table.
    Fewest,
}

impl Default for Idempotency {
    fn default() -> Self {
        Self::new()
    }
}
