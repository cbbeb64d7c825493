//! Patroni's REST API, in the least HTTP that it takes.

use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Returns the status and the body of the answer.
pub(crate) async fn request(
    port: u16,
    method: &str,
    path: &str,
    body: &str,
    limit: Duration,
) -> anyhow::Result<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        anyhow::Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    let answer = timeout(limit, exchange).await.context("no answer in time")??;
    let status = answer.split(' ').nth(1).context("an answer without a status")?.parse()?;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Ok((status, body.to_owned()))
}

/// Whether this node says that it is the leader. A health check of a load balancer asks the same.
pub(crate) async fn is_leader(port: u16, limit: Duration) -> bool {
    matches!(request(port, "GET", "/primary", "", limit).await, Ok((200, _)))
}
