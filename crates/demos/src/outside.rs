//! The client of the [`gateway`](crate::gateway). It tells a request that did nothing from one whose effect is unknown.

use std::process;

use pg_idempotency::Error;
use reqwest::{Client, RequestBuilder, StatusCode};
use serde::de::DeserializeOwned;

use crate::client::client;
use crate::gateway::{ChargeOrder, Receipt, TextOrder};

/// Why an operation with an effect outside the database failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Idempotency(#[from] Error),

    /// The gateway's manual promises that nothing was done.
    #[error("the gateway did nothing: {0}")]
    NotDone(String),

    #[error("it is unknown what the gateway did: {0}")]
    Unknown(String),
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Idempotency(error.into())
    }
}

#[derive(Clone)]
pub struct Outside {
    client: Client,
    url: String,
}

/// The name under which the gateway sees a text of this attempt. An operator can derive it.
pub fn reference(downstream_key: &str, attempt: u32) -> String {
    format!("{downstream_key}-{attempt}")
}

impl Outside {
    pub fn new(url: &str) -> Self {
        Self { client: client(), url: url.to_owned() }
    }

    pub async fn charge(&self, card: &str, cents: i64, key: &str) -> Result<Receipt, Failure> {
        let order = ChargeOrder { card: card.to_owned(), cents, worker: process::id() };
        let request = self.client.post(format!("{}/charges", self.url)).header("idempotency-key", key);
        answer(request.json(&order)).await
    }

    pub async fn text(&self, reference: String, phone: &str) -> Result<Receipt, Failure> {
        let order = TextOrder { reference, phone: phone.to_owned(), worker: process::id() };
        answer(self.client.post(format!("{}/texts", self.url)).json(&order)).await
    }

    /// The text that was sent under this reference. If it is `None`, none will be sent.
    pub async fn withdraw(&self, reference: &str) -> Result<Option<Receipt>, Failure> {
        answer(self.client.delete(format!("{}/texts/{reference}", self.url))).await
    }
}

async fn answer<T: DeserializeOwned>(request: RequestBuilder) -> Result<T, Failure> {
    let answer = match request.send().await {
        Ok(answer) => answer,
        // Without a connection there was no request. Any other error may have happened on the way back.
        Err(error) if error.is_connect() => return Err(Failure::NotDone(error.to_string())),
        Err(error) => return Err(Failure::Unknown(error.to_string())),
    };
    match answer.status() {
        StatusCode::OK => answer.json().await.map_err(|error| Failure::Unknown(error.to_string())),
        status @ (StatusCode::SERVICE_UNAVAILABLE | StatusCode::GONE) => Err(Failure::NotDone(status.to_string())),
        status => Err(Failure::Unknown(status.to_string())),
    }
}
