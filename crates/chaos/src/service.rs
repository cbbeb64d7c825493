//! Calls through the HTTP layer, as a handler and its client see them. A client that hangs up is a dropped future.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, Method, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use pg_idempotency::http::{Denied, IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED, IdempotencyLayer, IdempotentTx, Rejection};
use pg_idempotency::{Idempotency, OnDuplicate, Outcome};
use sqlx::PgPool;
use tokio::sync::mpsc;
use tower::ServiceExt as _;

use crate::mutant::Mutant;
use crate::request::{Failure, Request};
use crate::world::ROUTE;

type Called = Result<Outcome<String>, Failure>;

/// The status of a `perform` that fails as the request says. The layer never answers it.
const AS_ASKED: StatusCode = StatusCode::PAYMENT_REQUIRED;
/// How long a request waits for another one with its key, unless it is to be rejected.
const WAIT: Duration = Duration::from_secs(2);

/// What callers have in common: a pool, and a layer for each setting. A layer knows the requests in flight of its
/// clones.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) pool: PgPool,
    operation: String,
    layers: Arc<Mutex<HashMap<String, IdempotencyLayer>>>,
}

impl Service {
    pub(crate) fn new(pool: PgPool, operation: &str) -> Self {
        Self { pool, operation: operation.to_owned(), layers: Arc::default() }
    }

    /// Makes the call of a request, whose effect is in the layer's transaction.
    pub(crate) async fn transactional(&self, mutant: Option<Mutant>, request: &Request) -> Called {
        let in_flight = if request.reject { OnDuplicate::Reject } else { OnDuplicate::Wait(WAIT) };
        let layer = self.layer(request.options().on_duplicate(in_flight));
        let (shared, pool) = (Arc::new(request.clone()), self.pool.clone());
        let (early, mut answered_early) = mpsc::unbounded_channel();
        let perform = move |extensions: Extensions| {
            let (request, pool, early) = (shared.clone(), pool.clone(), early.clone());
            async move {
                let mut tx = IdempotentTx::take(&extensions).map_err(|_| Failure::Refused("no transaction"))?;
                match mutant {
                    Some(Mutant::WritesApart) => request.effect(&mut *pool.acquire().await?).await,
                    Some(Mutant::AnswersBeforeCommit) => {
                        let response = request.effect(&mut tx).await?;
                        let _ = early.send(response.clone());
                        Ok(response)
                    }
                    _ => request.effect(&mut tx).await,
                }
            }
        };
        let key = &request.key;
        let called = tokio::select! {
            Some(response) = answered_early.recv() => return Ok(Outcome::Performed(response)),
            called = ask(&layer, key, key, perform.clone()) => called,
        };
        if matches!(called, Ok(Outcome::Performed(_))) {
            let other = ask(&layer, key, "another body", perform).await;
            if other.is_ok() {
                return Err(Failure::Barred("another body got an answer"));
            }
        }
        called
    }

    /// The layer with these options.
    fn layer(&self, options: Idempotency) -> IdempotencyLayer {
        let mut layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            let layer = IdempotencyLayer::transactional(self.pool.clone(), options, scope);
            // One of several services has its name in front of the route.
            match self.operation.strip_suffix(ROUTE).map(str::trim_end) {
                Some("") => layer,
                Some(name) => layer.service(name),
                None => {
                    let operation = self.operation.clone();
                    layer.operation(move |_| Some(operation.clone()))
                }
            }
        };
        layers.entry(format!("{options:?}")).or_insert_with(new).clone()
    }
}

/// The same as the value of the key, as for all calls of this suite.
fn scope(parts: &Parts) -> Result<String, Denied> {
    let value = parts.headers.get(IDEMPOTENCY_KEY).and_then(|value| value.to_str().ok());
    Ok(value.ok_or(StatusCode::UNAUTHORIZED)?.to_owned())
}

/// Sends a request through the layer to a handler that performs, and reads the answer.
async fn ask<F>(
    layer: &IdempotencyLayer,
    key: &str,
    body: &str,
    perform: impl Fn(Extensions) -> F + Clone + Send + Sync + 'static,
) -> Called
where
    F: Future<Output = Result<String, Failure>> + Send + 'static,
{
    let handler =
        post(async move |request: axum::extract::Request| answer(perform(request.into_parts().0.extensions).await));
    let mut request = http::Request::new(Full::new(Bytes::from(body.to_owned())));
    *request.method_mut() = Method::POST;
    request.headers_mut().insert(IDEMPOTENCY_KEY, key.parse().map_err(|_| Failure::Refused("not a key"))?);
    let Ok(response) = Router::new().route("/", handler).route_layer(layer.clone()).oneshot(request).await;
    if let Some(rejection) = response.extensions().get::<Rejection>() {
        return Err(Failure::Rejected(rejection.clone()));
    }
    let (status, replayed) = (response.status(), response.headers().contains_key(IDEMPOTENT_REPLAYED));
    let body = response.into_body().collect().await.map_err(|_| Failure::Barred("a broken body"))?.to_bytes();
    match status {
        StatusCode::OK => {
            let response = serde_json::from_slice(&body).map_err(|_| Failure::Barred("not what was answered"))?;
            Ok(if replayed { Outcome::Replayed(response) } else { Outcome::Performed(response) })
        }
        AS_ASKED => Err(Failure::AskedFor),
        _ => Err(Failure::Refused("the handler failed")),
    }
}

/// The handler's answer. Calls that are made without the layer store JSON too.
fn answer(performed: Result<String, Failure>) -> Response<Full<Bytes>> {
    let (status, body) = match performed {
        Ok(response) => (StatusCode::OK, serde_json::Value::from(response).to_string()),
        Err(Failure::AskedFor) => (AS_ASKED, String::new()),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, String::new()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response
}
