//! The loop that finishes the requests of clients that do not come back.

use std::fmt::Display;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::task::JoinSet;
use tower_service::Service;
use tracing::Instrument as _;

use super::layer::IdempotencyLayer;
use super::resume::{Abandoned, Decision};
use crate::caught::caught;
use crate::lease::{INTERVAL, INTERVALS};
use crate::limits::is_in;
use crate::session::Rests;
use crate::shutdown::{Shutdown, unless};
use crate::{BoxError, Error, Key};

/// The number of requests that one resumer sends at a time. They are in the way of the clients that wait.
const AT_A_TIME: usize = 4;

/// Finishes the requests of a leased layer whose clients do not come back. `examples/http_resumer.rs` is a service with
/// it.
///
/// It runs in each process of a fleet, or in one: several share the work.
#[derive(Clone, Debug)]
pub struct RequestResumer {
    layer: IdempotencyLayer,
    operation: String,
    interval: Duration,
}

impl RequestResumer {
    /// A resumer for the requests of one operation behind this layer, for example `POST /payments` or
    /// `POST /accounts/{}/pay`.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] if the layer stores no requests, under `AtMostOnce`, or without
    /// [`max_attempts`](crate::lease::LeaseOptions::max_attempts); and for an operation with a `{name}`, if the layer
    /// has no [`operation`](IdempotencyLayer::operation).
    pub fn new(layer: &IdempotencyLayer, operation: &str) -> Result<Self, Error> {
        layer.resumable(operation)?;
        Ok(Self { layer: layer.clone(), operation: operation.to_owned(), interval: INTERVAL })
    }

    /// Sets the pause after a search that found nothing. The default is 10 seconds.
    ///
    /// # Panics
    ///
    /// Under 100 ms or over a day.
    #[must_use]
    #[track_caller]
    pub fn interval(self, interval: Duration) -> Self {
        assert!(is_in(&INTERVALS, interval), "the interval of a resumer must be between 100 ms and a day");
        Self { interval, ..self }
    }

    /// [Resumes](IdempotencyLayer::resume_one) requests until `shutdown` is ready. Then it finishes those in progress,
    /// and ends. It logs errors, and goes on.
    ///
    /// It sends up to four requests at a time, and of each scope one after the other. **So a request that takes long
    /// delays the others of its scope**, and four such scopes delay all: give the calls of the operation a time-out.
    ///
    /// # Cancellation
    ///
    /// The requests in progress lapse, as after a crash.
    pub async fn run<D, E, S, R>(self, shutdown: impl Future<Output = ()>, decide: D, service: S)
    where
        D: AsyncFnOnce(&Key, &mut Request<Bytes>) -> Result<Decision, E> + Clone,
        E: Display,
        S: Service<Request<Full<Bytes>>, Response = Response<R>, Error: Send, Future: Send> + Clone + Send + 'static,
        S::Error: 'static,
        R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let Self { layer, operation, interval } = self;
        let shutdown = pin!(shutdown);
        let mut shutdown = Shutdown::new(shutdown);
        let mut rests = Rests::of(interval);
        let mut rest = rests.interval();
        let mut attempts = JoinSet::new();
        while unless(&mut shutdown, rested(rest, &mut attempts)).await.is_some() {
            // A clone of the service's code may panic, too.
            let searching = async {
                let found = layer.take_abandoned(&operation, &mut shutdown, decide.clone()).await?;
                Ok::<_, Error>(found.map(|found| (found, service.clone())))
            };
            rest = match caught(searching).await {
                Ok(Ok(None)) => rests.interval(),
                Ok(Ok(Some((found, service)))) => {
                    if let Abandoned::Taken(taken) = found {
                        let layer = layer.clone();
                        let attempt = async move { drop(layer.answer(taken, service).await) };
                        attempts.spawn(attempt.in_current_span());
                    }
                    rests.none()
                }
                Ok(Err(error)) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(operation, error, "a search for requests to resume failed and is tried again");
                    rests.after_error()
                }
                Err(_) => {
                    tracing::error!(operation, "a search for requests to resume panicked and is tried again");
                    rests.after_error()
                }
            };
        }
        while attempts.join_next().await.is_some() {}
    }
}

/// Returns after the rest, or when an attempt ends, because its scope may have more. Waits for the end of one if there
/// are as many as allowed.
async fn rested(rest: Duration, attempts: &mut JoinSet<()>) {
    let mut sleeping = pin!(tokio::time::sleep(rest));
    poll_fn(|context| match attempts.poll_join_next(context) {
        Poll::Ready(Some(_)) => Poll::Ready(()),
        _ if attempts.len() < AT_A_TIME => sleeping.as_mut().poll(context),
        _ => Poll::Pending,
    })
    .await;
}
