//! The outside world: a gateway that charges cards and recognises repeats by their key, and that sends texts and does
//! not. It keeps books, and sometimes fails.

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{delete, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::sleep;

use crate::dice;
use crate::server::Server;

/// The longest time from an effect to its answer. A worker that is killed meanwhile never learns of the effect.
const DELAY: Duration = Duration::from_millis(60);

/// The gateway sends no texts to phones that begin with this.
pub const REFUSED: &str = "refused";

#[derive(Serialize, Deserialize)]
pub(crate) struct ChargeOrder {
    pub(crate) card: String,
    pub(crate) cents: i64,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct TextOrder {
    /// The caller's name for this request, by which an operator can ask for it. Each attempt has another one.
    pub(crate) reference: String,
    pub(crate) phone: String,
    /// The caller's process id, so that a demo can kill it.
    pub(crate) worker: u32,
}

/// The gateway's number for a charge or a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    pub number: usize,
}

/// What goes wrong with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mishap {
    /// The gateway refuses, and does nothing.
    Busy,
    /// The gateway answers 504, so the caller cannot know whether it is done.
    NoAnswer { done: bool },
    /// The gateway never answers, and names the caller in [`Gateway::deaths`].
    CallerDies { done: bool },
}

pub struct Gateway {
    pub server: Server,
    /// The process ids of callers that have to be killed.
    pub deaths: UnboundedReceiver<u32>,
    shared: Arc<Shared>,
}

struct Shared {
    books: Mutex<Books>,
    deaths: UnboundedSender<u32>,
    /// One request in so many fails.
    fails_one_in: Option<usize>,
}

#[derive(Default)]
struct Books {
    requests: usize,
    deduplicated: i64,
    /// The card and the receipt of each charge, by idempotency key.
    charges: HashMap<String, (String, Receipt)>,
    /// The phone of each text.
    texts: Vec<String>,
    /// By reference.
    sent: HashMap<String, Receipt>,
    withdrawn: HashSet<String>,
    /// For the next texts.
    mishaps: VecDeque<Mishap>,
}

impl Gateway {
    pub async fn start(fails_one_in: Option<usize>) -> anyhow::Result<Self> {
        let (sender, deaths) = unbounded_channel();
        let shared = Arc::new(Shared { books: Mutex::default(), deaths: sender, fails_one_in });
        let router = Router::new()
            .route("/charges", post(charge))
            .route("/texts", post(send))
            .route("/texts/{reference}", delete(withdraw))
            .with_state(shared.clone());
        Ok(Self { server: Server::start(router).await?, deaths, shared })
    }

    /// Lets the next texts fail, each in one of these ways.
    pub fn fail_next_texts(&self, mishaps: impl IntoIterator<Item = Mishap>) {
        self.shared.books().mishaps.extend(mishaps);
    }

    /// The number of requests so far.
    pub fn requests(&self) -> usize {
        self.shared.books().requests
    }

    /// The number of charges whose key the gateway had seen before.
    pub fn deduplicated(&self) -> i64 {
        self.shared.books().deduplicated
    }

    pub fn charges_of(&self, card: &str) -> usize {
        self.shared.books().charges.values().filter(|(charged, _)| charged == card).count()
    }

    pub fn texts_to(&self, phone: &str) -> usize {
        self.shared.books().texts.iter().filter(|sent| *sent == phone).count()
    }
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn random_mishap(&self) -> Option<Mishap> {
        (dice::below(self.fails_one_in?) == 0).then(|| match dice::below(3) {
            0 => Mishap::Busy,
            1 => Mishap::NoAnswer { done: true },
            _ => Mishap::NoAnswer { done: false },
        })
    }

    /// Does it, unless the mishap prevents that, and answers after a while.
    async fn answer(
        &self,
        mishap: Option<Mishap>,
        worker: u32,
        perform: impl FnOnce(&mut Books) -> Result<Receipt, StatusCode>,
    ) -> Result<Json<Receipt>, StatusCode> {
        let done = match mishap {
            Some(Mishap::Busy) => return Err(StatusCode::SERVICE_UNAVAILABLE),
            Some(Mishap::NoAnswer { done } | Mishap::CallerDies { done }) => done,
            None => true,
        };
        let performed = if done { perform(&mut self.books()) } else { Err(StatusCode::GATEWAY_TIMEOUT) };
        match mishap {
            Some(Mishap::CallerDies { .. }) => {
                // The receiver is gone only when the demo has ended.
                let _ = self.deaths.send(worker);
                pending().await
            }
            Some(_) => Err(StatusCode::GATEWAY_TIMEOUT),
            None => {
                sleep(dice::duration(Duration::ZERO, DELAY)).await;
                performed.map(Json)
            }
        }
    }
}

async fn charge(
    State(gateway): State<Arc<Shared>>,
    headers: HeaderMap,
    Json(order): Json<ChargeOrder>,
) -> Result<Json<Receipt>, StatusCode> {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok()).ok_or(StatusCode::BAD_REQUEST)?;
    gateway.books().requests += 1;
    let charge = |books: &mut Books| {
        if let Some((_, receipt)) = books.charges.get(key).cloned() {
            books.deduplicated += 1;
            return Ok(receipt);
        }
        let receipt = Receipt { number: books.charges.len() + 1 };
        books.charges.insert(key.to_owned(), (order.card, receipt));
        Ok(receipt)
    };
    gateway.answer(gateway.random_mishap(), 0, charge).await
}

async fn send(State(gateway): State<Arc<Shared>>, Json(order): Json<TextOrder>) -> Result<Json<Receipt>, StatusCode> {
    gateway.books().requests += 1;
    if order.phone.starts_with(REFUSED) {
        return Err(StatusCode::INTERNAL_SERVER_ERROR);
    }
    let planned = gateway.books().mishaps.pop_front();
    let mishap = planned.or_else(|| gateway.random_mishap());
    let send = |books: &mut Books| {
        if books.withdrawn.contains(&order.reference) {
            return Err(StatusCode::GONE);
        }
        books.texts.push(order.phone);
        let receipt = Receipt { number: books.texts.len() };
        books.sent.insert(order.reference, receipt);
        Ok(receipt)
    };
    gateway.answer(mishap, order.worker, send).await
}

/// Returns what was sent under this reference. If nothing was sent, nothing will be: a request may still
/// arrive.
async fn withdraw(
    State(gateway): State<Arc<Shared>>,
    Path(reference): Path<String>,
) -> Result<Json<Receipt>, StatusCode> {
    let mut books = gateway.books();
    if let Some(receipt) = books.sent.get(&reference) {
        return Ok(Json(*receipt));
    }
    books.withdrawn.insert(reference);
    Err(StatusCode::NOT_FOUND)
}
