//! How the database is reached.

/// How the database is reached: the one value that [`Idempotency`](crate::Idempotency), [`Leasing`](crate::lease::Leasing),
/// [`Dedup`](crate::dedup::Dedup) and the HTTP layer share.
///
/// ```
/// use pg_idempotency::{Deployment, Idempotency};
///
/// /// Behind PgBouncer in transaction mode.
/// const POOLED: Deployment = Deployment::new().with_prepared_statements(false);
///
/// let payments = Idempotency::new().with_deployment(POOLED);
/// # let _ = payments;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deployment {
    pub(crate) prepared: bool,
}

impl Deployment {
    /// A server that keeps prepared statements: PostgreSQL itself, or a pooler in session mode.
    #[must_use]
    pub const fn new() -> Self {
        Self { prepared: true }
    }

    /// Whether the crate's statements are prepared once per connection and kept (the default), or prepared anew each time,
    /// at one round trip more per statement.
    ///
    /// **Turn it off behind PgBouncer in transaction mode** unless that tracks prepared statements
    /// (`max_prepared_statements`, from 1.21): otherwise a kept statement's name means another statement on another server
    /// connection. Your own statements need `.persistent(false)` there too.
    #[must_use]
    pub const fn with_prepared_statements(self, prepared: bool) -> Self {
        Self { prepared }
    }
}

impl Default for Deployment {
    fn default() -> Self {
        Self::new()
    }
}
