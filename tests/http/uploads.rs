//! The bytes of requests that arrive or wait: one bound for each layer, a share for each scope, and a pace.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Request, StatusCode};
use axum::response::Response;
use axum::routing::post;
use futures_util::{StreamExt as _, stream};
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
use pg_idempotency::{Idempotency, OnDuplicate};
use rig::cases::each;
use rig::gate::Gate;
use rig::lease::AT_LEAST_ONCE;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};
use tower::ServiceExt as _;

use crate::support::{leased, request, send, spawned_post, stops_at, transactional, user};

const LIMIT: usize = 1000;
/// Two of three bodies of the limit are the half of all bytes, with four places.
const PLACES: usize = 4;

fn of(user: &str, key: Option<&str>, body: Body) -> Request<Body> {
    let mut request = request("POST", "/uploads", key, "").map(|_| body);
    request.headers_mut().insert("x-user", user.parse().expect("a value"));
    request
}

/// The body of a client that sends so many bytes, and then nothing.
fn stalled(bytes: usize) -> Body {
    let sent = stream::iter([Ok::<_, Infallible>(vec![b'x'; bytes])]);
    Body::from_stream(sent.chain(stream::pending()))
}

fn whole() -> Body {
    Body::from(vec![b'x'; LIMIT])
}

type Call = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

/// A request that has sent these bytes, and waits.
fn stall(app: &Router, user: &str, key: &str, bytes: usize) -> Call {
    let mut call: Call = Box::pin(app.clone().oneshot(of(user, Some(key), stalled(bytes))));
    assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    call
}

/// Uploads that are nearly complete hold the whole share of their account.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn stalled_uploads_of_one_account_leave_room_for_others(pool: PgPool) {
    let policy = AT_LEAST_ONCE;
    each([("transaction", transactional(&pool)), ("lease", leased(&pool, policy))], async |(mode, layer)| {
        let layer = layer.optional_key(true).request_limit(LIMIT).max_runs(PLACES);
        let route = match mode {
            "transaction" => post(async |_: IdempotentTx, body: Bytes| body.len().to_string()),
            _ => post(async |body: Bytes| body.len().to_string()),
        };
        let app = Router::new().route("/uploads", route).layer(layer);
        let key = |name: &str| format!("{mode}-{name}");
        let uploads: Vec<_> = (0..2).map(|n| stall(&app, "eve", &key(&format!("stalled-{n}")), LIMIT - 1)).collect();
        let refused = send(&app, of("eve", Some(&key("more")), stalled(LIMIT - 1))).await;
        let expected = (StatusCode::TOO_MANY_REQUESTS, "too-many-requests");
        assert_eq!((refused.status, &*refused.problem()), expected, "{mode}");
        assert_eq!(refused.headers["retry-after"], "1", "{mode}");
        for (user, key) in [("ada", Some(key("ada"))), ("bob", Some(key("bob"))), ("ada", None)] {
            let answer = send(&app, of(user, key.as_deref(), whole())).await;
            assert_eq!((answer.status, &*answer.body), (StatusCode::OK, &b"1000"[..]), "{mode}: {user}");
        }
        drop(uploads);
        assert_eq!(send(&app, of("eve", Some(&key("more")), whole())).await.status, StatusCode::OK, "{mode}");
        Ok(())
    })
    .await;
}

/// Accounts that share all bytes, and requests without a key, which share one part. None of them waits for the others.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn all_uploads_together_have_a_bound(pool: PgPool) {
    let layer = transactional(&pool).optional_key(true).request_limit(LIMIT).max_runs(PLACES);
    let app = Router::new().route("/uploads", post(async |_: IdempotentTx, body: Bytes| body)).layer(layer);
    let mut uploads: Vec<_> = ["eve", "ada"].into_iter().map(|user| stall(&app, user, "stalled", LIMIT)).collect();
    let mut without_key = Box::pin(app.clone().oneshot(of("ada", None, stalled(LIMIT))));
    assert!(without_key.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    uploads.push(stall(&app, "eve", "also", LIMIT / 2));
    for (user, key, kind) in
        [("bob", Some("bob"), "overloaded"), ("eve", Some("eve"), "overloaded"), ("bob", None, "overloaded")]
    {
        let refused = send(&app, of(user, key, stalled(LIMIT))).await;
        assert_eq!(refused.problem(), kind, "{user}");
    }
    // Some bytes are left.
    assert_eq!(send(&app, of("bob", Some("bob"), Body::from("x"))).await.status, StatusCode::OK);
    drop((uploads, without_key));
    assert_eq!(send(&app, of("bob", Some("more"), whole())).await.status, StatusCode::OK);
}

