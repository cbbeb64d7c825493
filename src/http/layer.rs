//! The layer: its constructors, and the settings that only one mode has. The setters of both modes are in the folder.

mod setters;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{HeaderName, StatusCode};
use sqlx::PgPool;
use tower_layer::Layer;

use super::leased::Leased;
use super::service::{IdempotencyService, Protection};
use super::settings::{Denied, Settings};
use super::transactional::Transactional;
use crate::lease::{Leasing, Policy};
use crate::limits::{RETENTION, checked, in_flight_within, within};
use crate::{DEFAULT_RETENTION, InFlight, InvalidDuration, RoundTrips};

/// Makes the requests that pass through it idempotent. The [module documentation](super) describes the behaviour.
///
/// It is cheap to clone. `M` is the mode, [`Transactional`] or [`Leased`]. A setting of one mode does not compile in
/// the other:
///
/// ```compile_fail,E0599
/// # use pg_idempotency::RoundTrips;
/// # use pg_idempotency::http::{IdempotencyLayer, Leased};
/// fn wrong(layer: IdempotencyLayer<Leased>) -> IdempotencyLayer<Leased> {
///     layer.with_round_trips(RoundTrips::SelectFirst) // a setting of `Transactional`
/// }
/// ```
#[derive(Clone)]
#[must_use = "a setter returns the layer with the setting"]
pub struct IdempotencyLayer<M = Transactional> {
    settings: Settings,
    mode: M,
}

/// The transactional mode.
impl IdempotencyLayer<Transactional> {
    /// A layer for effects in this database. Key, effects and response commit in one transaction, which the handler
    /// takes as [`IdempotentTx`](super::IdempotentTx), before the first byte is sent. Writes by another connection are
    /// not a part of it, and happen as often as the handler runs.
    ///
    /// `scope` returns the tenant, account or user of the request. It must come **from the authenticated identity**,
    /// which a layer further out has put into the request's extensions, and never from an unauthenticated part of the
    /// request. If `scope` returns an error, that is the response.
    pub fn transactional(
        pool: PgPool,
        scope: impl Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
    ) -> Self {
        let mode =
            Transactional { retention: DEFAULT_RETENTION, transaction_required: true, round_trips: RoundTrips::Plain };
        Self { settings: Settings::new(pool, Arc::new(scope)), mode }
    }

    /// Whether a handler may succeed without taking its transaction, which is otherwise a
    /// [mistake](super::Misconfigured::TransactionNotTaken). The default is `false`. `true` is for routes without
    /// effects in this database, whose answers are to be replayed. **The layer then does not notice a handler with
    /// effects that forgets the transaction.**
    pub fn with_optional_transaction(self, optional: bool) -> Self {
        Self { mode: Transactional { transaction_required: !optional, ..self.mode }, ..self }
    }

    /// Which round trips the layer saves. The default is [`RoundTrips::Plain`]. [`RoundTrips`] describes what each choice
    /// costs; with [`Fewest`](RoundTrips::Fewest), **keys and responses may appear in the server's log**.
    ///
    /// The look of [`SelectFirst`](RoundTrips::SelectFirst) takes a connection of its own from the pool, which sqlx pings
    /// first by default, so a first call takes two round trips more.
    pub fn with_round_trips(self, round_trips: RoundTrips) -> Self {
        Self { mode: Transactional { round_trips, ..self.mode }, ..self }
    }

    /// How long the database remembers a key. The default is 24 hours. **Tell your clients**: a repeat that comes later
    /// is performed.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::Duration`] under a millisecond or over ten years, or not longer than the
    /// [wait](Self::with_in_flight).
    pub fn with_retention(self, retention: Duration) -> Result<Self, InvalidSetting> {
        within("retention", retention, RETENTION)?;
        in_flight_within(Some(self.settings.in_flight), retention)?;
        Ok(Self { mode: Transactional { retention, ..self.mode }, ..self })
    }

    /// Whether a request is refused while the first request with its key is not finished, which is the default, or
    /// waits for the response of the first. A request that waits polls, and holds no connection between two polls.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::Duration`] for a wait under a millisecond or over an hour, or not shorter than the retention.
    pub fn with_in_flight(self, in_flight: InFlight) -> Result<Self, InvalidSetting> {
        let in_flight = in_flight_within(Some(checked(in_flight)?), self.mode.retention)?;
        Ok(self.with(|settings| settings.in_flight = in_flight))
    }
}

/// The leased mode.
impl IdempotencyLayer<Leased> {
    /// A layer for effects outside this database. The key is claimed under a lease, which renews itself while the
    /// handler runs, and the response is stored afterwards. The [`policy`](crate::lease) decides what happens if the
    /// handler dies in between. `scope` is as for a [transactional layer](IdempotencyLayer::transactional).
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] for a lease under 10 ms or over 12 hours.
    pub fn leased(
        pool: PgPool,
        scope: impl Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
        policy: Policy,
    ) -> Result<Self, InvalidDuration> {
        let mode = Leased { leasing: Leasing::new(policy)? };
        Ok(Self { settings: Settings::new(pool, Arc::new(scope)), mode })
    }

    /// The number of attempts after which the layer refuses another one. The default is no limit.
    pub fn with_max_attempts(self, max_attempts: NonZeroU32) -> Self {
        let leasing = self.mode.leasing.with_max_attempts(max_attempts);
        Self { mode: Leased { leasing }, ..self }
    }

    /// As [in transactional mode](IdempotencyLayer::<Transactional>::with_retention), but counted from the completion.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::Duration`] under a millisecond, under twice the lease, or over ten years, or not longer than the
    /// wait.
    pub fn with_retention(self, retention: Duration) -> Result<Self, InvalidSetting> {
        let leasing = self.mode.leasing.with_retention(retention)?;
        in_flight_within(Some(self.settings.in_flight), retention)?;
        Ok(Self { mode: Leased { leasing }, ..self })
    }

    /// As [in transactional mode](IdempotencyLayer::<Transactional>::with_in_flight).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn with_in_flight(self, in_flight: InFlight) -> Result<Self, InvalidSetting> {
        let in_flight = in_flight_within(Some(checked(in_flight)?), self.mode.leasing.retention())?;
        Ok(self.with(|settings| settings.in_flight = in_flight))
    }
}

impl<S> Layer<S> for IdempotencyLayer<Transactional> {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        let settings = Arc::new(self.settings.clone());
        IdempotencyService { inner, settings, protection: Protection::Transactional(self.mode) }
    }
}

impl<S> Layer<S> for IdempotencyLayer<Leased> {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        let settings = Arc::new(self.settings.clone());
        IdempotencyService { inner, settings, protection: Protection::Leased(self.mode) }
    }
}

impl<M: fmt::Debug> fmt::Debug for IdempotencyLayer<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").field("mode", &self.mode).finish_non_exhaustive()
    }
}

/// A setting that the layer refuses, when the service starts and not at a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidSetting {
    /// The status is not a client error. A success is stored anyway, and a 5xx must stay open to a retry.
    #[error("responses of status {0} cannot be stored by choice; only 400 to 499 can")]
    StatusNotStorable(StatusCode),
    /// The header belongs to one connection, one session or one moment.
    #[error("the header {0} must not be replayed: it belongs to one connection, one session or one moment")]
    HeaderNotReplayable(HeaderName),
    /// The text is not a JSON pointer to a part of the body.
    #[error("{0:?} is not a JSON pointer to a part of the body (RFC 6901); write /name or /outer/inner")]
    NotAPointer(String),
    /// The duration is outside its bounds.
    #[error(transparent)]
    Duration(#[from] InvalidDuration),
}
