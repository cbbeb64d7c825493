//! The run of a leased layer: claim, call the handler, store its response. The handler sees the lease.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use http::Extensions;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;

use super::conclusion::{Conclusion, NotPerformed, conclude};
use super::handler::{Answer, Handler, Unanswered};
use super::rejection::Rejection;
use super::replay::replay;
use super::request::Ticket;
use super::settings::Settings;
use crate::claim::Asked;
use crate::lease::{Acquired, Leasing, Owner, Step, Steps, unless_lost};
use crate::{Error, Key, observe};

/// The mode of a layer that claims the key under a lease, made by
/// [`IdempotencyLayer::leased`](super::IdempotencyLayer::leased).
#[derive(Clone, Copy, Debug)]
pub struct Leased {
    pub(super) leasing: Leasing,
    pub(super) explicit_begin: bool,
}

impl Leased {
    /// Claims the key, calls the handler and stores its response; or replays the stored response.
    pub(super) async fn run<H: Handler>(self, settings: &Settings, ticket: &Ticket, mut handler: H) -> Answer<H> {
        let key = &ticket.key;
        let leasing = self.leasing.with_deployment(settings.deployment).waiting(ticket.wait);
        let asked = Asked::since(ticket.arrived);
        let lease = match leasing.acquire_stored(&settings.pool, key, ticket.fingerprint, None, asked).await? {
            Acquired::Lease(lease) => lease,
            Acquired::Replayed(stored) => return Ok(replay(key, stored, settings.seal.as_deref())?),
        };
        let handlers_lease = IdempotentLease {
            owner: lease.owner().clone(),
            steps: lease.steps().clone(),
            begun: Arc::new(if self.explicit_begin { OnceLock::new() } else { OnceLock::from(true) }),
        };
        handler.extensions_mut().insert(handlers_lease.clone());
        let _registered = settings.local.register(key, ticket.fingerprint);

        let started = Instant::now();
        // The response body is a part of the work, because it may have effects outside, too.
        let work = async { conclude(settings, Some(key), handler.call(settings.run_timeout).await?).await };
        let concluded = unless_lost(lease.owner(), work).await;
        observe::performed(leasing.mode(), key.operation(), started.elapsed());
        let (not_performed, reason, answer) = match concluded {
            None => return Err(lease.failed(Error::LeaseLost).into()),
            Some(Ok(Conclusion::Store { stored, response, .. })) => {
                lease.complete_encoded(&stored).await?;
                return Ok(response);
            }
            Some(Ok(Conclusion::Free { response })) => {
                let not_performed = response.extensions().get::<NotPerformed>().is_some();
                (not_performed, format!("the handler answered {}", response.status()), Ok(response))
            }
            Some(Err(error)) => (false, reason(&error).to_owned(), Err(error)),
        };
        // From here on, a task of the handler cannot begin.
        let begun = *handlers_lease.begun.get_or_init(|| false);
        if not_performed || !begun {
            lease.not_performed(());
        }
        lease.fail(&reason).await;
        answer
    }
}

/// The `last_error` of a lease that was not completed.
fn reason<E>(error: &Unanswered<E>) -> &'static str {
    match error {
        Unanswered::Rejected(Rejection::Misconfigured(_)) => "the handler's response could not be stored",
        Unanswered::Rejected(Rejection::TimedOut { .. }) => "the handler ran into the layer's time-out",
        Unanswered::Rejected(_) | Unanswered::Denied(_) => "the layer refused the response",
        Unanswered::Failed(_) => "the handler failed",
        Unanswered::Panicked(_) => "the handler panicked",
    }
}

/// The lease under which a handler runs. The layer renews and settles it; the handler can only look at it.
///
/// With axum it is an extractor; elsewhere [`get`](Self::get) it from the request's extensions.
#[derive(Clone, Debug)]
pub struct IdempotentLease {
    owner: Owner,
    steps: Steps,
    /// Whether the effect counts as begun. The first of the handler and the layer decides: the handler when it begins, the
    /// layer when the handler has failed.
    begun: Arc<OnceLock<bool>>,
}

