//! The operator's console: a small web page for the keys that wait for a person. The console uses the library's module
//! `operator`.
//!
//! `access` admits or refuses a request, and `order` is a decision that a form sends. `pages` contains the templates,
//! `pictures` draws, `text` makes text harmless, and `refusal` turns errors into pages. The decisions are the same as
//! those of the command line, and are made in `settle`. `decisions` logs the decisions, and `samples` records the
//! content of the table during the last hour.

mod access;
mod decisions;
mod order;
mod pages;
mod pictures;
mod refusal;
mod samples;
mod text;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::to_bytes;
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{get, post};
use axum::{Extension, Form, Router};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use chrono::Utc;
use indicatif::ProgressBar;
use maud::Markup;
use pg_idempotency::Key;
use pg_idempotency::operator::{self, Shown};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use sqlx::PgPool;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::arguments::ConsoleOptions;
use crate::connection::{CONNECT_TIMEOUT, Database, ask, look};
use crate::failure::Failure;
use crate::keys::seen;
use crate::process::{Ending, Signals, log, print};
use crate::server::Server;
use crate::settle::{Agreed, json};
use access::{Access, Visitor, guard};
use decisions::{Decisions, Made};
use order::{Order, decision, in_words};
use pages::Found;
use refusal::Refusal;
use samples::Samples;

/// How many connections the pool has. A page uses one connection, and few people open a console at once.
const CONNECTIONS: u32 = 4;
/// How long a page waits for a connection before it reports that the database is lost.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a statement of a page may take.
const PAGE_TIME: Duration = Duration::from_secs(10);
/// The longest time for reading one list from the table. If the page gives up before this time, the query continues,
/// and still occupies the only connection of `lists`. So at most one list at a time is read.
const LIST_TIME: Duration = Duration::from_secs(60);
/// How long a form may take to arrive. A browser sends a form in one piece. Without a limit, a client that never sends
/// the rest of a form would keep its connection for ever.
const FORM_TIME: Duration = Duration::from_secs(5);
/// The largest form, in bytes. A response that a person types is smaller than this size.
const FORM_SIZE: usize = 1 << 21;
/// How many opened keys the console remembers. The link of such a key stays valid after the key has left the list.
const OPENED: usize = 1000;

type App = State<Arc<Console>>;
type Person = Extension<Visitor>;
type Page = Result<Markup, Refusal>;

struct Console {
    pool: PgPool,
    /// A pool of one connection, so that at most one list at a time reads the table.
    lists: PgPool,
    read_only: bool,
    max_attempts: Option<NonZeroU32>,
    abandoned_for: Duration,
    max_lag: Duration,
    decisions: Decisions,
    samples: Arc<Samples>,
    /// The keys that a page has named or linked, with their links.
    opened: Mutex<VecDeque<(String, Key)>>,
}

/// Runs the command `console`, which serves until a signal arrives.
pub(crate) async fn run(address: SocketAddr, options: &ConsoleOptions, database: &Database) -> Result<Ending, Failure> {
    let mut signals = Signals::listen()?;
    log(&ProgressBar::hidden());
    let server = serve(address, options, database).await?;
    // The address is printed, because port 0 means any free port.
    print(&format!("console on http://{}/\n", server.address))?;
    signals.received().await;
    server.stop().await;
    print("stopped\n")
}

async fn serve(address: SocketAddr, options: &ConsoleOptions, database: &Database) -> Result<Server, Failure> {
    let access = Arc::new(Access::new(address, options)?);
    let decisions = Decisions::new(options.log.clone())?;
    let pool = database.pool_of(CONNECTIONS, PATIENCE)?;
    let console = Arc::new(Console {
        samples: Samples::start(pool.clone(), options.sample),
        pool,
        lists: database.pool_of(1, PATIENCE)?,
        read_only: options.read_only,
        max_attempts: options.max_attempts,
        abandoned_for: options.abandoned_for,
        max_lag: options.max_lag,
        decisions,
        opened: Mutex::default(),
    });
    let router = Router::new()
        .route("/", get(overview))
        .route("/waiting", get(waiting))
        .route("/find", get(ask_for_parts).post(find))
        .route("/log", get(decided))
        .route("/key/{id}", get(key))
        .route("/key/{id}/confirm", post(confirm))
        .route("/key/{id}/settle", post(settle))
        .route("/style.css", get(async || ([(header::CONTENT_TYPE, "text/css")], include_str!("console/style.css"))))
        .layer(from_fn(in_time))
        .layer(from_fn_with_state(access, guard))
        .with_state(console);
    Server::start(address, router).await
}

