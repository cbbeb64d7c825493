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
    /// Only the statements in [`record`](crate::record) read this field. Other code calls the functions below.
    pub(crate) distributed: bool,
}

impl Deployment {
    /// A deployment on one server that keeps prepared statements. The server is PostgreSQL itself, or a pooler in
    /// session mode.
    #[must_use]
    pub const fn new() -> Self {
        // Only our own tests (`script/citus`) set this cfg.
        Self { prepared: true, distributed: cfg!(idempotency_distributed) }
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
        Self { prepared, ..self }
    }

    /// Whether Citus distributes the table by `scope`. [`distribute`](crate::distribute()) makes such a table. The
    /// default is `false`.
    ///
    /// For a distributed table, the crate sends other statements, because a worker would evaluate parts of the usual
    /// statements by its own clock and with its own locks. The calls return the same answers as with a plain table, but
    /// a first call takes three more round trips. The guide's page `larger` explains the set-up.
    ///
    /// The setting must match the table. If the table is distributed and the setting is `false`, every call fails with
    /// [`Misuse::WrongDeployment`](crate::Misuse::WrongDeployment). If the setting is `true` for a plain table, calls
    /// are slower, and the process logs a warning before its first claim.
    #[must_use]
    pub const fn distributed(self, distributed: bool) -> Self {
        Self { distributed, ..self }
    }

    /// Whether a call must look for the record before it claims the key. On a distributed table, the claim statement
    /// cannot look for the record.
    pub(crate) fn looks_first(self) -> bool {
        self.distributed
    }

    pub(crate) fn claims_tell_the_age(self) -> bool {
        !self.distributed
    }

    pub(crate) fn marks_in_batches(self) -> bool {
        !self.distributed
    }
}

impl Default for Deployment {
    fn default() -> Self {
        Self::new()
    }
}
