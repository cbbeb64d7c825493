//! The run of a leased layer: the key is claimed, the handler calls the outside, the response is stored.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Extensions, Request, Response};

use super::body::Body;
use super::conclusion::{Conclusion, NotPerformed, conclude, replayed};
use super::rejection::Rejection;
use super::request::Ticket;
use super::service::{Ended, caught, handled};
use super::settings::Settings;
use crate::lease::{Acquired, Leasing, Owner, unless_lost};
use crate::{BoxError, Error, InFlight, Key, observe};

/// The lease that a handler runs under. It renews itself, and the layer settles it; this is to look at.
///
/// With axum it is an extractor; elsewhere [`get`](Self::get) it out of the request's extensions.
#[derive(Clone, Debug)]
pub struct IdempotentLease {
    owner: Owner,
    begun: Arc<AtomicBool>,
}

/// There is no lease: no leased layer is in front of this handler, or not for this method, or the request has no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no lease here: no leased IdempotencyLayer takes this method, or the request has no key")]
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

    /// Says that the effect begins now: from here on a failure may have done something. It counts where the layer was told to
    /// [listen](super::IdempotencyLayer::with_explicit_begin).
    pub fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        self.owner.key()
    }

    /// As [`Lease::downstream_key`](crate::lease::Lease::downstream_key): for the next service, the same in every attempt.
    #[must_use]
    pub fn downstream_key(&self) -> String {
        self.owner.downstream_key()
    }

    /// 1 for the first claim, one more at each take-over.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.owner.attempt
    }

    /// As [`Lease::token`](crate::lease::Lease::token): the fencing token.
    #[must_use]
    pub fn token(&self) -> i64 {
        self.owner.token
    }

    /// Whether the lease is lost. The handler is dropped at its next await then; ask before each effect of one that does
    /// several without awaiting.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.owner.is_lost()
    }
}

/// Claims the key, lets the handler perform, stores its response; or replays.
pub(super) async fn run<B, R, E, F>(
    settings: &Settings,
    leasing: Leasing,
    ticket: &Ticket,
    in_flight: InFlight,
    mut request: Request<Body<B>>,
    handle: impl FnOnce(Request<Body<B>>) -> F,
) -> Result<Response<Body<R>>, Ended<E>>
where
    R: http_body::Body<Data = Bytes>,
    R::Error: Into<BoxError>,
    F: Future<Output = Result<Response<R>, E>>,
{
    let wait_for = match in_flight {
        InFlight::Reject => Duration::ZERO,
        InFlight::Wait(limit) => limit,
    };
    let leasing = leasing.with_wait_for(wait_for).map_err(Error::from)?;
    let lease = match leasing.acquire_stored(&settings.pool, &ticket.key, ticket.fingerprint).await? {
        Acquired::Lease(lease) => lease,
        Acquired::Replayed(stored) => return Ok(replayed(settings, &ticket.key, stored)?),
    };
    let begun = Arc::new(AtomicBool::new(!settings.explicit_begin));
    request.extensions_mut().insert(IdempotentLease { owner: lease.owner().clone(), begun: begun.clone() });
    let _place = settings.in_flight_here.perform(ticket);
    let started = Instant::now();
    // The response's body is a part of the work: it may call the outside too.
    let concluded: Option<Result<_, Ended<E>>> = unless_lost(&lease, async {
        let response = handled(settings, request, handle).await?;
        let not_performed = response.extensions().get::<NotPerformed>().is_some();
        let status = response.status();
        let concluded = caught(async || Ok(conclude(settings, &ticket.key, response).await)).await?;
        Ok((concluded?, not_performed, status))
    })
    .await;
    observe::performed(leasing.mode(), ticket.key.operation(), started.elapsed());
    match concluded {
        None => Err(lease.failed(Error::LeaseLost).into()),
        Some(Ok((Conclusion::Store { stored, response, .. }, ..))) => {
            lease.complete_encoded(&stored).await?;
            Ok(response)
        }
        Some(Ok((Conclusion::Free { response }, not_performed, status))) => {
            if not_performed || !begun.load(Ordering::Relaxed) {
                lease.not_performed(());
            }
            lease.fail(&format!("the handler answered {status}")).await;
            Ok(response)
        }
        Some(Err(ended)) => {
            if !begun.load(Ordering::Relaxed) {
                lease.not_performed(());
            }
            lease.fail(ended.reason()).await;
            Err(ended)
        }
    }
}

impl<E> Ended<E> {
    /// For the record of a lease that was not completed.
    fn reason(&self) -> &'static str {
        match self {
            Self::Rejected(Rejection::Misconfigured(_)) => "the handler's response could not be stored",
            Self::Rejected(Rejection::TimedOut { .. }) => "the handler ran into the layer's time-out",
            Self::Rejected(_) => "the layer refused the response",
            Self::Failed(_) => "the handler failed",
            Self::Panicked(_) => "the handler panicked",
        }
    }
}
