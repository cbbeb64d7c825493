//! The layer and its constructors. The setters are in the folder.

mod setters;

use std::fmt;
use std::sync::Arc;

use http::request::Parts;
use http::{HeaderName, StatusCode};
use sqlx::PgPool;
use tower_layer::Layer;

use super::service::IdempotencyService;
use super::settings::{Denied, Protection, Settings};
use crate::lease::Leasing;
use crate::{Idempotency, InvalidDuration};

/// Makes the requests that pass through it idempotent. The [module documentation](super) describes the behaviour.
///
/// It is cheap to clone.
#[derive(Clone)]
#[must_use = "a setter returns the layer with the setting"]
pub struct IdempotencyLayer {
    settings: Settings,
}

impl IdempotencyLayer {
    /// A layer for effects in this database. Key, effects and response commit in one transaction, which the handler
    /// takes as [`IdempotentTx`](super::IdempotentTx), before the first byte is sent. Writes by another connection are
    /// not a part of it, and happen as often as the handler runs. A handler without effects in this database takes the
    /// transaction, too.
    ///
    /// `options` are those of a call: retention, deployment, round trips, and what to do about a concurrent duplicate.
    /// Over HTTP the default for a duplicate is [`Reject`](crate::InFlight::Reject), because anybody may send one. A
    /// request that [waits](crate::InFlight::Wait) polls, and holds no connection between two polls. **Tell your clients
    /// the retention**: a repeat that comes later is performed.
    ///
    /// `scope` returns the tenant, account or user of the request. It must come **from the authenticated identity**,
    /// which a layer further out has put into the request's extensions, and never from an unauthenticated part of the
    /// request. If `scope` returns an error, that is the response.
    pub fn transactional(
        pool: PgPool,
        options: Idempotency,
        scope: impl Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
    ) -> Self {
        Self { settings: Settings::new(pool, Protection::Transactional(options), Arc::new(scope)) }
    }

    /// A layer for effects outside this database. The key is claimed under a lease, which renews itself while the
    /// handler runs, and the response is stored afterwards. The [policy](crate::lease) of the options decides what
    /// happens if the handler dies in between. `scope` is as for a [transactional layer](Self::transactional).
    ///
    /// Requests cannot be resumed: with [`with_stored_request`](Leasing::with_stored_request) every answer is a 500.
    pub fn leased(
        pool: PgPool,
        options: Leasing,
        scope: impl Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
    ) -> Self {
        Self { settings: Settings::new(pool, Protection::Leased(options), Arc::new(scope)) }
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService { inner, settings: Arc::new(self.settings.clone()) }
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").field("protection", &self.settings.protection).finish_non_exhaustive()
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
