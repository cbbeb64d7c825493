//! The operator's console: a small web page over the library's `operator`, for the keys that wait for a person.
//!
//! `access` admits a request, or refuses it, before a page sees it. `search` finds the keys, in the background. `pages`
//! are the templates, `text` makes text harmless to read, and `refusal` turns errors into pages. What an action does is
//! `settle`'s, as on the command line.

mod access;
mod pages;
mod refusal;
mod search;
mod text;

use std::collections::VecDeque;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, Request, State};
use axum::http::{Method, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use chrono::Utc;
use maud::Markup;
use pg_idempotency::Key;
use pg_idempotency::operator::{self, Shown, Unsettled};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::arguments::{ConsoleOptions, duration};
use crate::connection::{CONNECT_TIMEOUT, Database};
use crate::failure::{Failure, of, of_connecting, printable};
use crate::settle::{Decision, in_doubt, json, look};
use crate::sweep::{Signals, log};
use crate::{Ending, print};
use access::{Access, Posted, Visitor, guard};
use refusal::Refusal;
use search::Search;

/// A page needs one; a few people use a console.
const CONNECTIONS: u32 = 4;
/// A page for a lost database should not be long in coming.
const PATIENCE: Duration = Duration::from_secs(3);
/// Longer than any action. A browser that holds its connection open does not hold up the end.
const GRACE: Duration = Duration::from_secs(10);
/// The keys that were opened last: their links stay valid when the list no longer has them.
const OPENED: usize = 1000;
/// A share is accurate to about one per cent, and reading it takes less than a tenth of a second on a table of any size.
const SAMPLE: u32 = 5_000;
/// Enough of a response to recognise it by.
const RESPONSE_BYTES: u32 = 64 * 1024;

type App = State<Arc<Console>>;

struct Console {
    pool: PgPool,
    access: Access,
    search: Search,
    read_only: bool,
    max_lag: Duration,
    opened: Mutex<VecDeque<Key>>,
}

/// `console`: serves until a signal.
pub(crate) async fn run(address: SocketAddr, options: &ConsoleOptions, database: &Database) -> Result<Ending, Failure> {
    let mut signals = Signals::listen()?;
    log();
    let (stop, mut stopped) = tokio::sync::watch::channel(());
    let console = serve(address, options, database, async move { drop(stopped.changed().await) }).await?;
    signals.received().await;
    drop(stop);
    end(console).await;
    print("stopped\n")
}

/// Waits for the requests that are under way.
pub(crate) async fn end(console: JoinHandle<()>) {
    let _ = tokio::time::timeout(GRACE, console).await;
}

/// Serves until `stop`. Prints where, since port 0 is anybody's.
pub(crate) async fn serve(
    address: SocketAddr,
    options: &ConsoleOptions,
    database: &Database,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<JoinHandle<()>, Failure> {
    let unavailable = |source| Failure::Listen { address, source };
    let console = Arc::new(Console {
        pool: database.pool_of(CONNECTIONS, PATIENCE)?,
        access: Access::new(address, options)?,
        search: Search::new(database.clone(), options.max_attempts),
        read_only: options.read_only,
        max_lag: options.max_lag,
        opened: Mutex::default(),
    });
    let router = Router::new()
        .route("/", get(overview))
        .route("/waiting", get(waiting))
        .route("/find", post(find))
        .route("/key/{id}", get(key))
        .route("/key/{id}/confirm", post(confirm))
        .route("/key/{id}/settle", post(settle))
        .route("/style.css", get(async || ([(header::CONTENT_TYPE, "text/css")], include_str!("console/style.css"))))
        .layer(from_fn(in_time))
        .layer(from_fn_with_state(console.clone(), guard))
        .with_state(console.clone());
    let listener = TcpListener::bind(address).await.map_err(unavailable)?;
    let address = listener.local_addr().map_err(unavailable)?;
    print(&format!("console on http://{address}/\n"))?;
    tokio::spawn(async move { console.search.run().await });
    Ok(tokio::spawn(async move {
        let _ = axum::serve(listener, router).with_graceful_shutdown(stop).await;
    }))
}

/// A page that only reads is given up where the database does not answer. An action is never cut off.
async fn in_time(request: Request, next: Next) -> Response {
    if request.method() != Method::GET {
        return next.run(request).await;
    }
    match tokio::time::timeout(CONNECT_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Refusal::from(Failure::Silence).into_response(),
    }
}

async fn overview(State(console): App, Extension(visitor): Extension<Visitor>) -> Result<Markup, Refusal> {
    let mut conn = console.pool.acquire().await.map_err(of_connecting)?;
    let stats = operator::stats(&mut conn, Some(SAMPLE)).await.map_err(of)?;
    let warnings = operator::health(&mut conn, console.max_lag).await.map_err(of)?;
    Ok(pages::overview(&stats, &warnings, console.read_only, &visitor))
}

/// What the list shows; an empty text is no filter.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Filter {
    scope: String,
    operation: String,
    older_than: String,
    page: usize,
}

async fn waiting(State(console): App, filter: Result<Query<Filter>, QueryRejection>) -> Result<Response, Refusal> {
    let Query(filter) = filter.map_err(|rejection| Refusal::Malformed(rejection.body_text()))?;
    let claimed_before = match filter.older_than.trim() {
        "" => None,
        text => {
            let age = duration(text).map_err(Refusal::Malformed)?;
            Some(
                Utc::now().checked_sub_signed(chrono::TimeDelta::from_std(age).unwrap_or_default()).unwrap_or_default(),
            )
        }
    };
    console.search.refresh().await;
    let found = console.search.found();
    let fits = |record: &&Unsettled| {
        (filter.scope.is_empty() || record.scope == filter.scope)
            && (filter.operation.is_empty() || record.operation == filter.operation)
            && claimed_before.is_none_or(|before| record.claimed_at < before)
    };
    let records: Vec<_> = found.records.iter().filter(fits).map(|record| (id_of(record), record)).collect();
    let page = pages::waiting(&found, &records, &filter);
    // While the first search goes on, the browser asks again.
    Ok(if found.ended.is_some() { page.into_response() } else { ([(header::REFRESH, "2")], page).into_response() })
}

#[derive(Deserialize)]
struct Parts {
    scope: String,
    operation: String,
    value: String,
}

/// By POST, since a link would leave the value in the browser's history and in the logs of proxies.
async fn find(
    State(console): App,
    Posted(Parts { scope, operation, value }, _): Posted<Parts>,
) -> Result<Redirect, Refusal> {
    let key = Key::new(scope, operation, value).map_err(Failure::from)?;
    Ok(Redirect::to(&format!("/key/{}", console.open(&key))))
}

/// What is shown only if somebody asks for it.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Revealed {
    value: bool,
    response: bool,
}

