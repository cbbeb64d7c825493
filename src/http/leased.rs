//! The run of a leased layer: claim, call the handler, store its response.

use std::time::Instant;

use super::conclusion::{Conclusion, NotPerformed, conclude};
use super::handler::{Answer, Handler, Unanswered};
use super::idempotent_lease::IdempotentLease;
use super::rejection::Rejection;
use super::replay::replay;
use super::request::Ticket;
use super::settings::Settings;
use crate::lease::{Acquired, Leasing, unless_lost};
use crate::{Error, observe};

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
        let leasing = self.leasing.with_deployment(settings.deployment);
        let leasing = leasing.with_wait_for(ticket.wait).map_err(Error::from)?;
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
        if not_performed || !handlers_lease.has_begun() {
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
