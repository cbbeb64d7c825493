//! Request and response bodies that are slow, endless, in many small chunks, or that fail.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::routing::post;
use futures_util::StreamExt as _;
use http_body::Frame;
use http_body_util::BodyExt as _;
use pg_idempotency::http::{IdempotentTx, NoStore};
use pg_idempotency::lease::Policy;
use rig::cases::each;
use rig::gate::{Gate, PATIENCE};
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE};
use sqlx::PgPool;
use tokio::time::timeout;
use tower::ServiceExt as _;

use crate::support::{
    create_effects, effects, insert, leased, post_to, recorded, records, request, spawned_post, transactional,
    until_nothing_is_open,
};

/// A body that always has a frame ready, and works a millisecond for each.
struct Restless {
    frames: u32,
    empty: bool,
}

impl http_body::Body for Restless {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.frames == 0 {
            return Poll::Ready(None);
        }
        self.frames -= 1;
        std::thread::sleep(Duration::from_millis(1));
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(if self.empty { b"" } else { b"x" })))))
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_stream_that_never_pauses_does_not_hold_the_transaction_open(pool: PgPool) {
    create_effects(&pool).await;
    for empty in [true, false] {
        let handler = async move |mut tx: IdempotentTx| {
            insert(&mut tx, "restless").await;
            Body::new(Restless { frames: 4000, empty })
        };
        let app = Router::new().route("/restless", post(handler)).layer(transactional(&pool));
        let key = format!("key-{empty}");
        let first = post_to(&app, "/restless", &key, "x").await;
        assert_eq!((first.status, first.body.len()), (StatusCode::OK, if empty { 0 } else { 4000 }));
        assert_eq!(post_to(&app, "/restless", &key, "x").await.problem(), "not-replayable");
    }
    assert_eq!(effects(&pool).await, 2);
}

/// A body that says how long it is, and comes late or never.
struct Late {
    data: Option<Bytes>,
    due: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl http_body::Body for Late {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.data.is_some() {
            std::task::ready!(self.due.as_mut().poll(context));
        }
        Poll::Ready(self.data.take().map(|data| Ok(Frame::data(data))))
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(self.data.as_ref().map_or(0, |data| data.len() as u64))
    }
}

fn late(due: impl Future<Output = ()> + Send + 'static) -> Body {
    Body::new(Late { data: Some(Bytes::from("late")), due: Box::pin(due) })
}

/// Longer than a stream may take.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_response_of_known_length_is_awaited_and_stored(pool: PgPool) {
    let handler = async || late(tokio::time::sleep(Duration::from_millis(1300)));
    let transaction = async move |_: IdempotentTx| handler().await;
    let leased = leased(&pool, AT_MOST_ONCE);
    let [transaction, leased] = [
        Router::new().route("/late", post(transaction)).layer(transactional(&pool)),
        Router::new().route("/late", post(handler)).layer(leased),
    ];
    each([(transaction, "key-1"), (leased, "key-2")], async |(app, key)| {
        for replayed in [false, true] {
            let answer = post_to(&app, "/late", key, "x").await;
            assert_eq!((answer.is_replayed(), &*answer.body), (replayed, &b"late"[..]), "{key}: {answer:?}");
        }
        Ok(())
    })
    .await;
}

