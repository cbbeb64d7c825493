//! A client over a real socket that hangs up, and what a run, which is a task of its own, has of its request.

use std::sync::Arc;

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

use crate::support::{create_effects, effects, post_to, records, stops_at, transactional};

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
