//! The customers: some click twice, some never come back, and all others ask again until they have an answer.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use demos::client::Answer;
use reqwest::Client;
use tokio::time::{sleep, timeout};

use crate::ride::NewRide;

/// After this time, the customer asks another worker.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

/// A customer, and the one ride that they want.
#[derive(Clone)]
pub(crate) struct Customer {
    number: usize,
    pub(crate) ride: NewRide,
    scope: String,
    client: Client,
    urls: Arc<Mutex<Vec<String>>>,
}

impl Customer {
    pub(crate) fn new(number: usize, scope: String, client: Client, urls: Arc<Mutex<Vec<String>>>) -> Self {
        let [from, to] = ["Alamo Square", "Union Square"].map(str::to_owned);
        let ride =
            NewRide { from, to, card: format!("tok_{number}"), phone: format!("+1202555{number:04}"), cents: 1250 };
        Self { number, ride, scope, client, urls }
    }

    /// Returns the answers that this customer gets.
    pub(crate) async fn behave(self) -> Vec<Answer> {
        match self.number % 4 {
            0 => <[Answer; 2]>::from(tokio::join!(self.ask_until_answered(), self.ask_until_answered())).to_vec(),
            1 => {
                // Hangs up at once, or some time later.
                let _ = timeout(Duration::from_millis(self.number as u64), self.ask(0)).await;
                Vec::new()
            }
            _ => vec![self.ask_until_answered().await],
        }
    }

    /// Asks with the same key until the ride is booked.
    pub(crate) async fn ask_until_answered(&self) -> Answer {
        let mut attempt = 0;
        loop {
            if let Ok(answer) = timeout(ANSWER_LIMIT, self.ask(attempt)).await
                && answer.status == Some(201)
            {
                return answer;
            }
            sleep(PAUSE).await;
            attempt += 1;
        }
    }

    /// Each attempt asks another worker.
    async fn ask(&self, attempt: usize) -> Answer {
        let url = {
            let urls = self.urls.lock().unwrap_or_else(PoisonError::into_inner);
            // A killed worker is missing here until another one has taken its place.
            urls.get((self.number + attempt) % urls.len().max(1)).cloned().unwrap_or_default()
        };
        let request = self.client.post(format!("{url}/rides")).json(&self.ride);
        let request = request.header("x-user-id", &self.scope);
        Answer::to(request.header("idempotency-key", format!("ride-{}", self.number))).await
    }
}
