//! The sender: it signs each delivery, and delivers again until it is acknowledged. The forger has no secret.

use std::time::{Duration, SystemTime};

use demos::client::{Answer, Tally};
use demos::signature::{HEADER, Secret};
use reqwest::Client;
use tokio::time::sleep;

use crate::receiver::Event;

/// A real sender has a schedule of minutes, then hours.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Beyond the five minutes of the receiver's tolerance, with room for a slow run.
const OFF: Duration = Duration::from_secs(360);

pub(crate) struct Sender {
    pub(crate) url: String,
    pub(crate) http: Client,
    pub(crate) secret: Secret,
}

impl Sender {
    /// Delivers until the event is acknowledged, and returns all answers. A 4xx will be the same next time.
    pub(crate) async fn deliver(&self, event: &Event) -> Vec<Answer> {
        let mut answers = Vec::new();
        loop {
            let answer = self.deliver_once(event).await;
            let again = answer.status.is_none_or(|status| status >= 500);
            answers.push(answer);
            if !again {
                return answers;
            }
            sleep(AGAIN_AFTER).await;
        }
    }

    /// Signed anew: the signature of the first attempt would be stale by the time of the last.
    pub(crate) async fn deliver_once(&self, event: &Event) -> Answer {
        let body = encoded(event);
        let signature = self.secret.sign(&body, SystemTime::now());
        self.post(body, &signature).await
    }

    async fn post(&self, body: Vec<u8>, signature: &str) -> Answer {
        let request = self.http.post(format!("{}/webhooks", self.url)).header("Content-Type", "application/json");
        Answer::to(request.header(HEADER, signature).body(body)).await
    }

    /// Sends forged and stale deliveries under the id of a real event that is still to come.
    pub(crate) async fn forge(&self, event: &Event) -> Tally {
        let now = SystemTime::now();
        let genuine = encoded(event);
        let dearer = Event { id: event.id.clone(), account: event.account.clone(), amount: event.amount + 1_000_000 };
        let changed = encoded(&dearer);
        let answers = [
            self.post(changed.clone(), &Secret::new(b"whsec_guessed").sign(&changed, now)).await,
            self.post(changed, &self.secret.sign(&genuine, now)).await,
            self.post(genuine.clone(), &self.secret.sign(&genuine, now - OFF)).await,
        ];
        answers.into_iter().collect()
    }
}

fn encoded(event: &Event) -> Vec<u8> {
    serde_json::to_vec(event).expect("an event is JSON")
}
