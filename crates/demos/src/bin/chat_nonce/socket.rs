//! The second transport: a WebSocket. A frame is the body of a `POST /messages`, and is answered by a frame with status
//! and body, in the order in which they came.

use axum::extract::State;
use axum::extract::ws::{Message as Frame, WebSocket, WebSocketUpgrade};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;
use sqlx::PgPool;

use crate::http::{Author, BODY_LIMIT};
use crate::message::{self, NewMessage};
use crate::problem::Problem;

/// The author is asked for once, when the socket opens. So is the session in a real service: close the socket when it
/// ends.
pub(crate) async fn open(State(pool): State<PgPool>, Author(author): Author, upgrade: WebSocketUpgrade) -> Response {
    upgrade.max_message_size(BODY_LIMIT).on_upgrade(async move |socket| serve(socket, &pool, &author).await)
}

/// Until the client is gone. An open socket holds no connection to the database; only a message on its way does.
async fn serve(mut socket: WebSocket, pool: &PgPool, author: &str) {
    while let Some(Ok(frame)) = socket.recv().await {
        let answer = match frame {
            Frame::Text(json) => answer(pool, author, json.as_bytes()).await,
            Frame::Binary(_) => {
                refusal(&Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "no-text", "send a text frame"))
            }
            // Answered below us.
            Frame::Ping(_) | Frame::Pong(_) | Frame::Close(_) => continue,
        };
        // A client that is gone has a nonce, and asks for this answer over whichever transport it has next.
        if socket.send(answer).await.is_err() {
            return;
        }
    }
}

async fn answer(pool: &PgPool, author: &str, json: &[u8]) -> Frame {
    let created = async {
        let new = NewMessage::from_json(json)?;
        message::create_message(pool, author, &new).await
    };
    match created.await {
        Ok(outcome) => {
            let status = message::status(&outcome).as_u16();
            Frame::text(json!({ "status": status, "body": outcome.into_inner() }).to_string())
        }
        Err(problem) => refusal(&problem),
    }
}

/// A frame has no headers, so what `Retry-After` says stands beside the status.
fn refusal(problem: &Problem) -> Frame {
    let (status, retry_after) = (problem.status.as_u16(), problem.retry_after());
    Frame::text(json!({ "status": status, "retry_after": retry_after, "body": problem.body() }).to_string())
}
