//! A service whose effects are counted, and a client without a network.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Path;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use http_body_util::BodyExt as _;
use pg_idempotency::http::{Denied, IdempotencyLayer, IdempotentTx, Rejection, Runs};
use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::{Idempotency, OnDuplicate};
use rig::gate::{Gate, PATIENCE};
use sqlx::PgPool;
use tokio::task::{JoinHandle, yield_now};
use tower::ServiceExt as _;

pub(crate) use rig::database::{effects, options, outside, pool_of, recorded, records, until};

/// The table of effects has no unique constraint: only the layer prevents a second effect.
pub(crate) async fn create_effects(pool: &PgPool) {
    sqlx::raw_sql("create table effect (id bigint generated always as identity, note text not null)")
        .execute(pool)
        .await
        .expect("a table of effects");
    // So a call of the layer that leaves no mark on its transaction fails.
    pg_idempotency::protect(pool, "effect", pg_idempotency::OnEscape::Refuse).await.expect("protected");
}

/// The scope of a request. A real service takes it from the authenticated identity.
pub(crate) fn user(parts: &Parts) -> Result<String, Denied> {
    let user = parts.headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or("ada");
    if user == "nobody" {
        let mut response = Response::new(Bytes::from_static(b"who are you?"));
        *response.status_mut() = StatusCode::UNAUTHORIZED;
        return Err(response.into());
    }
    Ok(user.to_owned())
}

pub(crate) fn transactional(pool: &PgPool) -> IdempotencyLayer {
    IdempotencyLayer::transactional(pool.clone(), Idempotency::new(), user)
}

pub(crate) fn replaying_first(pool: &PgPool) -> IdempotencyLayer {
    IdempotencyLayer::transactional(pool.clone(), Idempotency::new().replay_first(true), user)
}

/// A duplicate waits for the first request.
pub(crate) fn waiting(pool: &PgPool, limit: Duration) -> IdempotencyLayer {
    IdempotencyLayer::transactional(pool.clone(), Idempotency::new().on_duplicate(OnDuplicate::Wait(limit)), user)
}

pub(crate) fn leasing(policy: Policy) -> LeaseOptions {
    LeaseOptions::new(policy)
}

pub(crate) fn leased(pool: &PgPool, policy: Policy) -> IdempotencyLayer {
    IdempotencyLayer::leased(pool.clone(), leasing(policy), user)
}

/// The service. Each route leaves an effect and answers in a different way.
pub(crate) fn app(layer: IdempotencyLayer) -> Router {
    app_without_layer().layer(layer)
}

pub(crate) fn app_without_layer() -> Router {
    Router::new()
        .route("/effects", post(leave).patch(leave).put(leave).get(async || "read"))
        .route("/accounts/{id}/effects", post(leave))
        .route("/status/{status}", post(answer_with))
        .route("/panic", post(panics))
        .route("/large/{bytes}", post(large))
        .route("/headers", post(headers))
        .route("/broken", post(broken))
        .route("/keep", post(keep))
        .route("/swallow", post(swallow))
        .route("/echo", post(async |_: IdempotentTx, body: Bytes| body))
        .route("/read", get(async || "read"))
}

pub(crate) async fn insert(tx: &mut IdempotentTx, note: &str) -> i64 {
    sqlx::query_scalar("insert into effect (note) values ($1) returning id")
        .bind(note)
        .fetch_one(&mut **tx)
        .await
        .expect("an effect")
}

async fn leave(mut tx: IdempotentTx, body: Bytes) -> impl IntoResponse {
    let id = insert(&mut tx, &String::from_utf8_lossy(&body)).await;
    let location = format!("/effects/{id}");
    (StatusCode::CREATED, [(header::LOCATION, location)], format!("{{\"id\":{id}}}"))
}

async fn answer_with(Path(status): Path<u16>, mut tx: IdempotentTx) -> impl IntoResponse {
    let id = insert(&mut tx, "answered").await;
    (StatusCode::from_u16(status).expect("a status"), format!("effect {id}"))
}

async fn panics(mut tx: IdempotentTx) {
    insert(&mut tx, "panicked").await;
    panic!("on purpose");
}

async fn large(Path(bytes): Path<usize>, mut tx: IdempotentTx) -> Vec<u8> {
    insert(&mut tx, "large").await;
    vec![b'x'; bytes]
}

async fn headers(mut tx: IdempotentTx) -> impl IntoResponse {
    insert(&mut tx, "headers").await;
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("content-type", &b"text/plain"[..]),
        ("link", b"</a>; rel=first"),
        ("link", b"</b>; rel=next"),
        ("etag", b"\"v1\""),
        ("location", b"/caf\xe9"),
        ("cache-control", b"no-cache"),
        ("set-cookie", b"session=1"),
        ("www-authenticate", b"Basic"),
        ("x-request-id", b"r-1"),
    ] {
        headers.append(name, HeaderValue::from_bytes(value).expect("a value"));
    }
    (headers, "x")
}

