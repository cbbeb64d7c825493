use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
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

    pub(super) async fn insert(pool: &PgPool, order: i64, charge: &str) -> sqlx::Result<i64> {
        let insert = "insert into payments (order_id, charge) values ($1, $2) returning id";
        sqlx::query_scalar(insert).bind(order).bind(charge).fetch_one(pool).await
    }
}

#[derive(Clone)]
pub(crate) struct Gateway {
    pub(crate) http: reqwest::Client,
    pub(crate) url: String,
}

impl Gateway {
    /// The inner `Err` is a declined card.
    async fn charge(&self, cents: i64) -> anyhow::Result<Result<String, String>> {
        let request = self.http.post(&self.url).json(&cents);
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
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}

type Answer = Result<(StatusCode, Json<i64>), AppError>;

async fn place(State(app): State<AppState>, Json(item): Json<String>) -> Answer {
    let mut tx = app.pool.begin().await?;
    let id = orders::insert(&mut tx, &item).await?;
    tx.commit().await?;
    Ok((StatusCode::CREATED, Json(id)))
}

async fn pay(
    State(app): State<AppState>,
    Path(order): Path<i64>,
    Json(cents): Json<i64>,
) -> Result<Response, AppError> {
    let charge = match app.gateway.charge(cents).await? {
        Ok(charge) => charge,
        Err(declined) => return Ok((StatusCode::PAYMENT_REQUIRED, declined).into_response()),
    };
    let id = payments::insert(&app.pool, order, &charge).await?;
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

pub(crate) fn router(app: AppState) -> anyhow::Result<Router> {
    let orders = Router::new().route("/orders", post(place));
    let payments = Router::new().route("/orders/{order}/payment", post(pay));
    Ok(orders.merge(payments).route_layer(middleware::from_fn(authenticate)).with_state(app))
}

pub(crate) async fn main() -> anyhow::Result<()> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    sqlx::migrate!().run(&pool).await?;
    let gateway = Gateway { http: reqwest::Client::new(), url: std::env::var("GATEWAY_URL")? };
    let listener = tokio::net::TcpListener::bind("0.0.0.0:3000").await?;
    let router = router(AppState { pool, gateway })?;
    let mut terminated = signal(SignalKind::terminate())?;
    let stop = async move {
        terminated.recv().await;
    };
    axum::serve(listener, router).with_graceful_shutdown(stop).await?;
    Ok(())
}
