//! The constructor of a transactional layer, and the settings that only this mode has.

use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use sqlx::PgPool;

use super::{IdempotencyLayer, InvalidSetting};
use crate::http::settings::{Denied, Settings};
use crate::http::transactional::Transactional;
use crate::limits::{RETENTION, within};

/// Settings of the transactional mode.
impl IdempotencyLayer<Transactional> {
    /// A layer for handlers whose effects are in this database. Key, effects and response commit in one transaction,
    /// which the handler takes as [`IdempotentTx`](crate::http::IdempotentTx). Writes by another connection are not a
    /// part of it, and happen as often as the handler runs. A handler that succeeds under a key without having taken
    /// the transaction is therefore a [mistake](crate::http::Misconfigured::TransactionNotTaken): the answer is a 500
    /// and is not stored, unless the layer has an [optional transaction](Self::with_optional_transaction).
    ///
    /// `scope` returns the tenant, account or user of the request. It must come **from the authenticated identity**,
    /// which a layer further out has put into the request's extensions, and never from an unauthenticated part of the
    /// request. If `scope` returns an error, that is the response.
    #[must_use]
    pub fn transactional<F>(pool: PgPool, scope: F) -> Self
    where
        F: Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
    {
        let mode = Transactional { transaction_required: true, select_first: false, fewest_round_trips: false };
        Self { settings: Settings::new(pool, Arc::new(scope)), mode }
    }

    /// Whether a handler may succeed without taking its [`IdempotentTx`](crate::http::IdempotentTx). The default is
    /// `false`. `true` is for routes without effects in this database, whose answers are to be replayed. **The layer
    /// then does not notice a handler with effects that forgets the transaction**: its answer is replayed, but its
    /// effects are not atomic with the key.
    #[must_use]
    pub fn with_optional_transaction(mut self, optional: bool) -> Self {
        self.mode.transaction_required = !optional;
        self
    }

    /// Whether the layer looks for a stored response before it claims. The default is `false`. See
    /// [`Idempotency::with_select_first`](crate::Idempotency::with_select_first). The look takes a connection of its
    /// own from the pool, which sqlx pings first by default, so a first call takes two round trips more.
    #[must_use]
    pub fn with_select_first(mut self, select_first: bool) -> Self {
        self.mode.select_first = select_first;
        self
    }

    /// Whether the response is stored in the message that commits, which saves one round trip. The default is `false`.
    /// See [`Idempotency::with_fewest_round_trips`](crate::Idempotency::with_fewest_round_trips). Unlike there, the
    /// claim does not go with the BEGIN: the handler owns the transaction, and sqlx hands out no connection whose BEGIN
    /// has failed.
    #[must_use]
    pub fn with_fewest_round_trips(mut self, fewest_round_trips: bool) -> Self {
        self.mode.fewest_round_trips = fewest_round_trips;
        self
    }

    /// How long the database remembers a key. The default is 24 hours. **Tell your clients**: a repeat that comes later
    /// is performed.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::Duration`] under a millisecond or over ten years.
    pub fn with_retention(self, retention: Duration) -> Result<Self, InvalidSetting> {
        within("retention", retention, RETENTION)?;
        Ok(self.with(|settings| settings.retention = retention))
    }
}
