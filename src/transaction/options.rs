//! The options of a call in transaction mode.

use std::time::Duration;

use crate::OnDuplicate;
use crate::limits::{DEFAULT_RETENTION, assert_retention, assert_wait};

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
    pub(crate) persistent: bool,
    pub(crate) replay_first: bool,
}

impl Idempotency {
    /// Creates options with a retention of 24 hours and a wait of at most 5 seconds.
    #[must_use]
    pub const fn new() -> Self {
        Self { retention: DEFAULT_RETENTION, on_duplicate: None, persistent: true, replay_first: false }
    }

    /// Sets how long a key is remembered. The retention starts at the claim, by the database's clock. The default is 24
    /// hours. **A retry after the retention performs the operation again.** Make the retention longer than your longest
    /// transaction. If `perform` outlives the retention, the call returns
    /// [`OutlivedRetention`](crate::Error::OutlivedRetention). The crate does not notice a COMMIT after the end of the
    /// retention.
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
    /// The wait must be shorter than the [retention](Self::retention), because a sweep may delete the first response
    /// before the end of the wait. Otherwise a call returns [`Misuse`](crate::Misuse) before any SQL runs.
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

    /// Sets whether each connection keeps the crate's statements prepared. The default is `true`. With `false`, the
    /// crate prepares a statement again for each use, which costs one more round trip.
    ///
    /// **Set `false` behind PgBouncer in transaction mode**, unless PgBouncer tracks prepared statements
    /// (`max_prepared_statements`, from version 1.21). Without tracking, the name of a prepared statement may mean
    /// another statement on another server connection. Without tracking, your own statements also need
    /// `.persistent(false)`.
    ///
    /// # Panics
    ///
    /// Panics for `false` after [`replay_first(true)`](Self::replay_first). sqlx would send the statement of
    /// `replay_first` in two messages, outside a transaction, and a pooler could send the second message to another
    /// server connection.
    #[must_use]
    #[track_caller]
    pub const fn persistent(self, persistent: bool) -> Self {
        assert_in_one_message(self.replay_first, persistent);
        Self { persistent, ..self }
    }

    /// Sets whether [`run`](Self::run) and the transactional HTTP layer look for a stored response before they begin a
    /// transaction. The default is `false`. Turn this setting on if most calls are retries. A replay then waits for one
    /// round trip instead of three, and a first call takes one round trip more. The answers stay the same. The setting
    /// has no effect on a call in your transaction, because your code has begun this transaction.
    ///
    /// # Panics
    ///
    /// Panics for `true` after [`persistent(false)`](Self::persistent).
    #[must_use]
    #[track_caller]
    pub const fn replay_first(self, replay_first: bool) -> Self {
        assert_in_one_message(replay_first, self.persistent);
        Self { replay_first, ..self }
    }
}

const fn assert_in_one_message(replay_first: bool, persistent: bool) {
    assert!(persistent || !replay_first, "replay_first needs statements that stay prepared, and persistent is false");
}

impl Default for Idempotency {
    fn default() -> Self {
        Self::new()
    }
}