async fn broken(mut tx: IdempotentTx) -> Body {
    insert(&mut tx, "broken").await;
    let parts = [Ok("half of it"), Err(std::io::Error::other("the disk is gone"))];
    Body::from_stream(futures_util::stream::iter(parts))
}

/// Spawns a task that keeps the transaction beyond the answer.
async fn keep(mut tx: IdempotentTx) -> &'static str {
    insert(&mut tx, "kept").await;
    tokio::spawn(async move {
        // Longer than an answer takes.
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop(tx);
    });
    "kept"
}

/// Ignores an error of the database.
async fn swallow(mut tx: IdempotentTx) -> &'static str {
    insert(&mut tx, "swallowed").await;
    let error = sqlx::query("select 1 / 0").execute(&mut *tx).await;
    assert!(error.is_err());
    "all is well"
}

/// The response as a client sees it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
    pub(crate) rejection: Option<Rejection>,
}

impl Answer {
    /// What the service's log says of a 500 `misconfigured`.
    pub(crate) fn mistake(&self) -> String {
        assert_eq!((self.status, &*self.problem()), (StatusCode::INTERNAL_SERVER_ERROR, "misconfigured"));
        let Some(Rejection::Misconfigured(mistake)) = &self.rejection else { panic!("{self:?}") };
        mistake.to_string()
    }

    pub(crate) fn is_replayed(&self) -> bool {
        self.headers.get("idempotent-replayed").is_some_and(|value| value == "true")
    }

    /// The last part of the problem's type.
    pub(crate) fn problem(&self) -> String {
        assert_eq!(self.headers["content-type"], "application/problem+json", "{self:?}");
        assert_eq!(self.headers["cache-control"], "no-store", "{self:?}");
        let problem: serde_json::Value = serde_json::from_slice(&self.body).expect("JSON");
        assert_eq!(problem["status"], self.status.as_u16());
        for member in ["title", "detail"] {
            assert!(problem[member].as_str().is_some_and(|text| !text.is_empty()), "{problem}");
        }
        let rejection = self.rejection.as_ref().expect("the rejection is in the extensions");
        assert_eq!(problem["retryable"], rejection.is_retryable());
        let kind = problem["type"].as_str().and_then(|kind| kind.strip_prefix("urn:pg-idempotency:problem:"));
        assert_eq!(kind, Some(rejection.kind()));
        rejection.kind().to_owned()
    }
}

pub(crate) fn request(method: &str, uri: &str, key: Option<&str>, body: &str) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(uri);
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    request.body(Body::from(body.to_owned())).expect("a request")
}

/// The request of another user.
pub(crate) fn of(user: &str, mut request: Request<Body>) -> Request<Body> {
    request.headers_mut().insert("x-user", HeaderValue::from_str(user).expect("a name"));
    request
}

pub(crate) async fn send(app: &Router, request: Request<Body>) -> Answer {
    let response = tokio::time::timeout(PATIENCE, app.clone().oneshot(request)).await.expect("in time");
    let (parts, body) = response.expect("infallible").into_parts();
    let body = body.collect().await.expect("a body");
    let trailers = body.trailers().cloned();
    let rejection = parts.extensions.get().cloned();
    Answer { status: parts.status, headers: parts.headers, body: body.to_bytes(), trailers, rejection }
}

/// `POST` with a key.
pub(crate) async fn post_to(app: &Router, uri: &str, key: &str, body: &str) -> Answer {
    send(app, request("POST", uri, Some(key), body)).await
}

/// The same in a task of its own.
pub(crate) fn spawned_post(app: &Router, uri: &'static str, key: &str, body: &'static str) -> JoinHandle<Answer> {
    let (app, key) = (app.clone(), key.to_owned());
    tokio::spawn(async move { post_to(&app, uri, &key, body).await })
}

pub(crate) async fn until_runs(runs: &Runs, enough: impl Fn(usize) -> bool) {
    let reached = async {
        while !enough(runs.count()) {
            yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, reached).await.unwrap_or_else(|_| panic!("{} runs", runs.count()));
}

/// One chunk of data. The announced length stays the same to the end, as it does in many bodies that are written by
/// hand.
pub(crate) struct Announcing {
    pub(crate) data: Option<Bytes>,
    pub(crate) length: u64,
}

impl http_body::Body for Announcing {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.data.take().map(|data| Ok(http_body::Frame::data(data))))
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.length)
    }
}

/// No session of the test's database has an open transaction.
pub(crate) async fn until_nothing_is_open(pool: &PgPool) {
    let nothing_open = "select count(*) = 0 from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid() and state like 'idle in%'";
    until(pool, nothing_open).await;
}

/// A route that leaves an effect and stops at the gate, in the middle of its transaction.
pub(crate) fn stops_at(gate: &Gate) -> Router {
    let gate = gate.clone();
    let handler = async move |mut tx: IdempotentTx| {
        let id = insert(&mut tx, "gated").await;
        gate.pass().await;
        format!("effect {id}")
    };
    Router::new().route("/gate", post(handler))
}