async fn key(
    State(console): App,
    Extension(visitor): Extension<Visitor>,
    Path(id): Path<String>,
    revealed: Result<Query<Revealed>, QueryRejection>,
) -> Result<Markup, Refusal> {
    let Query(revealed) = revealed.map_err(|rejection| Refusal::Malformed(rejection.body_text()))?;
    let key = console.key(&id)?;
    console.open(&key);
    let shown = look(&console.pool, &key).await.inspect_err(|failure| {
        if matches!(failure, Failure::NoRecord) {
            console.search.settled(&key);
        }
    })?;
    let response = if revealed.response {
        let mut conn = console.pool.acquire().await.map_err(of_connecting)?;
        operator::response(&mut conn, &key, shown.token, RESPONSE_BYTES).await.map_err(of)?
    } else {
        None
    };
    let read_only = console.read_only;
    Ok(pages::key(
        &pages::OfKey { id: &id, key: &key, shown: &shown, visitor: &visitor },
        &revealed,
        response.as_ref(),
        read_only,
    ))
}

/// The decision of a person, from the page of a key and from the page that asks for a confirmation.
#[derive(Deserialize)]
struct Order {
    /// The record as the page has shown it: [`version`].
    seen: String,
    action: Action,
    #[serde(default)]
    response: String,
    reason: String,
    #[serde(default)]
    operator: String,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Action {
    TookEffect,
    NoEffect,
    Forget,
}

/// A decision that the record allows, as it is now.
struct Agreed {
    key: Key,
    shown: Shown,
    decision: Decision,
    operator: String,
}

async fn confirm(
    State(console): App,
    Path(id): Path<String>,
    Posted(order, visitor): Posted<Order>,
) -> Result<Markup, Refusal> {
    let Agreed { key, shown, decision, operator } = console.agree(&id, &order, &visitor).await?;
    Ok(pages::confirm(
        &pages::OfKey { id: &id, key: &key, shown: &shown, visitor: &visitor },
        &order,
        &decision,
        &operator,
    ))
}

async fn settle(
    State(console): App,
    Path(id): Path<String>,
    Posted(order, visitor): Posted<Order>,
) -> Result<Markup, Refusal> {
    // On its own, since a browser that goes away in the middle must not keep it from the log.
    let done = tokio::spawn(async move {
        let Agreed { key, shown, decision, operator } = console.agree(&id, &order, &visitor).await?;
        let done = decision.carry_out(&console.pool, &key, &shown, order.reason.trim()).await;
        let done = done.map_err(|failure| Refusal::Failure(Some(id.clone()), failure))?;
        console.search.settled(&key);
        print(&format!("{} {}: {}\n", Utc::now().to_rfc3339(), printable(&operator), printable(&done)))?;
        Ok(pages::settled(&id, &done))
    });
    done.await.map_err(|error| Failure::Output(std::io::Error::other(error)))?
}

impl Console {
    /// Remembers a key, and gives its link.
    fn open(&self, key: &Key) -> String {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|known| known != key);
        opened.push_back(key.clone());
        if opened.len() > OPENED {
            opened.pop_front();
        }
        id(key.scope(), key.operation(), key.value())
    }

