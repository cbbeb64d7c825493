//! The constructor of a leased layer, and the settings that only this mode has.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use sqlx::PgPool;

use super::{IdempotencyLayer, InvalidSetting};
use crate::InvalidDuration;
use crate::http::leased::Leased;
use crate::http::settings::{Denied, Settings};
use crate::lease::{Leasing, Policy};

/// Settings of the leased mode.
impl IdempotencyLayer<Leased> {
    /// A layer for handlers with effects outside this database. The key is claimed under a lease, which renews itself
    /// while the handler runs, and the response is stored afterwards. The [`policy`](crate::lease) decides what happens
    /// if the handler dies in between. The handler may take an [`IdempotentLease`](crate::http::IdempotentLease).
    ///
    /// `scope` is the same as for a [transactional layer](IdempotencyLayer::transactional).
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] for a lease under 10 ms or over 12 hours.
    pub fn leased<F>(pool: PgPool, scope: F, policy: Policy) -> Result<Self, InvalidDuration>
    where
        F: Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
    {
        let mode = Leased { leasing: Leasing::new(policy)?, explicit_begin: false };
        Ok(Self { settings: Settings::new(pool, Arc::new(scope)), mode })
    }

    /// The number of attempts after which the layer refuses another one. The default is no limit.
    #[must_use]
    pub fn with_max_attempts(mut self, max_attempts: NonZeroU32) -> Self {
        self.mode.leasing = self.mode.leasing.with_max_attempts(max_attempts);
        self
    }

    /// Whether the handler declares the beginning of its effect, with
    /// [`IdempotentLease::begin`](crate::http::IdempotentLease::begin). The default is `false`. It matters under
    /// [`AtMostOnce`](Policy::AtMostOnce): with `true` a failure before that moment frees the key, for example a
    /// request that an extractor refuses; with `false` it leaves the key indeterminate. **A handler that forgets to
    /// call `begin` can repeat its effect.**
    #[must_use]
    pub fn with_explicit_begin(mut self, explicit_begin: bool) -> Self {
        self.mode.explicit_begin = explicit_begin;
        self
    }

    /// How long the database remembers a key, counted from its completion. The default is 24 hours. **Tell your
    /// clients**: a repeat that comes later is performed.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::Duration`] under a millisecond, under twice the lease, or over ten years.
    pub fn with_retention(mut self, retention: Duration) -> Result<Self, InvalidSetting> {
        self.mode.leasing = self.mode.leasing.with_retention(retention)?;
        Ok(self.with(|settings| settings.retention = retention))
    }
}
