//! The loop that finishes the requests of clients that do not come back.

use std::fmt::Display;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower_service::Service;

use super::layer::IdempotencyLayer;
use super::resume::Decision;
use crate::caught::caught;
use crate::lease::{INTERVAL, INTERVALS};
use crate::limits::within;
use crate::session::Rests;
use crate::shutdown::{Shutdown, unless};
use crate::{BoxError, Error, InvalidDuration, Key};

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
    /// [`Error::InvalidLeasing`] if the layer stores no requests, under `AtMostOnce`, or without
    /// [`with_max_attempts`](crate::lease::Leasing::with_max_attempts); and for an operation with a `{name}`, if the layer
    /// has no [`with_operation`](IdempotencyLayer::with_operation).
    pub fn new(layer: &IdempotencyLayer, operation: &str) -> Result<Self, Error> {
        layer.resumable(operation)?;
        Ok(Self { layer: layer.clone(), operation: operation.to_owned(), interval: INTERVAL })
    }

    /// Sets the pause after a search that found nothing. The default is 10 seconds.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] under 100 ms or over a day.
    pub fn with_interval(self, interval: Duration) -> Result<Self, InvalidDuration> {
        Ok(Self { interval: within("interval", interval, INTERVALS)?, ..self })
    }

    /// [Resumes](IdempotencyLayer::resume_one) one request after the other until `shutdown` is ready. Then it finishes
    /// the request in progress, and ends. It logs errors, and goes on.
    ///
    /// # Cancellation
    ///
    /// The request in progress lapses, as after a crash.
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
        while unless(&mut shutdown, tokio::time::sleep(rest)).await.is_some() {
            // A clone of the service's code may panic, too.
            let resuming = async { layer.resume(&operation, &mut shutdown, decide.clone(), service.clone()).await };
            rest = match caught(resuming).await {
                Ok(Ok(None)) => rests.interval(),
                Ok(Ok(Some(_))) => rests.none(),
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
    }
}
