//! A service whose first three answers are failures. They come from a layer in front of the idempotency layer.

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Json, Router};
use demos::server::Server;
use pg_idempotency::Idempotency;
use pg_idempotency::http::{IDEMPOTENT_REPLAYED, IdempotencyLayer, IdempotentTx};
use sqlx::PgPool;
use tokio::sync::Notify;
use tokio::time::timeout;

/// Shorter than the time-out of the loops, and longer than they wait before their third attempt.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug)]
pub(crate) enum Answered {
    With(u16),
    Replayed,
    /// The order was being placed, and the connection was cut.
    Cut,
}

pub(crate) struct Service {
    pub(crate) url: String,
    plan: Arc<Plan>,
    _server: Server,
}

#[derive(Default)]
struct Plan {
    answers: Mutex<Vec<Answered>>,
    /// The order is in the transaction, which is open.
    begun: Notify,
    may_finish: Notify,
}

#[derive(serde::Deserialize)]
struct NewOrder {
    item: String,
}

impl Service {
    pub(crate) async fn start(pool: PgPool, customer: String) -> anyhow::Result<Self> {
        let plan = Arc::new(Plan::default());
        let router = Router::new()
            .route("/orders", post(place))
            .with_state(plan.clone())
            .route_layer(IdempotencyLayer::transactional(pool, Idempotency::new(), move |_| Ok(customer.clone())))
            .route_layer(middleware::from_fn_with_state(plan.clone(), fail_at_first));
        let server = Server::start(router).await?;
        Ok(Self { url: format!("{}/orders", server.url), plan, _server: server })
    }

    pub(crate) fn answers(&self) -> Vec<Answered> {
        self.plan.answers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn place(
    State(plan): State<Arc<Plan>>,
    mut tx: IdempotentTx,
    Json(new): Json<NewOrder>,
) -> Result<(StatusCode, Json<i64>), StatusCode> {
    let id = sqlx::query_scalar("insert into client_order (item) values ($1) returning id")
        .bind(&new.item)
        .fetch_one(&mut *tx)
        .await
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    plan.begun.notify_one();
    // A client that takes a new key would wait here for ever.
    let _ = timeout(PATIENCE, plan.may_finish.notified()).await;
    Ok((StatusCode::CREATED, Json(id)))
}

async fn fail_at_first(State(plan): State<Arc<Plan>>, request: Request, next: Next) -> Response {
    let answered = |answer| plan.answers.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
    let before = plan.answers.lock().unwrap_or_else(PoisonError::into_inner).len();
    match before {
        0 => {
            answered(Answered::With(503));
            return StatusCode::SERVICE_UNAVAILABLE.into_response();
        }
        1 => {
            tokio::spawn(next.run(request));
            plan.begun.notified().await;
            answered(Answered::Cut);
            // Ends the task of the connection, without a message.
            resume_unwind(Box::new("the connection is cut"));
        }
        _ => {}
    }
    let response = next.run(request).await;
    let replayed = response.headers().contains_key(IDEMPOTENT_REPLAYED);
    answered(if replayed { Answered::Replayed } else { Answered::With(response.status().as_u16()) });
    // The third answer was the refusal of a duplicate, so the order can be finished.
    plan.may_finish.notify_one();
    response
}
