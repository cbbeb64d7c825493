//! A lease that is lent once, and streams that are not waited for.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::routing::post;
use futures_util::StreamExt as _;
use http_body_util::BodyExt as _;
use pg_idempotency::http::IdempotentTx;
use pg_idempotency::lease::{Lease, Policy};
use rig::gate::{Gate, PATIENCE};
use sqlx::PgPool;
use tokio::time::timeout;
use tower::ServiceExt as _;

use crate::support::{create_effects, insert, leased, post_to, request, transactional};

const LEASE: Duration = Duration::from_secs(60);

/// A middleware inside the layer calls the handler again after it has answered.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_second_call_of_the_handler_gets_no_lease_under_at_most_once(pool: PgPool) {
    for (key, policy, effects) in
        [("once", Policy::AtMostOnce { lease: LEASE }, 1), ("often", Policy::AtLeastOnce { lease: LEASE }, 2)]
    {
        let sent = Arc::new(AtomicU32::new(0));
        let counted = sent.clone();
        let send = async move |_: Lease| {
            counted.fetch_add(1, Ordering::Relaxed);
            StatusCode::SERVICE_UNAVAILABLE
        };
        let again = from_fn(async |request: Request, next: Next| {
            let (parts, _) = request.into_parts();
            let first = Request::from_parts(parts.clone(), Body::empty());
            drop(next.clone().run(first).await);
            next.run(Request::from_parts(parts, Body::empty())).await
        });
        let app = Router::new().route("/texts", post(send)).layer(again).layer(leased(&pool, policy));
        let answer = post_to(&app, "/texts", key, "x").await;
        assert_eq!(sent.load(Ordering::Relaxed), effects, "{policy:?}: {answer:?}");
        let retry = post_to(&app, "/texts", key, "x").await;
        let at_most_once = effects == 1;
        let is_indeterminate = retry.rejection.is_some_and(|rejection| rejection.kind() == "indeterminate");
        assert_eq!(is_indeterminate, at_most_once, "{policy:?}");
    }
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
