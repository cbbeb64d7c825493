//! How the service reaches the database.

/// How the service reaches the database. [`Idempotency`](crate::Idempotency), [`Leasing`](crate::lease::Leasing),
/// [`Dedup`](crate::dedup::Dedup) and the HTTP layer all take this value.
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

    /// Whether each connection keeps the crate's statements prepared. The default is `true`. If this is `false`, the
    /// connection prepares a statement for each use, which costs one more round trip per statement.
    ///
    /// **Turn this off behind PgBouncer in transaction mode**, unless PgBouncer tracks prepared statements
    /// (`max_prepared_statements`, from version 1.21). Without tracking, the name of a kept statement may mean another
    /// statement on another server connection. Your own statements need `.persistent(false)` there too.
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
