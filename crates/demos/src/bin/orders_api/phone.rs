//! A passenger's phone: it signs its requests, and remembers the list of orders that it has seen.

use std::time::{SystemTime, UNIX_EPOCH};

use demos::client::Answer;
use reqwest::{Client, Method, RequestBuilder, header};
use standardwebhooks::{HEADER_WEBHOOK_ID, HEADER_WEBHOOK_SIGNATURE, HEADER_WEBHOOK_TIMESTAMP};

use crate::api::{secret, signed};

#[derive(Clone)]
pub(crate) struct Phone {
    pub(crate) url: String,
    pub(crate) http: Client,
    pub(crate) passenger: String,
    pub(crate) token: String,
}

impl Phone {
    /// A request with the app's token and signature.
    pub(crate) fn request(&self, method: Method, path: &str, key: &str, body: &str) -> RequestBuilder {
        let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs() as i64;
        let signature = secret().sign(key, timestamp, &signed(&method, path, body.as_bytes())).expect("UTF-8");
        self.http
            .request(method, format!("{}{path}", self.url))
            .bearer_auth(&self.token)
            .header(HEADER_WEBHOOK_ID, key)
            .header(HEADER_WEBHOOK_TIMESTAMP, timestamp)
            .header(HEADER_WEBHOOK_SIGNATURE, signature)
            .header("Idempotency-Key", key)
            .header(header::CONTENT_TYPE, "application/json")
            .body(body.to_owned())
    }

    pub(crate) async fn send(&self, method: Method, path: &str, key: &str, body: &str) -> Answer {
        Answer::to(self.request(method, path, key, body)).await
    }

    pub(crate) async fn order(&self, key: &str, destination: &str) -> Answer {
        self.send(Method::POST, "/orders", key, &ride(destination)).await
    }

    /// Orders only if the list of orders is still the one that the passenger has seen.
    pub(crate) async fn order_if(&self, seen: &Answer, key: &str, destination: &str) -> Answer {
        let request = self.request(Method::POST, "/orders", key, &ride(destination));
        Answer::to(request.header(header::IF_MATCH, seen.etag.as_deref().unwrap_or_default())).await
    }

    pub(crate) async fn list(&self) -> Answer {
        Answer::to(self.http.get(format!("{}/orders", self.url)).bearer_auth(&self.token)).await
    }
}

pub(crate) fn ride(destination: &str) -> String {
    format!(r#"{{"destination":"{destination}"}}"#)
}
