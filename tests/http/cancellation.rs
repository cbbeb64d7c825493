//! Clients that hang up at any moment and over a real socket, runtimes that shut down, and what a run, which is a task
//! of its own, has of its request.

use std::future::Future as _;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{Extensions, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::routing::post;
use pg_idempotency::http::IdempotentTx;
use rig::gate::{Gate, PATIENCE, cancel_after};
use sqlx::PgPool;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;
use tower::ServiceExt as _;

use crate::support::{
    app, app_without_layer, create_effects, effects, options, pool_of, post_to, records, request, stops_at,
    transactional, until_nothing_is_open,
};

/// For each n, the request is polled at most n times and dropped: its run goes to the end, or never began.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_that_is_dropped_at_any_poll_is_done_once_or_not_at_all(pool: PgPool) {
    let pool = pool_of(2, &pool.connect_options()).await;
    create_effects(&pool).await;
    let layer = transactional(&pool);
    let runs = layer.runs();
    let app = app(layer);
    for polls in 0..6 {
        for again in 0..5 {
            let key = format!("key-{polls}-{again}");
            {
                let mut call = pin!(app.clone().oneshot(request("POST", "/effects", Some(&key), "x")));
                for _ in 0..polls {
                    if call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                        break;
                    }
                    // So that the run is at another point each time.
                    tokio::time::sleep(Duration::from_millis(again)).await;
                }
            }
            timeout(PATIENCE, runs.finished()).await.expect("in time");
            let before = effects(&pool).await;
            assert_eq!(before, records(&pool).await);
            let answer = post_to(&app, "/effects", &key, "x").await;
            assert_eq!(answer.status, StatusCode::CREATED);
            assert_eq!(effects(&pool).await, before + i64::from(!answer.is_replayed()));
        }
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (30, 30));
    until_nothing_is_open(&pool).await;
}

/// A runtime shuts down during a run: everything is rolled back, and the next process performs.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_runtime_that_ends_under_a_run_leaves_nothing(pool: PgPool) {
    create_effects(&pool).await;
    let gate = Gate::new();
    let dying = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let (gated, server) = (gate.clone(), options(&pool));
    dying.spawn(async move {
        let pool = pool_of(2, &server).await;
        let app = stops_at(&gated).merge(app_without_layer()).layer(transactional(&pool));
        post_to(&app, "/gate", "key-1", "x").await
    });
    gate.reached().await;
    dying.shutdown_background();
    until_nothing_is_open(&pool).await;
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    let app = stops_at(&gate).layer(transactional(&pool));
    gate.open();
    assert_eq!(post_to(&app, "/gate", "key-1", "x").await.status, StatusCode::OK);
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
}

/// Tells that it is dropped.
struct Notice(Arc<Notify>);

impl Drop for Notice {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_client_that_hangs_up_changes_nothing(pool: PgPool) {
    create_effects(&pool).await;
    let gate = Gate::new();
    let layer = transactional(&pool);
    let runs = layer.runs();
    let dropped = Arc::new(Notify::new());
    let noticing = dropped.clone();
    let notices = from_fn(move |request: Request, next: Next| {
        let notice = Notice(noticing.clone());
        async move {
            let response = next.run(request).await;
            drop(notice);
            response
        }
    });
    let app = stops_at(&gate).layer(layer).layer(notices);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let mut client = TcpStream::connect(listener.local_addr().expect("an address")).await.expect("connected");
    let (stop, stopping) = oneshot::channel::<()>();
    let server = axum::serve(listener, app.clone()).with_graceful_shutdown(async { drop(stopping.await) });
    let stopped = tokio::spawn(server.into_future());

    let request = "POST /gate HTTP/1.1\r\nhost: x\r\nidempotency-key: key-1\r\ncontent-length: 1\r\n\r\nx";
    client.write_all(request.as_bytes()).await.expect("sent");
    gate.reached().await;
    drop(client);
    timeout(PATIENCE, dropped.notified()).await.expect("the server notices");
    // Nor does a shutdown: the server ends, and the run goes on.
    stop.send(()).expect("it listens");
    timeout(PATIENCE, stopped).await.expect("in time").expect("joined").expect("served");
    assert_eq!(runs.count(), 1);
    assert!(cancel_after(1, runs.finished()).await.is_none());
    gate.open();
    timeout(PATIENCE, runs.finished()).await.expect("it came to its end");
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
    let retry = post_to(&app, "/gate", "key-1", "x").await;
    // Neither `oneshot` nor the raw client sends a content type, so this is the same request.
    assert_eq!((retry.status, retry.is_replayed()), (StatusCode::OK, true));
}

tokio::task_local! { static TRACE: &'static str; }

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn task_locals_stay_outside_and_extensions_come_along(pool: PgPool) {
    let handler = async |_: IdempotentTx, extensions: Extensions| {
        let local = TRACE.try_with(|trace| *trace).unwrap_or("none");
        format!("{local}, {}", extensions.get::<&'static str>().unwrap_or(&"none"))
    };
    let outer = async |mut request: Request, next: Next| {
        request.extensions_mut().insert("extension");
        TRACE.scope("task-local", next.run(request)).await
    };
    let app = Router::new().route("/where", post(handler)).layer(transactional(&pool)).layer(from_fn(outer));
    assert_eq!(post_to(&app, "/where", "key-1", "x").await.body, "none, extension");
}
