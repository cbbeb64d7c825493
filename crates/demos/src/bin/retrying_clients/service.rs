//! A service whose first six answers are failures. Five of them come from a layer in front of the idempotency layer.

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use demos::service::serve;
use futures_util::stream::{self, StreamExt as _};
use pg_idempotency::Idempotency;
use pg_idempotency::http::{IDEMPOTENT_REPLAYED, IdempotencyLayer, IdempotentTx};
use serde_json::{Value, json};
use sqlx::PgPool;
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::timeout;

/// Shorter than the time-out of the loops, and longer than they wait before their sixth attempt.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Default)]
pub(crate) struct Service {
    answers: Mutex<Vec<String>>,
    /// The order is in the transaction, which is open.
    begun: Notify,
    may_finish: Notify,
}

#[derive(serde::Deserialize)]
struct NewOrder {
    item: String,
}

impl Service {
    /// Returns the URL of its orders.
    pub(crate) async fn start(self: &Arc<Self>, pool: PgPool, customer: String) -> anyhow::Result<String> {
        let router = Router::new()
            .route("/orders", post(place))
            .with_state(self.clone())
            .route_layer(IdempotencyLayer::transactional(pool, Idempotency::new(), move |_| Ok(customer.clone())))
            .route_layer(middleware::from_fn_with_state(self.clone(), fail_at_first))
            .route("/login", get(async || "Please log in."));
        Ok(format!("{}/orders", serve(router).await?))
    }

    /// The service's answers until now.
    pub(crate) fn answers(&self) -> MutexGuard<'_, Vec<String>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn place(
    State(service): State<Arc<Service>>,
    mut tx: IdempotentTx,
    Json(new): Json<NewOrder>,
) -> Result<(StatusCode, Json<Value>), StatusCode> {
    let id: i64 = sqlx::query_scalar("insert into client_order (item) values ($1) returning id")
        .bind(&new.item)
        .fetch_one(&mut *tx)
        .await
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    service.begun.notify_one();
    // A client that takes a new key would wait here for ever.
    let _ = timeout(PATIENCE, service.may_finish.notified()).await;
    // A member of that name in an answer of the API is none of a problem document.
    Ok((StatusCode::CREATED, Json(json!({ "id": id, "retryable": true }))))
}

async fn fail_at_first(State(service): State<Arc<Service>>, request: Request, next: Next) -> Response {
    let before = service.answers().len();
    match before {
        // As of a proxy. The loops follow it, and the page has the status of a success.
        0 => {
            service.answers().push("a redirect".to_owned());
            return Redirect::to("/login").into_response();
        }
        1 => {
            service.answers().push("429".to_owned());
            return StatusCode::TOO_MANY_REQUESTS.into_response();
        }
        // As of a program that failed, or of a proxy: without a problem document.
        2 => {
            service.answers().push("500".to_owned());
            return (StatusCode::INTERNAL_SERVER_ERROR, "oh no").into_response();
        }
        3 => {
            service.answers().push("a half".to_owned());
            let half = stream::iter([Ok("{\"id\":"), Err("the connection is cut")]).then(async |part| {
                // The first part must reach the client before the connection ends.
                yield_now().await;
                part
            });
            return ([(header::CONTENT_LENGTH, "100")], Body::from_stream(half)).into_response();
        }
        4 => {
            tokio::spawn(next.run(request));
            service.begun.notified().await;
            service.answers().push("a cut".to_owned());
            // Ends the task of the connection, without a message.
            resume_unwind(Box::new("the connection is cut"));
        }
        _ => {}
    }
    let response = next.run(request).await;
    let replayed = response.headers().contains_key(IDEMPOTENT_REPLAYED);
    let status = response.status();
    service.answers().push(if replayed { "a replay" } else { status.as_str() }.to_owned());
    // The sixth answer was the refusal of a duplicate, so the order can be finished.
    service.may_finish.notify_one();
    response
}
