//! A provider of texts, in a process of its own, and its client. It takes no idempotency key, and it can be asked.

use std::collections::{HashMap, HashSet};
use std::future::pending;
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use demos::client::client;
use demos::gateway::Receipt;
use demos::outside::Failure;
use reqwest::Client;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

/// The longest time from the end of a sender's lease to the effect of its request.
pub(crate) const LATEST: Duration = Duration::from_secs(4);
/// For a look-up.
const SLOW: Duration = Duration::from_millis(50);
/// Each so many look-ups are refused.
const REFUSED: usize = 10;
/// A sender dies when it waits for so many answers, or for so long.
const DYING: (usize, Duration) = (10, Duration::from_millis(500));

/// What becomes of the first request for a text. Its sender gets no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    TookEffect,
    TookEffectLate,
    Lost,
}

impl Outcome {
    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Self::TookEffect => "took effect",
            Self::TookEffectLate => "took effect late",
            Self::Lost => "was lost",
        }
    }
}

/// A text in the books.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Text {
    pub(crate) phone: String,
    pub(crate) first: Outcome,
    pub(crate) requests: usize,
    pub(crate) receipts: Vec<Receipt>,
}

#[derive(Serialize, Deserialize)]
struct Order {
    reference: String,
    phone: String,
    /// The end of the sender's lease. A request that arrives later is lost, so that a slow machine delivers nothing
    /// after the last probe.
    until: SystemTime,
    sender: u32,
}

#[derive(Default)]
struct Books {
    texts: HashMap<String, Text>,
    /// When each effect happens, by the number of its receipt.
    due: Vec<Instant>,
    /// When each request arrived whose sender waits.
    waiting: HashMap<u32, Vec<Instant>>,
    /// The senders that were named as dying. Their last requests may arrive later.
    named: HashSet<u32>,
    look_ups: usize,
}

type Shared = Arc<Mutex<Books>>;

fn open(books: &Shared) -> MutexGuard<'_, Books> {
    books.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends only with an error, or with the process.
pub(crate) async fn serve() -> anyhow::Result<()> {
    let router = Router::new()
        .route("/texts", post(send).get(all))
        .route("/texts/{reference}", get(find))
        .route("/deaths", get(deaths))
        .with_state(Shared::default());
    println!("{}", demos::service::serve(router).await?);
    pending().await
}

async fn send(State(shared): State<Shared>, Json(order): Json<Order>) -> Json<Receipt> {
    let answer = receive(&mut open(&shared), order);
    match answer {
        Some(receipt) => Json(receipt),
        None => pending().await,
    }
}

/// Only a repeated request gets an answer.
fn receive(books: &mut Books, order: Order) -> Option<Receipt> {
    let (now, number) = (Instant::now(), books.texts.len());
    let left = order.until.duration_since(SystemTime::now()).ok();
    let first = match number % 3 {
        _ if left.is_none() => Outcome::Lost,
        0 => Outcome::TookEffect,
        1 => Outcome::TookEffectLate,
        _ => Outcome::Lost,
    };
    let text = books.texts.entry(order.reference).or_insert_with(|| Text {
        phone: order.phone,
        first,
        requests: 0,
        receipts: Vec::new(),
    });
    text.requests += 1;
    let is_first = text.requests == 1;
    let delay = match first {
        _ if !is_first => Some(Duration::ZERO),
        Outcome::TookEffect => Some(Duration::ZERO),
        // From an eighth of the longest time to all of it.
        Outcome::TookEffectLate => {
            Some(left.unwrap_or_default() + LATEST / 8 * u32::try_from(number / 3 % 8 + 1).unwrap_or(1))
        }
        Outcome::Lost => None,
    };
    let receipt = delay.map(|delay| {
        books.due.push(now + delay);
        Receipt { number: books.due.len() }
    });
    text.receipts.extend(receipt);
    if is_first {
        if !books.named.contains(&order.sender) {
            books.waiting.entry(order.sender).or_default().push(now);
        }
        return None;
    }
    receipt
}

/// The text that was sent under this reference, if it was sent by now.
async fn find(
    State(shared): State<Shared>,
    Path(reference): Path<String>,
) -> Result<Json<Option<Receipt>>, StatusCode> {
    sleep(SLOW).await;
    let mut books = open(&shared);
    books.look_ups += 1;
    if books.look_ups.is_multiple_of(REFUSED) {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    let now = Instant::now();
    let sent = |receipt: &&Receipt| books.due[receipt.number - 1] <= now;
    Ok(Json(books.texts.get(&reference).and_then(|text| text.receipts.iter().find(sent)).copied()))
}

async fn deaths(State(shared): State<Shared>) -> Json<Vec<u32>> {
    Json(name_the_dying(&mut open(&shared)))
}

/// The senders that have to be killed, each once.
fn name_the_dying(books: &mut Books) -> Vec<u32> {
    let is_dying = |arrivals: &Vec<Instant>| arrivals.len() >= DYING.0 || arrivals[0].elapsed() >= DYING.1;
    let dying: Vec<_> = books.waiting.extract_if(|_, arrivals| is_dying(arrivals)).map(|(sender, _)| sender).collect();
    books.named.extend(&dying);
    dying
}

async fn all(State(shared): State<Shared>) -> Json<Vec<Text>> {
    Json(open(&shared).texts.values().cloned().collect())
}

/// The client of the provider.
#[derive(Clone)]
pub(crate) struct Provider {
    client: Client,
    url: String,
}

impl Provider {
    pub(crate) fn new(url: &str) -> Self {
        Self { client: client(), url: url.to_owned() }
    }

    /// Sends a text. `remaining` is what is left of the lease.
    pub(crate) async fn send(&self, reference: String, phone: &str, remaining: Duration) -> Result<Receipt, Failure> {
        let order =
            Order { reference, phone: phone.to_owned(), until: SystemTime::now() + remaining, sender: process::id() };
        let unknown = |error: reqwest::Error| Failure::Unknown(error.to_string());
        let answer = self.client.post(format!("{}/texts", self.url)).json(&order).send().await.map_err(unknown)?;
        answer.error_for_status().map_err(unknown)?.json().await.map_err(unknown)
    }

    pub(crate) async fn find(&self, reference: &str) -> anyhow::Result<Option<Receipt>> {
        self.get(&format!("/texts/{reference}")).await
    }

    pub(crate) async fn deaths(&self) -> anyhow::Result<Vec<u32>> {
        self.get("/deaths").await
    }

    /// Every text.
    pub(crate) async fn books(&self) -> anyhow::Result<Vec<Text>> {
        self.get("/texts").await
    }

    async fn get<T: serde::de::DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        Ok(self.client.get(format!("{}{path}", self.url)).send().await?.error_for_status()?.json().await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_is_named_once() {
        let mut books = Books::default();
        let send = |books: &mut Books, number: usize| {
            let until = SystemTime::now() + Duration::from_secs(60);
            let order = Order { reference: number.to_string(), phone: String::new(), until, sender: 1 };
            assert!(receive(books, order).is_none());
        };
        (0..DYING.0).for_each(|number| send(&mut books, number));
        assert_eq!(name_the_dying(&mut books), [1]);
        (DYING.0..2 * DYING.0).for_each(|number| send(&mut books, number));
        assert!(name_the_dying(&mut books).is_empty());
    }
}
