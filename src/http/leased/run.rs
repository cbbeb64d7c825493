//! The run of a leased layer: claim, call the handler, store its response.

use std::time::{Duration, Instant};

use http::Response;

use super::idempotent_lease::IdempotentLease;
use crate::http::body::LayerBody;
use crate::http::conclusion::{Conclusion, NotPerformed, conclude};
use crate::http::handler::{Handler, Unanswered};
use crate::http::rejection::Rejection;
use crate::http::replay::replay;
use crate::http::request::Ticket;
use crate::http::settings::Settings;
use crate::lease::{Acquired, Leasing, unless_lost};
use crate::{Error, InFlight, observe};

/// The mode of a layer that claims the key under a lease, made by
/// [`IdempotencyLayer::leased`](crate::http::IdempotencyLayer::leased).
#[derive(Clone, Copy, Debug)]
pub struct Leased {
    pub(in crate::http) leasing: Leasing,
    pub(in crate::http) explicit_begin: bool,
}

impl Leased {
    /// Claims the key, calls the handler and stores its response; or replays the stored response.
    pub(in crate::http) async fn run<H: Handler>(
        self,
        settings: &Settings,
        ticket: &Ticket,
        mut handler: H,
    ) -> Result<Response<LayerBody<H::Body>>, Unanswered<H::Error>> {
        let key = &ticket.key;
        let wait_for = match ticket.in_flight {
            InFlight::Reject => Duration::ZERO,
            InFlight::Wait(limit) => limit,
        };
        let leasing = self.leasing.with_deployment(settings.deployment).with_wait_for(wait_for).map_err(Error::from)?;
        let lease = match leasing.acquire_stored(&settings.pool, key, ticket.fingerprint).await? {
            Acquired::Lease(lease) => lease,
            Acquired::Replayed(stored) => return Ok(replay(key, stored, settings.seal.as_deref())?),
        };
        let handlers_lease = IdempotentLease::new(lease.owner().clone(), !self.explicit_begin);
        handler.extensions_mut().insert(handlers_lease.clone());
        let _registered = settings.local.register(key, ticket.fingerprint);

        let started = Instant::now();
        // The response body is a part of the work, because it may have effects outside, too.
        let work = async { conclude(settings, Some(key), handler.call(settings.run_timeout).await?).await };
        let concluded = unless_lost(&lease, work).await;
        observe::performed(leasing.mode(), key.operation(), started.elapsed());
        match concluded {
            None => Err(lease.failed(Error::LeaseLost).into()),
            Some(Ok(Conclusion::Store { stored, response, .. })) => {
                lease.complete_encoded(&stored).await?;
                Ok(response)
            }
            Some(Ok(Conclusion::Free { response })) => {
                if !handlers_lease.has_begun() || response.extensions().get::<NotPerformed>().is_some() {
                    lease.not_performed(());
                }
                lease.fail(&format!("the handler answered {}", response.status())).await;
                Ok(response)
            }
            Some(Err(error)) => {
                if !handlers_lease.has_begun() {
                    lease.not_performed(());
                }
                lease.fail(reason(&error)).await;
                Err(error)
            }
        }
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