/// Limits the time of a page that only reads, and the time in which a form has to arrive. An action is never cut off.
async fn in_time(request: Request, next: Next) -> Response {
    if request.method() == Method::POST {
        let (parts, body) = request.into_parts();
        let (status, why) = match timeout(FORM_TIME, to_bytes(body, FORM_SIZE)).await {
            Ok(Ok(form)) => return next.run(Request::from_parts(parts, form.into())).await,
            Ok(Err(_)) => (StatusCode::PAYLOAD_TOO_LARGE, "the form is larger than 2 MiB"),
            Err(_) => (StatusCode::REQUEST_TIMEOUT, "the form took too long to arrive"),
        };
        return Refusal::Malformed(status, why.to_owned()).into_response();
    }
    let silence = |_| Refusal::from(Failure::Silence(CONNECT_TIMEOUT)).into_response();
    timeout(CONNECT_TIMEOUT, next.run(request)).await.unwrap_or_else(silence)
}

async fn overview(State(console): App, uri: Uri) -> Result<Response, Refusal> {
    let (pool, lag) = (console.pool.clone(), console.max_lag);
    let (stats, warnings) = in_a_task(async move {
        Ok((ask(PAGE_TIME, operator::stats(&pool)).await?, ask(PAGE_TIME, operator::health(&pool, lag)).await?))
    })
    .await?;
    // The list of waiting keys reads the whole table. If that takes longer than `PATIENCE`, because the table is large
    // or the list of another operator is being read, the page appears without the list.
    let waiting = timeout(PATIENCE, console.waiting()).await.ok().and_then(Result::ok);
    let (samples, read_only) = (console.samples.taken(), console.read_only);
    let again = refreshes(&uri);
    Ok(refreshing(again, pages::overview(waiting.as_deref(), &stats, &warnings, &samples, again, read_only)))
}

/// Whether the address of the page asks for a refresh. The choice is in the address, so the pages need no script and no
/// cookie.
fn refreshes(uri: &Uri) -> bool {
    uri.query() == Some(pages::REFRESHING)
}

/// Adds the header that makes a browser read the page again. A person has asked for the refresh, and a link of the page
/// stops it. A `meta` element has the same effect, but axe-core reports every such element, because axe-core cannot see
/// that a person has asked. The page of an error does not refresh.
fn refreshing(again: bool, page: Markup) -> Response {
    let header = again.then_some([(header::REFRESH, pages::REFRESH_SECONDS)]);
    (header, page).into_response()
}

/// Asks the database in a task of its own. Each call in the task has a time limit, and closes a connection that does
/// not answer within the limit. If a browser goes away, its request is dropped. Without a task, the database connection
/// would then keep its place in the pool until the pool's ping is answered.
async fn in_a_task<R: Send + 'static>(
    asking: impl Future<Output = Result<R, Failure>> + Send + 'static,
) -> Result<R, Failure> {
    tokio::spawn(asking).await.map_err(|error| Failure::Output(std::io::Error::other(error)))?
}

async fn waiting(State(console): App, uri: Uri) -> Result<Response, Refusal> {
    let found = console.waiting().await?;
    let again = refreshes(&uri);
    Ok(refreshing(again, pages::waiting(&console.linked(found), console.max_attempts, again)))
}

async fn decided(State(console): App, uri: Uri) -> Response {
    let made: Vec<_> =
        console.decisions.made().into_iter().map(|made| (console.open(made.key.clone()), made)).collect();
    let again = refreshes(&uri);
    refreshing(again, pages::decided(&console.decisions, &made, again))
}

#[derive(Deserialize)]
struct Parts {
    scope: String,
    operation: String,
    value: String,
    /// Whether `value` is only the beginning of the values to find. The scope and the operation may then be empty.
    #[serde(default)]
    search: bool,
}

async fn ask_for_parts() -> Markup {
    pages::find(["", "", ""], None)
}

/// Uses POST, because a GET would leave the value in the browser's history and in the logs of proxies.
async fn find(State(console): App, Form(parts): Form<Parts>) -> Result<Response, Refusal> {
    let Parts { scope, operation, value, search } = parts;
    if !search {
        let key = Key::recorded(scope, operation, value).map_err(Failure::from)?;
        return Ok(Redirect::to(&format!("/key/{}", console.open(key))).into_response());
    }
    let (pool, parts) = (console.pool.clone(), [scope, operation, value]);
    let [scope, operation, beginning] = parts.clone();
    let found = in_a_task(async move {
        let [scope, operation] = [&scope, &operation].map(|part| Some(&**part).filter(|part| !part.is_empty()));
        let search = operator::search(&pool, scope, operation, &beginning, pages::LISTED + 1, pages::SEARCH_TIME);
        ask(PAGE_TIME, search).await
    });
    let found = match found.await {
        Ok(found) => Found::All(console.linked(found)),
        Err(Failure::Stopped(_)) => Found::NotInTime,
        Err(failure) => return Err(failure.into()),
    };
    Ok(pages::find(parts.each_ref().map(|part| &**part), Some((&found, console.max_attempts))).into_response())
}

