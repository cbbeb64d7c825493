//! How the service reaches the database.

/// How the service reaches the database: a setting of [`Idempotency`](crate::Idempotency),
/// [`LeaseOptions`](crate::lease::LeaseOptions) and [`MarkOptions`](crate::mark::MarkOptions).
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
    /// Only the statements in [`record`](crate::record) read it. Other code asks the functions below.
    pub(crate) distributed: bool,
}

impl Deployment {
    /// One server that keeps prepared statements: PostgreSQL itself, or a pooler in session mode.
    #[must_use]
    pub const fn new() -> Self {
        // Only our own tests set this cfg: script/prove --citus.
        Self { prepared: true, distributed: cfg!(idempotency_distributed) }
    }

    /// Whether each connection keeps the crate's statements prepared. The default is `true`. If `false`, each statement
    /// is prepared for each use, which costs one more round trip.
    ///
    /// **Turn this off behind PgBouncer in transaction mode**, unless PgBouncer tracks prepared statements
    /// (`max_prepared_statements`, from version 1.21). Without tracking, the name of a kept statement may mean another
    /// statement on another server connection. Your own statements then need `.persistent(false)`, too.
    #[must_use]
    pub const fn prepared_statements(self, prepared: bool) -> Self {
        Self { prepared, ..self }
    }

    /// Whether Citus distributes the table by `scope`, as [`distribute`](crate::distribute()) does. The default is
    /// `false`.
    ///
    /// The crate then sends other statements, because a worker would evaluate parts of the usual ones by its own clock
    /// and with its own locks. The answers are the same. A first call takes three more round trips. The guide's page
    /// `larger` explains the set-up.
    ///
    /// The setting must fit the table. If the table is distributed and the setting is `false`, every call fails with
    /// [`Misuse::WrongDeployment`](crate::Misuse::WrongDeployment). If it is `true` for a plain table, calls are
    /// slower, and the process logs a warning before its first claim.
    #[must_use]
    pub const fn distributed(self, distributed: bool) -> Self {
        Self { distributed, ..self }
    }

    /// Whether a look must come before a claim, because the claim cannot look itself.
    pub(crate) fn looks_first(self) -> bool {
        self.distributed
    }

    pub(crate) fn claims_tell_the_age(self) -> bool {
        !self.distributed
    }

    pub(crate) fn marks_in_batches(self) -> bool {
        !self.distributed
    }

    /// Whether [`SelectFirst`](crate::RoundTrips::SelectFirst) and [`Fewest`](crate::RoundTrips::Fewest) take effect.
    pub(crate) fn saves_round_trips(self) -> bool {
        !self.distributed
    }
}

impl Default for Deployment {
    fn default() -> Self {
        Self::new()
    }
}
