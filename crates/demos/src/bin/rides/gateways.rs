//! The outside world: a gateway that charges cards and deduplicates by key, and one that sends texts and does not. Both
//! keep books, and sometimes fail.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{delete, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::time::sleep;

use crate::dice;

/// The gateway refuses this card in every request.
pub(crate) const DECLINED: &str = "tok_declined";

#[derive(Serialize, Deserialize)]
pub(crate) struct ChargeOrder {
    pub(crate) card: String,
    pub(crate) cents: i64,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct TextOrder {
    /// The caller's name for this request, by which an operator can ask for it. It is different in each attempt.
    pub(crate) reference: String,
    pub(crate) phone: String,
}

/// The gateway's number for a charge or a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Receipt {
    pub(crate) number: usize,
}

/// What goes wrong with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mishap {
    /// Refused. Nothing was done.
    Busy,
    /// The gateway answers 504, so its caller cannot know what it did.
    NoAnswer { done: bool },
}

/// The gateways of this process. Clones share the books.
#[derive(Clone)]
pub(crate) struct Gateways {
    books: Arc<Mutex<Books>>,
    /// The longest time from an effect to its answer. A worker that is killed meanwhile never hears of the effect.
    delay: Duration,
    /// One request in so many fails.
    fails_one_in: Option<u128>,
}

#[derive(Default)]
struct Books {
    requests: usize,
    deduplicated: usize,
    /// By card, the number of charges.
    charges: HashMap<String, usize>,
    /// By idempotency key.
    charged: HashMap<String, Receipt>,
    /// The phone of each text.
    texts: Vec<String>,
    /// By reference.
    sent: HashMap<String, Receipt>,
    withdrawn: HashSet<String>,
    /// For the next requests of charges and of texts.
    next_charges: Vec<Mishap>,
    next_texts: Vec<Mishap>,
}

impl Gateways {
    /// Starts the gateways on a port of their own. Returns their URL too.
    pub(crate) async fn start(delay: Duration, fails_one_in: Option<u128>) -> anyhow::Result<(Self, String)> {
        let gateways = Self { books: Arc::default(), delay, fails_one_in };
        let router = Router::new()
            .route("/charges", post(charge))
            .route("/texts", post(send))
            .route("/texts/{reference}", delete(withdraw))
            .with_state(gateways.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        tokio::spawn(axum::serve(listener, router).into_future());
        Ok((gateways, url))
    }

    /// The number of requests so far.
    pub(crate) fn requests(&self) -> usize {
        self.books().requests
    }

    /// The number of requests whose key the card gateway had seen before.
    pub(crate) fn deduplicated(&self) -> usize {
        self.books().deduplicated
    }

    pub(crate) fn charges_of(&self, card: &str) -> usize {
        self.books().charges.get(card).copied().unwrap_or_default()
    }

    pub(crate) fn texts_to(&self, phone: &str) -> usize {
        self.books().texts.iter().filter(|sent| *sent == phone).count()
    }

    #[allow(dead_code, reason = "for the tests")]
    pub(crate) fn fail_next_charge(&self, mishap: Mishap) {
        self.books().next_charges.push(mishap);
    }

    pub(crate) fn fail_next_text(&self, mishap: Mishap) {
        self.books().next_texts.push(mishap);
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
        self,
        mishap: Option<Mishap>,
        perform: impl FnOnce(&mut Books) -> Result<Receipt, StatusCode>,
    ) -> Result<Json<Receipt>, StatusCode> {
        let performed = match mishap {
            Some(Mishap::Busy) => return Err(StatusCode::SERVICE_UNAVAILABLE),
            Some(Mishap::NoAnswer { done: false }) => return Err(StatusCode::GATEWAY_TIMEOUT),
            _ => perform(&mut self.books())?,
        };
        let most = self.delay.as_millis().max(1);
        sleep(Duration::from_millis(dice::below(most) as u64)).await;
        if mishap.is_some() { Err(StatusCode::GATEWAY_TIMEOUT) } else { Ok(Json(performed)) }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn charge(
    State(gateways): State<Gateways>,
    headers: HeaderMap,
    Json(order): Json<ChargeOrder>,
) -> Result<Json<Receipt>, StatusCode> {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok()).ok_or(StatusCode::BAD_REQUEST)?;
    if order.card == DECLINED {
        gateways.books().requests += 1;
        return Err(StatusCode::PAYMENT_REQUIRED);
    }
    let mishap = gateways.books().next_charges.pop().or_else(|| gateways.random_mishap());
    gateways
        .clone()
        .answer(mishap, |books| {
            books.requests += 1;
            if let Some(receipt) = books.charged.get(key).copied() {
                books.deduplicated += 1;
                return Ok(receipt);
            }
            let receipt = Receipt { number: books.charged.len() + 1 };
            books.charged.insert(key.to_owned(), receipt);
            *books.charges.entry(order.card).or_default() += 1;
            Ok(receipt)
        })
        .await
}

async fn send(State(gateways): State<Gateways>, Json(order): Json<TextOrder>) -> Result<Json<Receipt>, StatusCode> {
    let mishap = gateways.books().next_texts.pop().or_else(|| gateways.random_mishap());
    gateways
        .clone()
        .answer(mishap, |books| {
            books.requests += 1;
            if books.withdrawn.contains(&order.reference) {
                return Err(StatusCode::GONE);
            }
            books.texts.push(order.phone);
            let receipt = Receipt { number: books.texts.len() };
            books.sent.insert(order.reference, receipt);
            Ok(receipt)
        })
        .await
}

/// Says what was sent under this reference. If nothing was, nothing will be: a request may still be on its way, of a
/// process that is suspended.
async fn withdraw(
    State(gateways): State<Gateways>,
    Path(reference): Path<String>,
) -> Result<Json<Receipt>, StatusCode> {
    let mut books = gateways.books();
    if let Some(receipt) = books.sent.get(&reference) {
        return Ok(Json(*receipt));
    }
    books.withdrawn.insert(reference);
    Err(StatusCode::NOT_FOUND)
}
