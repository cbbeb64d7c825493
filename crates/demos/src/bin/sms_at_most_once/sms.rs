//! The gateway's client. Its one subtlety is to tell what was not sent from what nobody knows.

use std::process;
use std::time::Duration;

use anyhow::Context as _;
use pg_idempotency::Error;
use reqwest::{Client, StatusCode};

use crate::gateway::{Order, Receipt};
use crate::job::Job;

/// Longer than a lease: it is renewed while the gateway takes its time.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Why a text was neither sent for certain nor replayed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Idempotency(#[from] Error),

    /// For certain.
    #[error("not sent: {0}")]
    NotSent(String),

    #[error("perhaps sent: {0}")]
    Unknown(String),
}

pub(crate) struct Sms {
    client: Client,
    url: String,
}

impl Sms {
    pub(crate) fn new(url: &str) -> Self {
        Self { client: Client::new(), url: format!("{url}/texts") }
    }

    pub(crate) async fn send(&self, job: &Job) -> Result<Receipt, Failure> {
        let (phone, text) = (job.text.phone.clone(), job.text.text.clone());
        let order = Order { job: job.number, phone, text, worker: process::id() };
        let answer = self.client.post(&self.url).timeout(ANSWER_LIMIT).json(&order).send().await;
        let answer = match answer {
            Ok(answer) => answer,
            // Without a connection there was no request. All other errors may be those of the way back.
            Err(error) if error.is_connect() => return Err(Failure::NotSent(error.to_string())),
            Err(error) => return Err(Failure::Unknown(error.to_string())),
        };
        match answer.status() {
            StatusCode::OK => answer.json().await.map_err(|error| Failure::Unknown(error.to_string())),
            // The gateway's manual promises that nothing was sent. A 500 or 504 promises nothing.
            status @ StatusCode::SERVICE_UNAVAILABLE => Err(Failure::NotSent(format!("the gateway answered {status}"))),
            status => Err(Failure::Unknown(format!("the gateway answered {status}"))),
        }
    }

    /// What the gateway knows of a job: nothing, or the text that it has sent.
    pub(crate) async fn look_up(&self, job: i64) -> anyhow::Result<Option<Receipt>> {
        let answer = self.client.get(format!("{}/{job}", self.url)).timeout(ANSWER_LIMIT).send().await;
        let answer = answer.context("the gateway does not answer")?;
        match answer.status() {
            StatusCode::NOT_FOUND => Ok(None),
            _ => Ok(Some(answer.error_for_status()?.json().await?)),
        }
    }
}
