//! A gateway that sends texts, as far as anybody can tell, and what goes wrong between it and who asks.

use std::collections::HashMap;
use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, mpsc};

/// A request to send. It carries no key to dedupe by: many gateways take none.
#[derive(Serialize, Deserialize)]
pub(crate) struct Order {
    /// The customer's own reference.
    pub(crate) job: i64,
    pub(crate) phone: String,
    pub(crate) text: String,
    /// The process that asks, so that this demo can kill it.
    pub(crate) worker: u32,
}

/// The gateway's number for a text that it has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Receipt {
    text: usize,
}

/// What goes wrong with a request. Of two that look the same from outside, one text was sent and the other was not.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mishap {
    /// Refused, and nothing was sent.
    Busy,
    /// A time-out on the way back.
    NoAnswer { sent: bool },
    /// Who asks dies before he hears the answer.
    SenderDies { sent: bool },
}

/// Which worker is to die, and what it does not know.
pub(crate) struct Death {
    pub(crate) worker: u32,
    pub(crate) job: i64,
    pub(crate) sent: bool,
}

pub(crate) struct Gateway {
    pub(crate) url: String,
    pub(crate) deaths: mpsc::UnboundedReceiver<Death>,
    books: Books,
}

type Books = Arc<Mutex<Pages>>;

struct Pages {
    /// The job of each text that was sent.
    sent: Vec<i64>,
    /// What is still to go wrong with a job, one request after the other.
    mishaps: HashMap<i64, Vec<Mishap>>,
    deaths: mpsc::UnboundedSender<Death>,
    refused: Option<(i64, Instant)>,
    retried_after: Option<Duration>,
}

/// What goes wrong with the first request of some of these jobs.
pub(crate) fn mishaps(jobs: &[i64]) -> HashMap<i64, Vec<Mishap>> {
    let first = |(index, job): (usize, &i64)| match index {
        2 | 5 | 11 | 17 | 26 | 38 => Some((*job, vec![Mishap::SenderDies { sent: true }])),
        3 | 14 | 15 | 31 => Some((*job, vec![Mishap::SenderDies { sent: false }])),
        8 => Some((*job, vec![Mishap::NoAnswer { sent: true }])),
        23 => Some((*job, vec![Mishap::NoAnswer { sent: false }])),
        20 => Some((*job, vec![Mishap::Busy])),
        _ => None,
    };
    jobs.iter().enumerate().filter_map(first).collect()
}

impl Gateway {
    pub(crate) async fn start(mishaps: HashMap<i64, Vec<Mishap>>) -> anyhow::Result<Self> {
        let (sender, deaths) = mpsc::unbounded_channel();
        let books = Books::new(Mutex::new(Pages {
            sent: Vec::new(),
            mishaps,
            deaths: sender,
            refused: None,
            retried_after: None,
        }));
        let router = Router::new().route("/texts", post(send)).route("/texts/{job}", get(look_up));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        tokio::spawn(axum::serve(listener, router.with_state(books.clone())).into_future());
        Ok(Self { url, deaths, books })
    }

    /// The texts that were sent for each of these jobs.
    pub(crate) async fn texts(&self, jobs: &[i64]) -> Vec<usize> {
        let books = self.books.lock().await;
        jobs.iter().map(|job| books.sent.iter().filter(|sent| *sent == job).count()).collect()
    }

    /// How long after its refusal the text was sent that was refused.
    pub(crate) async fn retried_after(&self) -> Option<Duration> {
        self.books.lock().await.retried_after
    }
}

async fn send(State(books): State<Books>, Json(order): Json<Order>) -> Result<Json<Receipt>, StatusCode> {
    let mut books = books.lock().await;
    let mishap = books.mishaps.get_mut(&order.job).and_then(Vec::pop);
    if !matches!(mishap, Some(Mishap::Busy | Mishap::NoAnswer { sent: false } | Mishap::SenderDies { sent: false })) {
        books.sent.push(order.job);
        if let Some((job, at)) = books.refused
            && job == order.job
        {
            books.retried_after = Some(at.elapsed());
        }
    }
    match mishap {
        None => Ok(Json(Receipt { text: books.sent.len() })),
        Some(Mishap::Busy) => {
            books.refused = Some((order.job, Instant::now()));
            Err(StatusCode::SERVICE_UNAVAILABLE)
        }
        Some(Mishap::NoAnswer { .. }) => Err(StatusCode::GATEWAY_TIMEOUT),
        Some(Mishap::SenderDies { sent }) => {
            // Who would hear it is this demo, which has come to its end.
            let _ = books.deaths.send(Death { worker: order.worker, job: order.job, sent });
            drop(books);
            // Any answer, at any time, could come before the kill.
            pending().await
        }
    }
}

/// What became of a job: the last text that was sent for it.
async fn look_up(State(books): State<Books>, Path(job): Path<i64>) -> Result<Json<Receipt>, StatusCode> {
    let books = books.lock().await;
    let last = books.sent.iter().rposition(|sent| *sent == job);
    last.map(|index| Json(Receipt { text: index + 1 })).ok_or(StatusCode::NOT_FOUND)
}
