//! A passenger's phone: it signs what it sends, and reads what comes back.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use reqwest::{Method, RequestBuilder, header};
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::signature;

#[derive(Clone)]
pub(crate) struct Phone {
    pub(crate) address: SocketAddr,
    pub(crate) http: reqwest::Client,
    pub(crate) passenger: String,
    pub(crate) token: String,
}

/// What came back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    /// None where nothing came.
    pub(crate) status: Option<u16>,
    pub(crate) replayed: bool,
    pub(crate) retry_after: Option<u64>,
    pub(crate) etag: Option<String>,
    /// As it came: a replay is equal byte by byte.
    pub(crate) text: String,
}

impl Phone {
    /// A request as the app makes it: with its token and its signature.
    pub(crate) fn request(&self, method: Method, path: &str, key: &str, body: &str) -> RequestBuilder {
        let signature = signature::sign(&method, path, body.as_bytes());
        self.http
            .request(method, format!("http://{}{path}", self.address))
            .bearer_auth(&self.token)
            .header(signature::HEADER, signature)
            .header("Idempotency-Key", key)
            .header(header::CONTENT_TYPE, "application/json")
            .body(body.to_owned())
    }

    pub(crate) async fn order(&self, key: &str, destination: &str) -> Answer {
        answer(self.request(Method::POST, "/orders", key, &ride(destination))).await
    }

    /// Orders if the list of orders is still the one that the passenger has seen.
    pub(crate) async fn order_if(&self, seen: &Answer, key: &str, destination: &str) -> Answer {
        let etag = seen.etag.as_deref().unwrap_or_default();
        let request = self.request(Method::POST, "/orders", key, &ride(destination));
        answer(request.header(header::IF_MATCH, etag)).await
    }

    pub(crate) async fn send(&self, method: Method, path: &str, key: &str, body: &str) -> Answer {
        answer(self.request(method, path, key, body)).await
    }

    pub(crate) async fn list(&self) -> Answer {
        answer(self.http.get(format!("http://{}/orders", self.address)).bearer_auth(&self.token)).await
    }

    /// Sends an order, and leaves the answer to whoever drops the connection.
    pub(crate) async fn order_and_lose_sight(&self, key: &str, destination: &str) -> anyhow::Result<TcpStream> {
        let (body, Self { address, token, .. }) = (ride(destination), self);
        let signature = signature::sign(&Method::POST, "/orders", body.as_bytes());
        let request = format!(
            "POST /orders HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\nX-Signature: {signature}\r\n\
             Idempotency-Key: {key}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len(),
        );
        let mut connection = TcpStream::connect(address).await?;
        connection.write_all(request.as_bytes()).await?;
        Ok(connection)
    }

    /// Asks again as long as it is told to: after as many seconds as the answer says.
    pub(crate) async fn order_patiently(&self, key: &str, destination: &str) -> Answer {
        loop {
            let answer = self.order(key, destination).await;
            match answer.retry_after {
                Some(seconds) => sleep(Duration::from_secs(seconds)).await,
                None => return answer,
            }
        }
    }
}

pub(crate) fn ride(destination: &str) -> String {
    format!(r#"{{"destination":"{destination}"}}"#)
}

pub(crate) async fn answer(request: RequestBuilder) -> Answer {
    let Ok(response) = request.send().await else { return Answer::default() };
    let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let answer = Answer {
        status: Some(response.status().as_u16()),
        replayed: text("idempotency-replayed").is_some_and(|value| value == "true"),
        retry_after: text("retry-after").and_then(|seconds| seconds.parse().ok()),
        etag: text("etag"),
        text: String::new(),
    };
    match response.text().await {
        Ok(text) => Answer { text, ..answer },
        Err(_) => Answer::default(),
    }
}

impl Answer {
    pub(crate) fn json(&self, member: &str) -> String {
        let json: Value = serde_json::from_str(&self.text).unwrap_or_default();
        json[member].as_str().map_or_else(|| json[member].to_string(), str::to_owned)
    }
}

/// `201`, `200 replayed`, `409 in-flight`.
impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(status) = self.status else { return f.write_str("no answer") };
        write!(f, "{status}")?;
        if self.replayed {
            f.write_str(" replayed")?;
        }
        if status >= 400 {
            let problem = self.json("type");
            write!(f, " {}", problem.rsplit(['/', ':']).next().unwrap_or_default())?;
        }
        Ok(())
    }
}