/// Duplicates hold their bytes while they wait, and the request that is performed has given its own to the handler.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn requests_that_wait_hold_their_bytes(pool: PgPool) {
    let options = Idempotency::new().on_duplicate(OnDuplicate::Wait(Duration::from_secs(60)));
    let layer = IdempotencyLayer::transactional(pool.clone(), options, user);
    let gate = Gate::new();
    let app = stops_at(&gate).layer(layer.request_limit(10).max_runs(PLACES));
    crate::support::create_effects(&pool).await;
    let first = spawned_post(&app, "/gate", "key-1", "0123456789");
    gate.reached().await;
    let duplicates = [(); 2].map(|()| spawned_post(&app, "/gate", "key-1", "0123456789"));
    for _ in 0..10 {
        yield_now().await;
    }
    let refused = send(&app, request("POST", "/gate", Some("key-1"), "0123456789")).await;
    assert_eq!(refused.problem(), "too-many-requests");
    gate.open();
    assert_eq!(first.await.expect("joined").status, StatusCode::OK);
    for duplicate in duplicates {
        assert!(duplicate.await.expect("joined").is_replayed());
    }
}

/// The layer never reaches a database, so the clock may stand still while something else happens.
fn without_database(limit: usize) -> Router {
    let pool = PgPoolOptions::new().connect_lazy("postgres://nowhere").expect("a pool");
    let layer = transactional(&pool).request_limit(limit);
    // Asked after the body has been read.
    let layer = layer.key_from(|_, _| Err(StatusCode::IM_A_TEAPOT.into()));
    Router::new().route("/uploads", post(async |_: IdempotentTx| "done")).layer(layer)
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_is_too_slow_is_broken_off() {
    for (bytes, seconds) in [(0, 30), (16_000 * 20, 50)] {
        let started = Instant::now();
        let app = without_database(1 << 20);
        let answer = app.oneshot(of("eve", None, stalled(bytes))).await.expect("infallible");
        assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
        assert_eq!(started.elapsed().as_secs(), seconds, "{bytes} bytes");
    }
}

/// A byte now and then does not prolong an upload.
#[tokio::test(start_paused = true)]
async fn an_upload_that_trickles_is_broken_off() {
    let started = Instant::now();
    let trickle = stream::repeat(()).then(async |()| {
        sleep(Duration::from_secs(1)).await;
        Ok::<_, Infallible>("x")
    });
    let answer = without_database(1 << 20).oneshot(of("eve", None, Body::from_stream(trickle))).await;
    assert_eq!(answer.expect("infallible").status(), StatusCode::BAD_REQUEST);
    assert_eq!(started.elapsed().as_secs(), 30);
}

/// 20 kB a second, for longer than the time that each upload has.
#[tokio::test(start_paused = true)]
async fn an_upload_over_a_slow_connection_is_read_to_its_end() {
    let started = Instant::now();
    let chunks = stream::iter(0..50).then(async |_| {
        sleep(Duration::from_secs(1)).await;
        Ok::<_, Infallible>(vec![b'x'; 20_000])
    });
    let answer = without_database(1 << 20).oneshot(of("eve", None, Body::from_stream(chunks))).await;
    assert_eq!(answer.expect("infallible").status(), StatusCode::IM_A_TEAPOT);
    assert_eq!(started.elapsed().as_secs(), 50);
}