/// The run ends at its time-out, and a second at the least is left to the body.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_response_of_known_length_that_never_comes_is_not_stored(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx| {
        insert(&mut tx, "never").await;
        late(std::future::pending())
    };
    let layer = transactional(&pool).run_timeout(Duration::from_millis(100));
    let app = Router::new().route("/never", post(handler)).layer(layer);
    let first = tower::ServiceExt::oneshot(app.clone(), crate::support::request("POST", "/never", Some("key-1"), "x"));
    let first = tokio::time::timeout(rig::gate::PATIENCE, first).await.expect("in time");
    assert_eq!(first.expect("infallible").status(), StatusCode::OK);
    assert_eq!(post_to(&app, "/never", "key-1", "x").await.problem(), "not-replayable");
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_body_in_many_small_chunks_is_replayed_whole(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx| {
        insert(&mut tx, "crumbs").await;
        let crumbs = (0..1000).map(|n| Ok::<_, std::io::Error>(format!("{n},")));
        Body::from_stream(futures_util::stream::iter(crumbs))
    };
    let app = Router::new().route("/crumbs", post(handler)).layer(transactional(&pool));
    let expected: String = (0..1000).map(|n| format!("{n},")).collect();
    for replayed in [false, true] {
        let answer = post_to(&app, "/crumbs", "key-1", "x").await;
        assert_eq!((answer.is_replayed(), &*answer.body), (replayed, expected.as_bytes()));
    }
    let too_large = Router::new().route("/crumbs", post(handler)).layer(transactional(&pool).response_limit(100));
    assert_eq!(post_to(&too_large, "/crumbs", "key-2", "x").await.body, expected, "nothing is lost or moved");
}

/// A body that panics when it is read.
struct Panics;

impl http_body::Body for Panics {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        panic!("on purpose")
    }
}

async fn panicked(app: &Router, uri: &'static str, key: &'static str) -> bool {
    let app = app.clone();
    tokio::spawn(async move { post_to(&app, uri, key, "x").await }).await.is_err_and(|error| error.is_panic())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_panic_in_the_response_body_is_a_panic_of_the_handler(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx| {
        insert(&mut tx, "panics").await;
        Body::new(Panics)
    };
    let app = Router::new().route("/panics", post(handler)).layer(transactional(&pool));
    for _ in 0..2 {
        assert!(panicked(&app, "/panics", "key-1").await);
        assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_panic_in_the_handler_or_in_its_response_body_settles_the_lease(pool: PgPool) {
    each([(AT_LEAST_ONCE, true), (AT_MOST_ONCE, false)], async |(policy, released)| {
        let routes = Router::new()
            .route("/handler", post(async || -> Body { panic!("on purpose") }))
            .route("/body", post(async || Body::new(Panics)));
        let app = routes.layer(leased(&pool, policy));
        let key = if released { "key-1" } else { "key-2" };
        for uri in ["/handler", "/body"] {
            assert!(panicked(&app, uri, key).await);
            let in_flight: (Option<bool>, bool) = sqlx::query_as(
                "select lease_until = '-infinity', lease_until > statement_timestamp()
                 from idempotency.record where operation = $1 and value = $2",
            )
            .bind(format!("POST {uri}"))
            .bind(key)
            .fetch_one(&pool)
            .await
            .expect("a record");
            assert_eq!(in_flight, (Some(released), false), "{policy:?} {uri}");
        }
        Ok(())
    })
    .await;
}

/// The handler has had its effect by then. A client that reads "nothing was done" would repeat it under another key.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_rejection_after_an_effect_outside_does_not_deny_the_effect(pool: PgPool) {
    let sent = Arc::new(AtomicU32::new(0));
    let counted = sent.clone();
    let handler = async move || {
        counted.fetch_add(1, Ordering::SeqCst);
        let parts = [Ok("half of it"), Err(std::io::Error::other("the disk is gone"))];
        Body::from_stream(futures_util::stream::iter(parts))
    };
    let layer = leased(&pool, AT_MOST_ONCE);
    let app = Router::new().route("/sms", post(handler)).layer(layer);
    let answer = post_to(&app, "/sms", "key-1", "x").await;
    assert_eq!((answer.status, &*answer.problem()), (StatusCode::INTERNAL_SERVER_ERROR, "misconfigured"));
    assert_eq!(sent.load(Ordering::SeqCst), 1);
    let problem: serde_json::Value = serde_json::from_slice(&answer.body).expect("JSON");
    let detail = problem["detail"].as_str().expect("text");
    assert!(!detail.contains("nothing"), "the answer says: {detail}");
    assert_eq!(post_to(&app, "/sms", "key-1", "x").await.problem(), "indeterminate");
    assert_eq!(sent.load(Ordering::SeqCst), 1);
}

/// A body that waits at a gate before its only byte.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_lease_that_is_lost_while_the_response_is_read_stores_nothing(pool: PgPool) {
    let gate = Gate::new();
    let gated = gate.clone();
    let handler = async move || {
        let gate = gated.clone();
        Body::from_stream(futures_util::stream::once(async move {
            gate.pass().await;
            Ok::<_, std::io::Error>("sent")
        }))
    };
    let layer = leased(&pool, Policy::AtLeastOnce { lease: Duration::from_secs(1) });
    let app = Router::new().route("/slow", post(handler)).layer(layer);
    let first = spawned_post(&app, "/slow", "key-1", "x");
    gate.reached().await;
    sqlx::raw_sql("update idempotency.record set token = token + 1").execute(&pool).await.expect("taken over");
    let lost = first.await.expect("joined");
    assert_eq!((lost.status, &*lost.problem()), (StatusCode::SERVICE_UNAVAILABLE, "unavailable"));
    assert!(!recorded::<bool>(&pool, "completed_at is not null").await);
    gate.open();
}

/// A record without a response is committed before the stream is sent, even if the client reads slowly.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_secret_is_not_stored_and_holds_no_transaction(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx, body: String| {
        insert(&mut tx, "secret").await;
        drop(tx);
        let endless = futures_util::stream::pending::<Result<Bytes, std::io::Error>>();
        (axum::Extension(NoStore), if body == "stream" { Body::from_stream(endless) } else { Body::from(body) })
    };
    let app = Router::new().route("/secret", post(handler)).layer(transactional(&pool));
    let started = Instant::now();
    let request = crate::support::request("POST", "/secret", Some("key-1"), "stream");
    let response = tower::ServiceExt::oneshot(app.clone(), request).await.expect("infallible");
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!((response.status(), effects(&pool).await), (StatusCode::OK, 1));
    until_nothing_is_open(&pool).await;
    drop(response);
    assert_eq!(post_to(&app, "/secret", "key-2", "whole").await.body, "whole");
    assert_eq!(post_to(&app, "/secret", "key-2", "whole").await.problem(), "not-replayable");
    assert!(recorded::<bool>(&pool, "bool_and(response_body is null)").await);
    assert_eq!(effects(&pool).await, 2);
}