/// No leased layer is in front of this handler, or the layer does not cover this method, or the request has no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no lease here: no leased IdempotencyLayer covers this request, or the request has no key")]
pub struct NoLease;

impl IdempotentLease {
    /// The lease of a request.
    ///
    /// # Errors
    ///
    /// [`NoLease`].
    pub fn get(extensions: &Extensions) -> Result<Self, NoLease> {
        extensions.get::<Self>().cloned().ok_or(NoLease)
    }

    /// Declares that the effect begins now: from here on a failure may leave an effect behind. This matters only in a
    /// layer with [`with_explicit_begin`](super::IdempotencyLayer::with_explicit_begin).
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`]: the lease is lost, or has ended with the handler's response. Another request may perform by
    /// now, so the effect must not begin. A task that the handler has spawned can meet this error.
    pub fn begin(&self) -> Result<(), Error> {
        let begun = *self.begun.get_or_init(|| true);
        if begun && !self.is_lost() { Ok(()) } else { Err(Error::LeaseLost) }
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        self.owner.key()
    }

    /// A key for the next service, the same in every attempt. See
    /// [`Lease::downstream_key`](crate::lease::Lease::downstream_key).
    #[must_use]
    pub fn downstream_key(&self) -> String {
        self.owner.downstream_key()
    }

    /// 1 for the first claim, one more at each take-over.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.owner.attempt
    }

    /// The fencing token. See [`Lease::token`](crate::lease::Lease::token).
    #[must_use]
    pub fn token(&self) -> i64 {
        self.owner.token
    }

    /// Performs a step in this database, exactly once, in a transaction of its own. See
    /// [`Lease::step`](crate::lease::Lease::step).
    ///
    /// # Errors
    ///
    /// As [`Lease::step`](crate::lease::Lease::step).
    ///
    /// # Cancellation
    ///
    /// As [`Lease::step`](crate::lease::Lease::step).
    pub async fn step<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        self.steps.in_database(name, perform).await
    }

    /// Performs a step outside the database; again after a crash in its middle. See
    /// [`Lease::step_at_least_once`](crate::lease::Lease::step_at_least_once).
    ///
    /// # Errors
    ///
    /// As [`Lease::step_at_least_once`](crate::lease::Lease::step_at_least_once).
    ///
    /// # Cancellation
    ///
    /// As [`Lease::step_at_least_once`](crate::lease::Lease::step_at_least_once).
    pub async fn step_at_least_once<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Step) -> Result<T, E>,
    {
        self.steps.at_least_once(name, perform).await
    }

    /// Performs a step outside the database at most once. See
    /// [`Lease::step_at_most_once`](crate::lease::Lease::step_at_most_once).
    ///
    /// # Errors
    ///
    /// As [`Lease::step_at_most_once`](crate::lease::Lease::step_at_most_once).
    ///
    /// # Cancellation
    ///
    /// As [`Lease::step_at_most_once`](crate::lease::Lease::step_at_most_once).
    pub async fn step_at_most_once<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Step) -> Result<T, E>,
    {
        self.steps.at_most_once(name, perform).await
    }

    /// Whether the lease is lost, or has ended with the handler's response. If it is lost, the layer drops the handler
    /// at its next await. A handler with several effects and no await between them asks before each effect, and so does
    /// a task that may outlive the response.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.owner.is_lost()
    }
}

#[cfg(feature = "axum")]
impl<S: Sync> axum::extract::FromRequestParts<S> for IdempotentLease {
    type Rejection = NoLease;

    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, NoLease> {
        Self::get(&parts.extensions)
    }
}

/// A 500 without a body: the text of the mistake is for the service's log.
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for NoLease {
    fn into_response(self) -> axum::response::Response {
        tracing::error!(error = &self as &dyn std::error::Error, "a handler cannot have its IdempotentLease");
        http::StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}
