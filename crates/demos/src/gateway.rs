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

use crate::service::serve;

/// The time from an effect to its answer. A worker that is killed meanwhile never learns of the effect.
const DELAY: Duration = Duration::from_millis(30);

/// The gateway sends no texts to phones that begin with this.
pub const REFUSED: &str = "refused";

#[derive(Serialize, Deserialize)]
pub(crate) struct ChargeOrder {
    pub(crate) card: String,
    pub(crate) cents: i64,
    /// The caller's process id, so that a demo can kill it.
    pub(crate) worker: u32,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct TextOrder {
    /// The caller's name for this request, by which an operator can ask for it. Each attempt has another one.
    pub(crate) reference: String,
    pub(crate) phone: String,
    /// As for a charge.
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
    /// The gateway never answers this caller again, and names it in [`Gateway::deaths`].
    CallerDies { done: bool },
}

pub struct Gateway {
    pub url: String,
    /// The process ids of callers that have to be killed.
    pub deaths: UnboundedReceiver<u32>,
    shared: Arc<Shared>,
}

struct Shared {
    books: Mutex<Books>,
    deaths: UnboundedSender<u32>,
}

#[derive(Default)]
struct Books {
    /// Charges whose key the gateway had seen before.
    deduplicated: i64,
    /// The card and the receipt of each charge, by idempotency key.
    charges: HashMap<String, (String, Receipt)>,
    /// The phone of each text.
    texts: Vec<String>,
    /// By reference.
    sent: HashMap<String, Receipt>,
    withdrawn: HashSet<String>,
    /// For the next charges.
    charge_mishaps: VecDeque<Mishap>,
    /// For the next texts.
    text_mishaps: VecDeque<Mishap>,
    /// The callers that have to be killed.
    dying: HashSet<u32>,
}

impl Gateway {
    pub async fn start() -> anyhow::Result<Self> {
        let (sender, deaths) = unbounded_channel();
        let shared = Arc::new(Shared { books: Mutex::default(), deaths: sender });
        let router = Router::new()
            .route("/charges", post(charge))
            .route("/texts", post(send))
            .route("/texts/{reference}", delete(withdraw))
            .with_state(shared.clone());
        Ok(Self { url: serve(router).await?, deaths, shared })
    }

    /// Lets the next charges fail, each in one of these ways.
    pub fn fail_next_charges(&self, mishaps: impl IntoIterator<Item = Mishap>) {
        self.shared.books().charge_mishaps.extend(mishaps);
    }

    /// Lets the next texts fail, each in one of these ways.
    pub fn fail_next_texts(&self, mishaps: impl IntoIterator<Item = Mishap>) {
        self.shared.books().text_mishaps.extend(mishaps);
    }

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

    /// Does it, unless the next mishap prevents that. `None` is never answered.
    fn perform(
        &self,
        mishaps: impl FnOnce(&mut Books) -> &mut VecDeque<Mishap>,
        worker: u32,
        perform: impl FnOnce(&mut Books) -> Result<Receipt, StatusCode>,
    ) -> Option<Result<Receipt, StatusCode>> {
        let mut books = self.books();
        if books.dying.contains(&worker) {
            return None;
        }
        match mishaps(&mut books).pop_front() {
            None => Some(perform(&mut books)),
            Some(Mishap::Busy) => Some(Err(StatusCode::SERVICE_UNAVAILABLE)),
            Some(Mishap::NoAnswer { done }) => {
                let _ = done.then(|| perform(&mut books));
                Some(Err(StatusCode::GATEWAY_TIMEOUT))
            }
            Some(Mishap::CallerDies { done }) => {
                let _ = done.then(|| perform(&mut books));
                books.dying.insert(worker);
                // The receiver is gone only when the demo has ended.
                let _ = self.deaths.send(worker);
                None
            }
        }
    }
}

async fn answer(performed: Option<Result<Receipt, StatusCode>>) -> Result<Json<Receipt>, StatusCode> {
    let Some(performed) = performed else { return pending().await };
    sleep(DELAY).await;
    performed.map(Json)
}

async fn charge(
    State(gateway): State<Arc<Shared>>,
    headers: HeaderMap,
    Json(order): Json<ChargeOrder>,
) -> Result<Json<Receipt>, StatusCode> {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok()).ok_or(StatusCode::BAD_REQUEST)?;
    let charge = |books: &mut Books| {
        if let Some((_, receipt)) = books.charges.get(key).cloned() {
            books.deduplicated += 1;
            return Ok(receipt);
        }
        let receipt = Receipt { number: books.charges.len() + 1 };
        books.charges.insert(key.to_owned(), (order.card, receipt));
        Ok(receipt)
    };
    answer(gateway.perform(|books| &mut books.charge_mishaps, order.worker, charge)).await
}

async fn send(State(gateway): State<Arc<Shared>>, Json(order): Json<TextOrder>) -> Result<Json<Receipt>, StatusCode> {
    if order.phone.starts_with(REFUSED) {
        return Err(StatusCode::INTERNAL_SERVER_ERROR);
    }
    let send = |books: &mut Books| {
        if books.withdrawn.contains(&order.reference) {
            return Err(StatusCode::GONE);
        }
        books.texts.push(order.phone);
        let receipt = Receipt { number: books.texts.len() };
        books.sent.insert(order.reference, receipt);
        Ok(receipt)
    };
    answer(gateway.perform(|books| &mut books.text_mishaps, order.worker, send)).await
}

/// Returns what was sent under this reference. If nothing was sent, nothing will be: a request may still arrive.
async fn withdraw(State(gateway): State<Arc<Shared>>, Path(reference): Path<String>) -> Json<Option<Receipt>> {
    let mut books = gateway.books();
    let sent = books.sent.get(&reference).copied();
    if sent.is_none() {
        books.withdrawn.insert(reference);
    }
    Json(sent)
}
