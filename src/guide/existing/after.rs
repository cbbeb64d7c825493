use std::num::NonZeroU32;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use pg_idempotency::http::{Denied, IdempotencyLayer, IdempotentTx, LeasedBody, Runs};
use pg_idempotency::lease::{LeaseOptions, Policy, Step};
use pg_idempotency::{Error, Idempotency, Janitor, OnEscape};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};
use tokio::signal::unix::{SignalKind, signal};

mod orders {
    use super::*;

    pub(super) async fn insert(conn: &mut PgConnection, item: &str) -> sqlx::Result<i64> {
        sqlx::query("update stock set left_over = left_over - 1 where item = $1")
            .bind(item)
            .execute(&mut *conn)
            .await?;
        let insert = "insert into orders (item) values ($1) returning id";
        sqlx::query_scalar(insert).bind(item).fetch_one(conn).await
    }
}

mod payments {
    use super::*;

    pub(super) async fn insert(conn: &mut PgConnection, order: i64, charge: &str) -> sqlx::Result<i64> {
        let insert = "insert into payments (order_id, charge) values ($1, $2) returning id";
        sqlx::query_scalar(insert).bind(order).bind(charge).fetch_one(conn).await
    }
}

#[derive(Clone)]
pub(crate) struct Gateway {
    pub(crate) http: reqwest::Client,
    pub(crate) url: String,
}

impl Gateway {
    /// The inner `Err` is a declined card.
    async fn charge(&self, key: &str, cents: i64) -> anyhow::Result<Result<String, String>> {
        let request = self.http.post(&self.url).header("idempotency-key", key).json(&cents);
        let answer = request.send().await?;
        if answer.status() == StatusCode::PAYMENT_REQUIRED {
            return Ok(Err(answer.text().await?));
        }
        Ok(Ok(answer.error_for_status()?.text().await?))
    }
}

#[derive(Clone)]
pub(crate) struct AppState {
    pub(crate) pool: PgPool,
    pub(crate) gateway: Gateway,
}

pub(crate) struct AppError(anyhow::Error);

impl<E: Into<anyhow::Error>> From<E> for AppError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for AppError {
    fn into_response(self) -> Response {
        tracing::error!("{:#}", self.0);
        let error = self.0.downcast::<sqlx::Error>().map(Error::from).or_else(|other| other.downcast::<Error>());
        if error.is_ok_and(|error| error.is_transient()) {
            return (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")]).into_response();
        }
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}

type Answer = Result<(StatusCode, Json<i64>), AppError>;

async fn place(mut tx: IdempotentTx, Json(item): Json<String>) -> Answer {
    let id = orders::insert(&mut tx, &item).await?;
    Ok((StatusCode::CREATED, Json(id)))
}

async fn pay(
    State(app): State<AppState>,
    LeasedBody(lease, (Path(order), Json(cents))): LeasedBody<(Path<i64>, Json<i64>)>,
) -> Result<Response, AppError> {
    // A declined card is a value, which the step stores. After an error, a retry would send the charge again.
    let charge = async |step: &Step| app.gateway.charge(step.downstream_key(), cents).await;
    let charge = match lease.step_at_least_once("charge", charge).await? {
        Ok(charge) => charge,
        Err(declined) => return Ok((StatusCode::PAYMENT_REQUIRED, declined).into_response()),
    };
    let insert = async |conn: &mut PgConnection| anyhow::Ok(payments::insert(conn, order, &charge).await?);
    let id = lease.step("payment", insert).await?;
    Ok((StatusCode::CREATED, Json(id)).into_response())
}

#[derive(Clone)]
struct Account(String);

/// Stands for your check of a session or a token. A header is enough only if your proxy sets it, and removes the
/// client's own lines of this header.
async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let account = request.headers().get("x-account").ok_or(StatusCode::UNAUTHORIZED)?;
    let account = account.to_str().map_err(|_| StatusCode::UNAUTHORIZED)?.to_owned();
    request.extensions_mut().insert(Account(account));
    Ok(next.run(request).await)
}

fn scope(request: &Parts) -> Result<String, Denied> {
    let Account(account) = request.extensions.get().ok_or(StatusCode::UNAUTHORIZED)?;
    Ok(account.clone())
}

/// The greatest length of a body, in bytes. axum has the same limit by default.
const LIMIT: usize = 2 * 1024 * 1024;

pub(crate) fn router(app: AppState) -> anyhow::Result<(Router, [Runs; 2])> {
    // If the process dies, a retry gets a 409 until the lease has lapsed. While the process lives, it renews the lease.
    let in_steps = LeaseOptions::new(Policy::InSteps { lease: Duration::from_secs(40) })
        // A week for a person who settles a payment. After the retention, a retry charges again.
        .retention(Duration::from_secs(7 * 24 * 60 * 60))
        .max_attempts(NonZeroU32::new(10).expect("not zero"));
    // A retry after a declined card gets the stored 402, and does not send the charge again.
    let leased = IdempotencyLayer::leased(app.pool.clone(), in_steps, scope)
        .store_errors([StatusCode::PAYMENT_REQUIRED])
        .request_limit(LIMIT);
    let transactional =
        IdempotencyLayer::transactional(app.pool.clone(), Idempotency::new(), scope).request_limit(LIMIT);
    let runs = [leased.runs(), transactional.runs()];
    let orders = Router::new().route("/orders", post(place)).route_layer(transactional);
    let payments = Router::new().route("/orders/{order}/payment", post(pay)).route_layer(leased);
    let router = orders.merge(payments).route_layer(middleware::from_fn(authenticate)).with_state(app);
    Ok((router, runs))
}

pub(crate) async fn main() -> anyhow::Result<()> {
    // sqlx waits 30 seconds by default. Most clients give up earlier.
    let options = PgPoolOptions::new().acquire_timeout(Duration::from_secs(3));
    let pool = options.connect(&std::env::var("DATABASE_URL")?).await?;
    sqlx::migrate!().run(&pool).await?;
    pg_idempotency::migrate(&pool).await?;
    for table in ["stock", "orders", "payments"] {
        pg_idempotency::protect(&pool, table, OnEscape::Refuse).await?;
    }
    // Deletes expired keys. The daemon of `idempotency-janitor` can do this instead.
    tokio::spawn(Janitor::new(pool.clone()).run(std::future::pending()));
    let gateway = Gateway { http: reqwest::Client::new(), url: std::env::var("GATEWAY_URL")? };
    let listener = tokio::net::TcpListener::bind("0.0.0.0:3000").await?;
    let (router, runs) = router(AppState { pool, gateway })?;
    let mut terminated = signal(SignalKind::terminate())?;
    let stop = async move {
        terminated.recv().await;
    };
    axum::serve(listener, router).with_graceful_shutdown(stop).await?;
    // A run continues without its client. Wait for less than the platform's grace period (Kubernetes: 30 s).
    let finished = async { tokio::join!(runs[0].finished(), runs[1].finished()) };
    drop(tokio::time::timeout(Duration::from_secs(20), finished).await);
    Ok(())
}
