//! The run of a leased layer. The run claims the key, lends the lease to the handler, and stores the handler's response
//! or frees the key.

use std::borrow::Cow;
use std::pin::pin;

use http::StatusCode;

use super::body::{ByteBody, LayerBody};
use super::extensions::{FromResumer, LastError, LentLease, NotBegun, WithoutKey};
use super::handler::{Called, Conclusion, Handler, NoResponse, Ran, Reply, conclude};
use super::layer::IdempotencyLayer;
use super::places::Turn;
use super::rejection::Rejection;
use super::replay::replay;
use super::request::Ticket;
use crate::lease::{Acquired, Lease, LeaseCall, LeaseOptions, LeaseOwner};
use crate::observe::timed_work;
use crate::record::CalledAt;
use crate::{Error, Mode};

/// Claims the key, calls the handler and stores its response. If there is a stored response, replays it instead.
pub(super) async fn run<R: ByteBody, E>(
    layer: &IdempotencyLayer,
    options: LeaseOptions,
    ticket: &Ticket,
    mut turn: Turn<'_>,
    handler: Handler<R, E>,
) -> Reply<R, E> {
    let (asked, request) = (CalledAt::since(ticket.arrived), ticket.stored.as_deref().map(Cow::Borrowed));
    let call = LeaseCall::new(options, &layer.pool, &ticket.key, ticket.fingerprint, request, asked)?;
    match call.acquire(&mut turn).await? {
        Acquired::Replayed(stored) => Ok(replay(stored)?),
        Acquired::Owner(owner) => {
            turn.hold_key();
            Ok(perform(layer, owner, handler).await?.into_response())
        }
    }
}

/// Calls the handler for a request without a key. The handler gets no lease.
pub(super) async fn run_without_key<R, E>(layer: &IdempotencyLayer, mut handler: Handler<R, E>) -> Reply<R, E> {
    handler.extensions.insert(WithoutKey);
    Ok(handler.call(layer.run_timeout).await?.map(LayerBody::untouched))
}

/// Calls the handler, and stores its response or releases the claim. Releases the claim of a resumed request, if the
/// layer in the service has found another key for the request than the record has.
pub(super) async fn perform<R: ByteBody, E>(
    layer: &IdempotencyLayer,
    mut owner: LeaseOwner,
    mut handler: Handler<R, E>,
) -> Result<Ran<R>, NoResponse<E>> {
    let lease = Lease::clone(&owner);
    let resumed = handler.extensions.get::<FromResumer>().cloned();
    handler.extensions.insert(LentLease::new(lease.clone()));
    let called = Called::now(&handler, true);
    // The response body is a part of the work, because the body may also have effects outside the database.
    let work = async {
        owner.begin();
        conclude(layer, called, handler.call(layer.run_timeout).await?).await
    };
    let work = lease.unless_lost(work);
    let concluded = timed_work(lease.mode(), lease.operation(), pin!(work)).await;
    let Some(concluded) = concluded else { return Err(owner.failed(Error::LeaseLost).into()) };
    // The layer in the service has refused the request. The service may have changed the response of that layer, but
    // even the changed response is not an answer to the request.
    if let Some(mistake) = resumed.as_ref().and_then(FromResumer::mistake) {
        owner.fail(&mistake).await;
        let (Conclusion::Store { response, .. } | Conclusion::Free { response }) = concluded?;
        return Ok(Ran::Failed(response));
    }
    let (reason, ran) = match concluded {
        Ok(Conclusion::Store { stored, response, .. }) => {
            owner.complete_encoded(&stored).await?;
            return Ok(Ran::Performed(response));
        }
        Ok(Conclusion::Free { response }) => {
            let status = response.status();
            // Before the layer itself uses the lease.
            let is_used = lease.is_used();
            let not_begun = NotBegun::is_proved(response.extensions(), &lease);
            if not_begun {
                lease.not_performed(());
            } else if !is_used && lease.mode() == Mode::AtMostOnce && comes_before_a_handler(status) {
                warn_of_a_lost_key(layer, &lease, status);
            }
            let attached = response.extensions().get().map(|LastError(reason)| reason.clone());
            let reason = attached.unwrap_or_else(|| format!("the handler answered {status}"));
            // If another idempotency layer has rejected the request, the handler has not refused it.
            if status.is_client_error() && response.extensions().get::<Rejection>().is_none() {
                return match owner.refuse(&reason, is_final(status), not_begun).await {
                    // The statement failed, so the record still has the request. The client must not get the refusal,
                    // because a resumer could perform the request.
                    Err(error) if is_final(status) => Err(error.into()),
                    _ => Ok(Ran::Failed(response)),
                };
            }
            (reason, Ok(Ran::Failed(response)))
        }
        Err(error) => (reason(&error).to_owned(), Err(error)),
    };
    owner.fail(&reason).await;
    ran
}

/// Whether this 4xx is a final refusal. The other 4xx ask the client to repeat the request.
fn is_final(status: StatusCode) -> bool {
    !matches!(
        status,
        StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS
    )
}

/// Whether a router or an extractor usually gives this answer, and a handler seldom does.
fn comes_before_a_handler(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::METHOD_NOT_ALLOWED | StatusCode::PAYLOAD_TOO_LARGE | StatusCode::UNSUPPORTED_MEDIA_TYPE
    )
}

/// Warns, once for each route, of a refusal that leaves the key indeterminate, although the handler has probably not
/// begun. The refusal has no proof of this, so the key waits for an operator.
fn warn_of_a_lost_key(layer: &IdempotencyLayer, lease: &Lease, status: StatusCode) {
    let operation = lease.operation();
    if layer.lost_keys.is_first(operation) {
        tracing::warn!(
            operation,
            token = lease.token(),
            status = status.as_u16(),
            "a request ended before any code had used its lease, and its key is indeterminate under AtMostOnce; if the \
             handler did not run, let it take its body as LeasedBody, and give the Router the fallbacks not_found and \
             method_not_allowed"
        );
    }
}

fn reason<E>(error: &NoResponse<E>) -> &'static str {
    match error {
        NoResponse::Rejected(Rejection::Misconfigured(_)) => "the handler's response could not be stored",
        NoResponse::Rejected(Rejection::TimedOut { .. }) => "the handler ran into the layer's time-out",
        NoResponse::Rejected(_) | NoResponse::Denied(_) => "the layer refused the response",
        NoResponse::Failed(_) => "the handler failed",
        NoResponse::Panicked(_) => "the handler panicked",
    }
}