/// The stream of events has no end while the gate is closed. A stream of another type is held back ten times as long.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_stream_of_events_is_sent_soon_and_a_short_one_is_replayed(pool: PgPool) {
    create_effects(&pool).await;
    let gate = Gate::new();
    let gated = gate.clone();
    let long = async move |mut tx: IdempotentTx| {
        insert(&mut tx, "events").await;
        let first = futures_util::stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"data: 1\n\n"))]);
        let last = futures_util::stream::once(async move {
            gated.pass().await;
            Ok(Bytes::from_static(b"data: 2\n\n"))
        });
        ([("content-type", "Text/Event-Stream; charset=utf-8")], Body::from_stream(first.chain(last)))
    };
    let short = async |mut tx: IdempotentTx| {
        insert(&mut tx, "event").await;
        let events = futures_util::stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"data: 1\n\n"))]);
        ([("content-type", "text/event-stream")], Body::from_stream(events))
    };
    let app = Router::new().route("/long", post(long)).route("/short", post(short)).layer(transactional(&pool));
    // The fastest of some, because the machine may be busy.
    let mut fastest = Duration::MAX;
    for number in 0..5 {
        let started = std::time::Instant::now();
        let sent = app.clone().oneshot(request("POST", "/long", Some(&format!("long-{number}")), "x"));
        let response = timeout(PATIENCE, sent).await.expect("in time").expect("infallible");
        fastest = fastest.min(started.elapsed());
        gate.open();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        assert_eq!(body, "data: 1\n\ndata: 2\n\n");
    }
    assert!(fastest < Duration::from_millis(900), "{fastest:?}");
    assert_eq!(post_to(&app, "/long", "long-0", "x").await.problem(), "not-replayable");
    let first = post_to(&app, "/short", "short", "x").await;
    let again = post_to(&app, "/short", "short", "x").await;
    assert_eq!((again.is_replayed(), again.body), (true, first.body));
}