async fn key(State(console): App, Extension(visitor): Person, Path(link): Path<String>) -> Page {
    let key = console.key(&link)?;
    console.open(key.clone());
    let pool = console.pool.clone();
    let shown = in_a_task(async move { look(&pool, &key).await }).await?;
    let form = (!console.read_only).then(|| pages::decide(&link, &shown, visitor.0.as_deref()));
    Ok(pages::key(&shown, form))
}

async fn confirm(State(console): App, visitor: Person, Path(link): Path<String>, Form(order): Form<Order>) -> Page {
    let asking = tokio::spawn(async move {
        let (agreed, order, _) = console.agree(&link, order, &visitor).await?;
        Ok(pages::confirm(&link, &agreed, &order))
    });
    asking.await.map_err(|error| Failure::Output(std::io::Error::other(error)))?
}

async fn settle(State(console): App, visitor: Person, Path(link): Path<String>, Form(order): Form<Order>) -> Page {
    // The decision runs in a task of its own, because the decision must get into the log even if the browser closes the
    // connection.
    let done = tokio::spawn(async move {
        let (agreed, order, decision) = console.agree(&link, order, &visitor).await?;
        let Shown { key, state, token, .. } = agreed.shown().clone();
        let done = agreed.carry_out(&console.pool, &order.reason).await;
        let done = done.map_err(|failure| Refusal::Failure(Some(link.clone()), failure))?;
        let Order { operator, reason, .. } = order;
        let made = Made { at: Utc::now(), operator, decision, key, state, token, reason, unwritten: Arc::default() };
        // The disk may be slow, and the process has one thread for all pages.
        let recording = spawn_blocking(move || {
            let (error, file) = (console.decisions.record(made.clone(), &done), console.decisions.file.as_deref());
            pages::settled(&link, &made.key, &done, file.zip(error))
        });
        recording.await.map_err(|error| Failure::Output(std::io::Error::other(error)).into())
    });
    done.await.map_err(|error| Failure::Output(std::io::Error::other(error)))?
}

impl Console {
    /// The oldest keys that wait for a person. The list contains one key more than a page shows, which reveals whether
    /// there are more keys.
    async fn waiting(&self) -> Result<Vec<Shown>, Failure> {
        let (lists, most, idle) = (self.lists.clone(), self.max_attempts, self.abandoned_for);
        in_a_task(async move { ask(LIST_TIME, operator::unsettled(&lists, pages::LISTED + 1, most, Some(idle))).await })
            .await
    }

    fn linked(&self, found: Vec<Shown>) -> Vec<(String, Shown)> {
        found.into_iter().map(|record| (self.open(record.key.clone()), record)).collect()
    }

    /// Remembers a key, and returns its link.
    fn open(&self, key: Key) -> String {
        let link = link(&key);
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|(known, _)| *known != link);
        opened.push_back((link.clone(), key));
        if opened.len() > OPENED {
            opened.pop_front();
        }
        link
    }

    /// The key to which a link leads.
    fn key(&self, link: &str) -> Result<Key, Refusal> {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, key) = opened.iter().find(|(known, _)| known == link).ok_or(Refusal::UnknownLink)?;
        Ok(key.clone())
    }

    /// Checks the form. Returns the form's decision about the record that the page showed, the form without superfluous
    /// space, and the decision in a few words.
    async fn agree(&self, link: &str, mut order: Order, visitor: &Visitor) -> Result<(Agreed, Order, String), Refusal> {
        if self.read_only {
            return Err(Refusal::ReadOnly);
        }
        order.operator = visitor.0.as_deref().unwrap_or(order.operator.trim()).to_owned();
        order.reason = order.reason.trim().to_owned();
        // Browsers send each line break as two characters.
        order.response = order.response.replace("\r\n", "\n");
        let key = self.key(link)?;
        let of_key = |failure| Refusal::Failure(Some(link.to_owned()), failure);
        let shown = match look(&self.pool, &key).await {
            Ok(shown) if seen(&shown) == order.seen => shown,
            Ok(_) | Err(Failure::NoRecord) => return Err(of_key(Failure::Changed)),
            Err(failure) => return Err(of_key(failure)),
        };
        let json = if order.gives_json() { json(&order.response).map_err(of_key)? } else { Box::default() };
        let decision = decision(&order.action, &shown, json)
            .ok_or_else(|| Refusal::Malformed(StatusCode::BAD_REQUEST, format!("{:?} is no action", order.action)))?;
        for (field, text) in [("Your name", &order.operator), ("Reason", &order.reason)] {
            if text.is_empty() {
                return Err(Refusal::Empty(field));
            }
        }
        let words = in_words(&decision);
        Ok((decision.about(shown).map_err(of_key)?, order, words))
    }
}

/// The link of a key. The link is a digest, because the value may be a secret.
fn link(key: &Key) -> String {
    let mut digest = Sha256::new_with_prefix("console");
    for part in [key.scope(), key.operation(), key.value()] {
        digest.update(part.len().to_be_bytes());
        digest.update(part);
    }
    BASE64_URL_SAFE_NO_PAD.encode(&digest.finalize()[..16])
}
