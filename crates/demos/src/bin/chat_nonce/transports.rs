//! The two transports. `POST /messages` is a request and an answer. On the WebSocket `/socket`, a frame is the body of a
//! `POST /messages`, and a frame with status and body answers it.

use axum::body::Bytes;
use axum::extract::ws::{Message as Frame, WebSocket, WebSocketUpgrade};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, post};
use axum::{Json, Router};
use demos::problem::Problem;
use demos::service::user;
use serde::Serialize;
use sqlx::PgPool;

use crate::message;

/// The longest content takes 24 kB, if each of its characters is escaped as two times `\uXXXX`.
const BODY_LIMIT: usize = 64 * 1024;

pub(crate) fn router(pool: PgPool) -> Router {
    Router::new()
        .route("/messages", post(over_http))
        .route("/socket", any(open_socket))
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(pool)
}

async fn over_http(State(pool): State<PgPool>, headers: HeaderMap, body: Bytes) -> Result<Response, Problem> {
    let outcome = message::create(&pool, &user(&headers)?, &body).await?;
    Ok((message::status(&outcome), Json(outcome.into_inner())).into_response())
}

/// The author is checked once, when the socket opens. A real service closes the socket when the session ends.
async fn open_socket(
    State(pool): State<PgPool>,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Problem> {
    let author = user(&headers)?;
    Ok(upgrade.max_message_size(BODY_LIMIT).on_upgrade(async move |socket| serve(socket, &pool, &author).await))
}

/// An open socket holds no connection to the database. Only a message that is being created does.
async fn serve(mut socket: WebSocket, pool: &PgPool, author: &str) {
    while let Some(Ok(frame)) = socket.recv().await {
        let Frame::Text(json) = frame else { continue };
        let answer = match message::create(pool, author, json.as_bytes()).await {
            Ok(outcome) => answered(message::status(&outcome), outcome.into_inner()),
            Err(problem) => answered(problem.status, problem.body()),
        };
        // A client that is gone has its nonce, and asks again over the transport that it has next.
        if socket.send(answer).await.is_err() {
            return;
        }
    }
}

/// The body has the same bytes as over HTTP.
fn answered(status: StatusCode, body: impl Serialize) -> Frame {
    let body = serde_json::to_string(&body).expect("the body of an answer is JSON");
    Frame::text(format!(r#"{{"status":{},"body":{body}}}"#, status.as_u16()))
}