    /// The key of a link.
    fn key(&self, link: &str) -> Result<Key, Refusal> {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(key) = opened.iter().find(|key| id(key.scope(), key.operation(), key.value()) == link) {
            return Ok(key.clone());
        }
        let found = self.search.found();
        let record = found.records.iter().find(|record| id_of(record) == link).ok_or(Refusal::UnknownLink)?;
        Ok(Key::new(&*record.scope, &*record.operation, &*record.value).map_err(Failure::from)?)
    }

    async fn agree(&self, id: &str, order: &Order, visitor: &Visitor) -> Result<Agreed, Refusal> {
        if self.read_only {
            return Err(Refusal::ReadOnly);
        }
        let operator = visitor.name.as_deref().unwrap_or(order.operator.trim()).to_owned();
        for (field, text) in [("Your name", &*operator), ("Reason", order.reason.trim())] {
            if text.is_empty() {
                return Err(Refusal::Empty(field));
            }
        }
        let key = self.key(id)?;
        let of_key = |failure| Refusal::Failure(Some(id.to_owned()), failure);
        let shown = look(&self.pool, &key).await.map_err(|failure| match failure {
            Failure::NoRecord => of_key(Failure::Changed),
            failure => of_key(failure),
        })?;
        if version(&shown) != order.seen {
            return Err(of_key(Failure::Changed));
        }
        let step = in_doubt(&shown).map(str::to_owned);
        let decision = match (order.action, step) {
            // Browsers send each line break as two characters.
            (Action::TookEffect, step) => match (json(&order.response.replace("\r\n", "\n")).map_err(of_key)?, step) {
                (result, Some(step)) => Decision::ResolveStep { step, result },
                (response, None) => Decision::Resolve { response, retention: None },
            },
            (Action::NoEffect, _) => Decision::Release,
            (Action::Forget, _) => Decision::Forget,
        };
        decision.check(&shown).map_err(of_key)?;
        Ok(Agreed { key, shown, decision, operator })
    }
}

/// What a decision is about. A suspended owner may finish its step, or all of it, without another token.
fn version(shown: &Shown) -> String {
    format!("{} {} {}", shown.token, shown.state, in_doubt(shown).unwrap_or_default())
}

fn id_of(record: &Unsettled) -> String {
    id(&record.scope, &record.operation, &record.value)
}

/// The link of a key: a digest, since the value may be a secret.
fn id(scope: &str, operation: &str, value: &str) -> String {
    let mut digest = Sha256::new_with_prefix("console");
    for part in [scope, operation, value] {
        digest.update(part.len().to_be_bytes());
        digest.update(part);
    }
    BASE64_URL_SAFE_NO_PAD.encode(&digest.finalize()[..16])
}
