//! An HTTP service on a socket of this process, and the user of a request.

use std::net::Ipv4Addr;

use anyhow::Context as _;
use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use tokio::net::TcpListener;

use crate::problem::Problem;

/// Serves requests until the program ends. Returns the service's URL.
pub async fn serve(router: Router) -> anyhow::Result<String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen on a loopback port")?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(axum::serve(listener, router).into_future());
    Ok(url)
}

/// The scope of a request's key. **A real service takes the user from the authenticated session**: if anybody could
/// write this header, anybody could read another user's responses.
pub fn user(headers: &HeaderMap) -> Result<String, Problem> {
    let user = headers.get("x-user-id").and_then(|user| user.to_str().ok()).filter(|user| !user.is_empty());
    user.map(str::to_owned).ok_or_else(|| Problem::new(StatusCode::UNAUTHORIZED, "no-user", "send an X-User-ID"))
}
