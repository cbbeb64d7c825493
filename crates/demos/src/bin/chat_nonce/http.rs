//! The server, and the first transport: a request, an answer.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context as _;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, post};
use axum::{Json, Router};
use pg_idempotency::MAX_PART_BYTES;
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::message::{self, NewMessage};
use crate::problem::Problem;
use crate::socket;

/// The longest content takes 24 kB, when each of its characters is escaped as two times `\uXXXX`.
pub(crate) const BODY_LIMIT: usize = 64 * 1024;

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pool: PgPool,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<std::io::Result<()>>,
}

impl Server {
    pub(crate) async fn start(pool: PgPool) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen on a loopback port")?;
        let address = listener.local_addr()?;
        let router = Router::new()
            .route("/messages", post(post_message))
            .route("/socket", any(socket::open))
            .layer(DefaultBodyLimit::max(BODY_LIMIT))
            .with_state(pool.clone());
        let (stop, stopping) = oneshot::channel();
        let server = axum::serve(listener, router).with_graceful_shutdown(async {
            let _ = stopping.await;
        });
        Ok(Self { address, pool, stop, serving: tokio::spawn(server.into_future()) })
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        drop(self.stop);
        self.serving.await??;
        self.pool.close().await;
        Ok(())
    }
}

/// Who writes, which is the scope of the key. **A real service takes it from the authenticated session**: with a header
/// that anybody can write, anybody could write as another, or have another's message returned by guessing its nonce.
pub(crate) struct Author(pub(crate) String);

impl<S: Sync> FromRequestParts<S> for Author {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        match parts.headers.get("x-user-id").and_then(|author| author.to_str().ok()) {
            Some(author)
                if (1..=MAX_PART_BYTES).contains(&author.len()) && author.bytes().all(|b| b.is_ascii_graphic()) =>
            {
                Ok(Self(author.to_owned()))
            }
            _ => Err(Problem::new(StatusCode::UNAUTHORIZED, "no-author", "send an X-User-ID, without spaces")),
        }
    }
}

async fn post_message(State(pool): State<PgPool>, Author(author): Author, body: Bytes) -> Result<Response, Problem> {
    let new = NewMessage::from_json(&body)?;
    let outcome = message::create_message(&pool, &author, &new).await?;
    Ok((message::status(&outcome), Json(outcome.into_inner())).into_response())
}
