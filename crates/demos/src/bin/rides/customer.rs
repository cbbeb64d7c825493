//! The customers: some click twice, some never come back, and all others ask again until they have an answer.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use demos::client::Answer;
use demos::dice;
use reqwest::Client;
use tokio::time::{sleep, timeout};

use crate::ride::NewRide;

/// After this time, the customer asks another worker.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(300)];
/// Clients that never come back wait this long.
const PATIENCE: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(150)];

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

    pub(crate) fn comes_back(&self) -> bool {
        self.number % 4 != 1
    }

    /// Returns the answers that this customer gets.
    pub(crate) async fn behave(self) -> Vec<Answer> {
        match self.number % 4 {
            0 => {
                let (first, second) = tokio::join!(self.ask_until_answered(), self.ask_until_answered());
                vec![first, second]
            }
            1 => {
                let _ = timeout(dice::duration(PATIENCE[0], PATIENCE[1]), self.ask()).await;
                Vec::new()
            }
            _ => vec![self.ask_until_answered().await],
        }
    }

    /// Asks with the same key until the ride is booked.
    pub(crate) async fn ask_until_answered(&self) -> Answer {
        loop {
            if let Ok(answer) = timeout(ANSWER_LIMIT, self.ask()).await
                && answer.status == Some(201)
            {
                return answer;
            }
            sleep(dice::duration(PAUSES[0], PAUSES[1])).await;
        }
    }

    async fn ask(&self) -> Answer {
        let url = {
            let urls = self.urls.lock().unwrap_or_else(PoisonError::into_inner);
            // A killed worker is missing here until another one has taken its place.
            urls.get(dice::below(urls.len().max(1))).cloned().unwrap_or_default()
        };
        let request = self.client.post(format!("{url}/rides")).json(&self.ride);
        let request = request.header("x-user-id", &self.scope);
        Answer::to(request.header("idempotency-key", format!("ride-{}", self.number))).await
    }
}
