//! The client of the two gateways. It tells a request that did nothing from one whose effect is unknown.

use std::time::Duration;

use pg_idempotency::Error;
use reqwest::{Client, RequestBuilder, StatusCode};
use serde::{Deserialize, Serialize};

use crate::gateways::{ChargeOrder, Receipt, TextOrder};

/// Longer than a lease, which is renewed while a gateway takes its time.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Why an attempt to book a ride failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Idempotency(#[from] Error),

    /// The gateway's manual promises that nothing was done.
    #[error("the gateway did nothing: {0}")]
    NotDone(String),

    #[error("nobody knows what the gateway did: {0}")]
    Unknown(String),
}

/// An error of a step's own statements.
impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Idempotency(error.into())
    }
}

/// A declined card is a result, and not an error: it is stored, and the next attempt does not ask again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Charged {
    Paid(Receipt),
    Declined,
}

#[derive(Clone)]
pub(crate) struct Outside {
    client: Client,
    url: String,
}

impl Outside {
    pub(crate) fn new(url: &str) -> Self {
        Self { client: Client::new(), url: url.to_owned() }
    }

    pub(crate) async fn charge(&self, order: &ChargeOrder, key: &str) -> Result<Charged, Failure> {
        let request = self.client.post(format!("{}/charges", self.url)).header("idempotency-key", key).json(order);
        match receipt(request).await? {
            Ok(receipt) => Ok(Charged::Paid(receipt)),
            Err(StatusCode::PAYMENT_REQUIRED) => Ok(Charged::Declined),
            Err(status) => Err(failure(status)),
        }
    }

    pub(crate) async fn text(&self, order: &TextOrder) -> Result<Receipt, Failure> {
        receipt(self.client.post(format!("{}/texts", self.url)).json(order)).await?.map_err(failure)
    }

    /// The text that was sent under this reference. If it is `None`, none will be sent.
    pub(crate) async fn withdraw(&self, reference: &str) -> Result<Option<Receipt>, Failure> {
        match receipt(self.client.delete(format!("{}/texts/{reference}", self.url))).await? {
            Ok(receipt) => Ok(Some(receipt)),
            Err(StatusCode::NOT_FOUND) => Ok(None),
            Err(status) => Err(failure(status)),
        }
    }
}

async fn receipt(request: RequestBuilder) -> Result<Result<Receipt, StatusCode>, Failure> {
    let answer = match request.timeout(ANSWER_LIMIT).send().await {
        Ok(answer) => answer,
        // Without a connection there was no request. All other errors may be those of the way back.
        Err(error) if error.is_connect() => return Err(Failure::NotDone(error.to_string())),
        Err(error) => return Err(Failure::Unknown(error.to_string())),
    };
    match answer.status() {
        StatusCode::OK => answer.json().await.map(Ok).map_err(|error| Failure::Unknown(error.to_string())),
        status => Ok(Err(status)),
    }
}

fn failure(status: StatusCode) -> Failure {
    let answered = format!("it answered {status}");
    match status {
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::GONE => Failure::NotDone(answered),
        _ => Failure::Unknown(answered),
    }
}
