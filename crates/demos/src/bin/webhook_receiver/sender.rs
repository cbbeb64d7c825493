//! The sender: it signs each delivery after Standard Webhooks, and delivers again until the event is acknowledged. The
//! forger has no secret.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use demos::client::{Answer, Tally};
use reqwest::Client;
use standardwebhooks::{HEADER_WEBHOOK_ID, HEADER_WEBHOOK_SIGNATURE, HEADER_WEBHOOK_TIMESTAMP, Webhook};
use tokio::time::sleep;

use crate::receiver::Event;

/// A real sender has a schedule of minutes, then hours.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Beyond the five minutes of the standard's libraries, with room for a slow run.
const OFF: Duration = Duration::from_secs(360);

pub(crate) struct Sender {
    pub(crate) url: String,
    pub(crate) http: Client,
    pub(crate) secret: Webhook,
}

/// One delivery, with its signature.
#[derive(Clone)]
pub(crate) struct Delivery {
    id: String,
    timestamp: i64,
    signature: String,
    body: Vec<u8>,
}

impl Sender {
    /// Delivers until the event is acknowledged, and returns all answers. A 4xx will be the same next time.
    pub(crate) async fn deliver(&self, id: &str, event: &Event) -> Vec<Answer> {
        let mut answers = Vec::new();
        loop {
            let answer = self.deliver_once(id, event).await;
            let again = answer.status.is_none_or(|status| status >= 500);
            answers.push(answer);
            if !again {
                return answers;
            }
            sleep(AGAIN_AFTER).await;
        }
    }

    /// Signed anew: the signature of the first attempt would be stale by the time of the last.
    pub(crate) async fn deliver_once(&self, id: &str, event: &Event) -> Answer {
        self.post(signed(&self.secret, id, event, SystemTime::now())).await
    }

    /// Sends the same bytes twice, as an attacker with a recorded delivery does.
    pub(crate) async fn replay(&self, id: &str, event: &Event) -> [Answer; 2] {
        let recorded = signed(&self.secret, id, event, SystemTime::now());
        [self.post(recorded.clone()).await, self.post(recorded).await]
    }

    /// Sends forged and stale deliveries under the id of a real event that is still to come.
    pub(crate) async fn forge(&self, id: &str, event: &Event) -> Tally {
        let now = SystemTime::now();
        let guessed = Webhook::from_bytes(b"guessed".to_vec()).expect("any bytes are a secret");
        let dearer = Event { account: event.account.clone(), amount: event.amount + 1_000_000 };
        let genuine = signed(&self.secret, id, event, now);
        let forged = [
            signed(&guessed, id, &dearer, now),
            Delivery { body: encoded(&dearer), ..genuine.clone() },
            // A second effect of a recorded delivery.
            Delivery { id: "evt_of_the_forger".to_owned(), ..genuine },
            signed(&self.secret, id, event, now - OFF),
        ];
        let mut answers = Vec::new();
        for delivery in forged {
            answers.push(self.post(delivery).await);
        }
        answers.into_iter().collect()
    }

    async fn post(&self, Delivery { id, timestamp, signature, body }: Delivery) -> Answer {
        let request = self.http.post(format!("{}/webhooks", self.url)).header("Content-Type", "application/json");
        let request = request.header(HEADER_WEBHOOK_ID, id).header(HEADER_WEBHOOK_TIMESTAMP, timestamp);
        Answer::to(request.header(HEADER_WEBHOOK_SIGNATURE, signature).body(body)).await
    }
}

fn signed(secret: &Webhook, id: &str, event: &Event, at: SystemTime) -> Delivery {
    let timestamp = at.duration_since(UNIX_EPOCH).expect("after 1970").as_secs() as i64;
    let body = encoded(event);
    let signature = secret.sign(id, timestamp, &body).expect("the body is UTF-8");
    Delivery { id: id.to_owned(), timestamp, signature, body }
}

fn encoded(event: &Event) -> Vec<u8> {
    serde_json::to_vec(event).expect("an event is JSON")
}
