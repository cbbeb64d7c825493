//! Requests, the answers to them, and storms of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use reqwest::{Client, RequestBuilder};
use serde_json::Value;

/// Far longer than any service here needs, so only a mistake takes this long.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

pub fn client() -> Client {
    // A proxy for the outside world must not get between this client and 127.0.0.1.
    Client::builder().no_proxy().timeout(ANSWER_LIMIT).build().expect("these options need nothing of the system")
}

/// The answer to one request.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// `None` if no answer arrived.
    pub status: Option<u16>,
    pub replayed: bool,
    /// The body as it arrived. A replay is equal byte by byte.
    pub text: String,
}

impl Answer {
    pub async fn to(request: RequestBuilder) -> Self {
        let Ok(response) = request.send().await else { return Self::default() };
        let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let answer = Self {
            status: Some(response.status().as_u16()),
            replayed: text("idempotent-replayed").is_some_and(|value| value == "true"),
            text: String::new(),
        };
        match response.text().await {
            Ok(text) => Self { text, ..answer },
            Err(_) => Self::default(),
        }
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
            let problem: Value = serde_json::from_str(&self.text).unwrap_or_default();
            let kind = problem["type"].as_str().unwrap_or_default();
            write!(f, " {}", kind.rsplit(['/', ':']).next().unwrap_or_default())?;
        }
        Ok(())
    }
}

/// Answers, counted by kind.
#[derive(Default)]
pub struct Tally {
    counts: BTreeMap<String, usize>,
    /// The different bodies of the successful answers.
    bodies: BTreeSet<String>,
}

impl FromIterator<Answer> for Tally {
    fn from_iter<T: IntoIterator<Item = Answer>>(answers: T) -> Self {
        let mut tally = Self::default();
        for answer in answers {
            *tally.counts.entry(answer.to_string()).or_default() += 1;
            if answer.status.is_some_and(|status| status < 300) {
                tally.bodies.insert(answer.text);
            }
        }
        tally
    }
}

impl Tally {
    /// How many different successful answers there were.
    pub fn different(&self) -> usize {
        self.bodies.len()
    }

    /// How many answers were of this kind.
    pub fn of(&self, kind: &str) -> usize {
        self.counts.get(kind).copied().unwrap_or_default()
    }
}

/// `1 × 201, 1999 × 201 replayed`.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<String> = self.counts.iter().map(|(kind, count)| format!("{count} × {kind}")).collect();
        f.write_str(&counts.join(", "))
    }
}

/// Performs all of them, several at a time.
pub async fn storm<T>(at_a_time: usize, all: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<T> {
    stream::iter(all).buffer_unordered(at_a_time).collect().await
}
