//! The layer. Its settings are in the folder, by theme; each mode has a file with its constructor and its own settings.

mod bounds;
mod fingerprint;
mod key;
mod leased;
mod response;
mod transactional;

use std::fmt;

use http::{HeaderName, StatusCode};
use tower_layer::Layer;

use super::leased::Leased;
use super::service::{IdempotencyService, Protection};
use super::settings::Settings;
use super::transactional::Transactional;
use crate::{Deployment, InvalidDuration};

/// Makes the requests that pass through it idempotent. The [module documentation](super) describes the behaviour.
///
/// The layer is cheap to clone. Add it with axum's `Router::route_layer`, with tower's `ServiceBuilder`, or with
/// [`Layer::layer`].
///
/// `M` is the mode, [`Transactional`] or [`Leased`]. Some settings exist in one mode only; in the other they do not
/// compile:
///
/// ```compile_fail,E0599
/// # use pg_idempotency::http::{IdempotencyLayer, Leased};
/// fn wrong(layer: IdempotencyLayer<Leased>) -> IdempotencyLayer<Leased> {
///     layer.with_select_first(true) // a setting of `Transactional`
/// }
/// ```
#[derive(Clone)]
pub struct IdempotencyLayer<M = Transactional> {
    settings: Settings,
    mode: M,
}

impl<M> IdempotencyLayer<M> {
    fn with(mut self, set: impl FnOnce(&mut Settings)) -> Self {
        set(&mut self.settings);
        self
    }

    /// How the layer reaches the database, for example through a pooler.
    #[must_use]
    pub fn with_deployment(self, deployment: Deployment) -> Self {
        self.with(|settings| settings.deployment = deployment)
    }
}

impl<S> Layer<S> for IdempotencyLayer<Transactional> {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService::new(inner, self.settings.clone(), Protection::Transactional(self.mode))
    }
}

impl<S> Layer<S> for IdempotencyLayer<Leased> {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService::new(inner, self.settings.clone(), Protection::Leased(self.mode))
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
    /// The route is too long to be a part of a key.
    #[error("the route has {bytes} bytes, and the limit is {most}; give the operation a shorter name: with_operation")]
    RouteTooLong {
        /// The length of the route.
        bytes: usize,
        /// The greatest length that the layer accepts.
        most: usize,
    },
    /// The duration is outside its bounds.
    #[error(transparent)]
    Duration(#[from] InvalidDuration),
}
