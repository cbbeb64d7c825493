//! The run of a leased layer: claim, call the handler, store its response. The handler gets the lease.

#[cfg(feature = "axum")]
use std::sync::LazyLock;

use http::{Extensions, StatusCode};

use super::by_reference::answer_again;
use super::conclusion::{Called, Conclusion, LastError, conclude};
use super::handler::{Handler, NoResponse, Reply};
use super::layer::IdempotencyLayer;
use super::not_begun::{Loan, NotBegun};
use super::places::Place;
use super::rejection::Rejection;
use super::request::{Resumed, Ticket};
#[cfg(feature = "axum")]
use super::seldom::Seldom;
use crate::claim::CalledAt;
use crate::lease::{Acquired, Lease, LeaseOptions, LeaseOwner};
use crate::{Error, Mode, observe};

/// Claims the key, calls the handler and stores its response; or replays the stored response.
pub(super) async fn run<H: Handler>(
    options: LeaseOptions,
    layer: &IdempotencyLayer,
    ticket: &Ticket,
    mut place: Place<'_>,
    handler: H,
) -> Reply<H> {
    let (asked, stored) = (CalledAt::since(ticket.arrived), ticket.stored.as_deref());
    let (pool, key, fingerprint) = (&layer.pool, &ticket.key, ticket.fingerprint);
    match options.acquire_stored(pool, key, fingerprint, stored, asked, &mut place).await? {
        Acquired::Replayed(stored) => answer_again(layer, stored, handler).await,
        Acquired::Owner(owner) => {
            let _performing = place.performing();
            perform(layer, owner, handler, None).await.reply
        }
    }
}

/// How the handler's work has ended.
pub(super) struct Performed<H: Handler> {
    pub(super) reply: Reply<H>,
    /// Whether the response is the answer of the key now.
    pub(super) stored: bool,
}

/// Calls the handler and stores its response, or releases the claim. A claim of a resumer is given back if its request,
/// `resumed`, met another key.
pub(super) async fn perform<H: Handler>(
    layer: &IdempotencyLayer,
    mut owner: LeaseOwner,
    mut handler: H,
    resumed: Option<&Resumed>,
) -> Performed<H> {
    let failed = |reply| Performed { reply, stored: false };
    let lease = Lease::clone(&owner);
    handler.extensions_mut().insert(Loan::new(lease.clone()));
    let called = Called::now(&handler, true);
    // The response body is a part of the work, because it may have effects outside, too.
    let work = async {
        owner.begin();
        conclude(layer, called, handler.call(layer.run_timeout).await?).await
    };
    let concluded = lease.unless_lost(work).await;
    observe::performed(lease.mode(), lease.key().operation(), called.at.elapsed());
    let Some(concluded) = concluded else { return failed(Err(owner.failed(Error::LeaseLost).into())) };
    // Whatever the service has made of the layer's refusal, it is no answer to the request.
    if let Some((resumed, mistake)) = resumed.and_then(|resumed| Some((resumed, resumed.mistake()?))) {
        owner.give_back(&mistake, &resumed.expires_at).await;
        return failed(concluded.map(|(Conclusion::Store { response, .. } | Conclusion::Free { response })| response));
    }
    let (reason, reply) = match concluded {
        Ok(Conclusion::Store { stored, response, .. }) => {
            return match owner.complete_encoded(&stored).await {
                Ok(()) => Performed { reply: Ok(response), stored: true },
                Err(error) => failed(Err(error.into())),
            };
        }
        Ok(Conclusion::Free { response }) => {
            let status = response.status();
            let proof = response.extensions().get::<NotBegun>();
            let not_begun = proof.is_some_and(|proof| proof.token == lease.token());
            if not_begun {
                lease.not_performed(());
            }
            let attached = response.extensions().get().map(|LastError(reason)| reason.clone());
            let reason = attached.unwrap_or_else(|| format!("the handler answered {status}"));
            // The rejection of another layer says nothing about the request.
            if status.is_client_error() && response.extensions().get::<Rejection>().is_none() {
                return failed(match owner.refuse(&reason, is_final(status), not_begun).await {
                    // The client would not come back, and a resumer could carry the request out after all.
                    Err(error) if is_final(status) => Err(error.into()),
                    _ => Ok(response),
                });
            }
            (reason, Ok(response))
        }
        Err(error) => (reason(&error).to_owned(), Err(error)),
    };
    owner.fail(&reason).await;
    failed(reply)
}

/// Whether this 4xx says that the request is refused. The others ask the client to repeat it.
fn is_final(status: StatusCode) -> bool {
    !matches!(
        status,
        StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS
    )
}

/// The `last_error` of a lease that was not completed.
fn reason<E>(error: &NoResponse<E>) -> &'static str {
    match error {
        NoResponse::Rejected(Rejection::Misconfigured(_)) => "the handler's response could not be stored",
        NoResponse::Rejected(Rejection::TimedOut { .. }) => "the handler ran into the layer's time-out",
        NoResponse::Rejected(_) | NoResponse::Denied(_) => "the layer refused the response",
        NoResponse::Failed(_) => "the handler failed",
        NoResponse::Panicked(_) => "the handler panicked",
    }
}

/// Why a handler cannot have the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoLease {
    /// No leased layer is in front of this handler, or the layer does not cover this method, or the request has no key.
    #[error("there is no lease here: no leased IdempotencyLayer covers this request, or the request has no key")]
    NotLent,
    /// Under `AtMostOnce`, a lease is lent once. Something inside the layer calls the handler a second time, and the
    /// first call may have had its effect. Or a middleware has taken the lease.
    #[error(
        "the lease was taken before, and under AtMostOnce it is lent once; put the code that retries outside the layer, \
         and let a middleware read the Key of the request's extensions instead"
    )]
    LentBefore,
}

impl Lease {
    /// The lease of a request, in a handler behind a [leased layer](super::IdempotencyLayer::leased). The layer renews
    /// and ends it. With axum, the lease is an extractor. Under `AtMostOnce`, take it with the body as a
    /// [`LeasedBody`](super::LeasedBody): after a refusal by an extractor beside it, the key waits for an operator.
    ///
    /// # Errors
    ///
    /// [`NoLease`].
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn of_request(extensions: &Extensions) -> Result<Self, NoLease> {
        let loan = Loan::of(extensions).ok_or(NoLease::NotLent)?;
        if loan.take() && loan.lease.mode() == Mode::AtMostOnce {
            return Err(NoLease::LentBefore);
        }
        Ok(loan.lease.clone())
    }
}

#[cfg(feature = "axum")]
impl<S: Sync> axum::extract::FromRequestParts<S> for Lease {
    type Rejection = NoLease;

    async fn from_request_parts(parts: &mut http::request::Parts, _: &S) -> Result<Self, NoLease> {
        Self::of_request(&parts.extensions)
    }
}

/// A 500 without a body: the text of the mistake is for the service's log.
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for NoLease {
    fn into_response(self) -> axum::response::Response {
        // Also for a request of anybody, if the route has no layer.
        static LINES: LazyLock<Seldom> = LazyLock::new(Seldom::default);
        if let Some(left_out) = LINES.due(None, &self.to_string()) {
            tracing::error!(error = &self as &dyn std::error::Error, left_out, "a handler cannot have its Lease");
        }
        http::StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}
