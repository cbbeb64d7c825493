//! The setting that describes how the service reaches the database.

/// Describes how the service reaches the database. [`Idempotency`](crate::Idempotency),
/// [`LeaseOptions`](crate::lease::LeaseOptions) and [`MarkOptions`](crate::mark::MarkOptions) have this setting.
///
/// ```
/// use pg_idempotency::{Deployment, Idempotency};
///
/// /// Behind PgBouncer in transaction mode.
/// const POOLED: Deployment = Deployment::new().prepared_statements(false);
///
/// let payments = Idempotency::new().deployment(POOLED);
/// # let _ = payments;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deployment {
    pub(crate) prepared: bool,
}

impl Deployment {
    /// A deployment on one server that keeps prepared statements. The server is PostgreSQL itself, or a pooler in
    /// session mode.
    #[must_use]
    pub const fn new() -> Self {
        Self { prepared: true }
    }

    /// Whether each connection keeps the crate's statements prepared. The default is `true`. With `false`, the crate
    /// prepares a statement again for each use, which costs one more round trip.
    ///
    /// **Turn this setting off behind PgBouncer in transaction mode**, unless PgBouncer tracks prepared statements
    /// (`max_prepared_statements`, from version 1.21). Without tracking, the name of a prepared statement may mean
    /// another statement on another server connection. Without tracking, your own statements also need
    /// `.persistent(false)`.
    #[must_use]
    pub const fn prepared_statements(self, prepared: bool) -> Self {
        let _ = self;
        Self { prepared }
    }
}

impl Default for Deployment {
    fn default() -> Self {
        Self::new()
    }
}
