//! How the service reaches the database.

/// How the service reaches the database. [`Idempotency`](crate::Idempotency),
/// [`LeaseOptions`](crate::lease::LeaseOptions) and [`MarkOptions`](crate::mark::MarkOptions) take this value.
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
    /// Only the statements ask ([`record`](crate::record)). The rest of the crate asks the functions below.
    pub(crate) distributed: bool,
}

impl Deployment {
    /// One server that keeps prepared statements: PostgreSQL itself, or a pooler in session mode.
    #[must_use]
    pub const fn new() -> Self {
        // Only our own tests set this cfg: script/prove --citus.
        Self { prepared: true, distributed: cfg!(idempotency_distributed) }
    }

    /// Whether each connection keeps the crate's statements prepared. The default is `true`. If this is `false`, the
    /// connection prepares a statement for each use, which costs one more round trip per statement.
    ///
    /// **Turn this off behind PgBouncer in transaction mode**, unless PgBouncer tracks prepared statements
    /// (`max_prepared_statements`, from version 1.21). Without tracking, the name of a kept statement may mean another
    /// statement on another server connection. Your own statements need `.persistent(false)` there too.
    #[must_use]
    pub const fn prepared_statements(self, prepared: bool) -> Self {
        Self { prepared, ..self }
    }

    /// Whether Citus distributes the table by `scope`, as [`distribute`](crate::distribute()) does. The default is
    /// `false`.
    ///
    /// The crate then sends other statements, because a worker would evaluate parts of the usual ones by its own clock
    /// and with its own locks. The answers are the same. A first call takes three round trips more.
    ///
    /// The setting must fit the table. If the table is distributed and the setting is `false`, every call fails with
    /// [`Misuse::WrongDeployment`](crate::Misuse::WrongDeployment), in each database of the process, and also if the
    /// table was distributed a moment ago. On a plain table the statements for a distributed one are right, but slower;
    /// the process looks at the first table that it claims in, and logs a warning.
    #[must_use]
    pub const fn distributed(self, distributed: bool) -> Self {
        Self { distributed, ..self }
    }

    /// Whether a claim cannot look for a record itself, so that a look comes first.
    pub(crate) fn looks_first(self) -> bool {
        self.distributed
    }

    /// Whether a claim returns the age of its transaction.
    pub(crate) fn claims_tell_the_age(self) -> bool {
        !self.distributed
    }

    /// Whether one statement can mark many keys.
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
