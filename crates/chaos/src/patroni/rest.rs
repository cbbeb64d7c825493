//! Patroni's REST API.

use std::time::Duration;

use reqwest::{Client, Method};
use serde_json::Value;

/// Returns the status and the body of the answer.
pub(crate) async fn request(
    port: u16,
    method: Method,
    path: &str,
    body: Option<&Value>,
    limit: Duration,
) -> anyhow::Result<(u16, String)> {
    // Each request has a connection of its own, because the node may have been killed since the last request. A proxy
    // for the outside world must not get between this client and 127.0.0.1.
    let client = Client::builder().no_proxy().timeout(limit).build()?;
    let mut request = client.request(method, format!("http://127.0.0.1:{port}{path}"));
    if let Some(body) = body {
        request = request.json(body);
    }
    let answer = request.send().await?;
    Ok((answer.status().as_u16(), answer.text().await?))
}

/// Whether this node says that it is the leader. A health check of a load balancer asks the same.
pub(crate) async fn is_leader(port: u16, limit: Duration) -> bool {
    matches!(request(port, Method::GET, "/primary", None, limit).await, Ok((200, _)))
}
