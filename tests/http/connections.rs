//! Clients over real sockets that hang up, send half a request, pipeline, or speak HTTP/2.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{Extensions, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::routing::post;
use pg_idempotency::http::{IdempotentTx, Runs};
use pg_idempotency::testing::{Gate, PATIENCE, cancel_after};
use sqlx::PgPool;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::support::{app_without_layer, create_effects, effects, post_to, records, stops_at, transactional};

/// Tells that it is dropped.
struct Notice(Arc<Notify>);

impl Drop for Notice {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

struct Server {
    address: SocketAddr,
    app: Router,
    gate: Gate,
    runs: Runs,
    /// The server has dropped a request, because it has ended or its client has hung up.
    dropped: Arc<Notify>,
    stop: oneshot::Sender<()>,
    stopped: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Server {
    async fn start(pool: &PgPool) -> Self {
        let gate = Gate::new();
        let layer = transactional(pool);
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
        let app = stops_at(&gate).merge(app_without_layer()).layer(layer).layer(notices);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (stop, stopping) = oneshot::channel();
        let server = axum::serve(listener, app.clone()).with_graceful_shutdown(async {
            let _ = stopping.await;
        });
        Self { address, app, gate, runs, dropped, stop, stopped: tokio::spawn(server.into_future()) }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("connected")
    }

    async fn end(self) {
        let _ = self.stop.send(());
        timeout(PATIENCE, self.stopped).await.expect("in time").expect("joined").expect("served");
        timeout(PATIENCE, self.runs.finished()).await.expect("in time");
        assert_eq!(self.runs.count(), 0);
    }
}

fn raw(uri: &str, key: &str, body: &str) -> String {
    format!("POST {uri} HTTP/1.1\r\nhost: x\r\nidempotency-key: {key}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).contains(end) {
        let mut buffer = [0; 4096];
        let bytes = timeout(PATIENCE, stream.read(&mut buffer)).await.expect("in time").expect("read");
        assert_ne!(bytes, 0, "closed after {}", String::from_utf8_lossy(&read));
        read.extend_from_slice(&buffer[..bytes]);
    }
    String::from_utf8(read).expect("text")
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_client_that_hangs_up_changes_nothing(pool: PgPool) {
    create_effects(&pool).await;
    let server = Server::start(&pool).await;
    let mut client = server.connect().await;
    client.write_all(raw("/gate", "key-1", "x").as_bytes()).await.expect("sent");
    server.gate.reached().await;
    drop(client);
    timeout(PATIENCE, server.dropped.notified()).await.expect("the server notices");
    // Nor does a shutdown: the server ends, and the run goes on.
    let _ = server.stop.send(());
    timeout(PATIENCE, server.stopped).await.expect("in time").expect("joined").expect("served");
    assert_eq!(server.runs.count(), 1);
    assert!(cancel_after(1, server.runs.finished()).await.is_none());
    server.gate.open();
    timeout(PATIENCE, server.runs.finished()).await.expect("it came to its end");
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
    let retry = post_to(&server.app, "/gate", "key-1", "x").await;
    // Neither `oneshot` nor the raw client sends a content type, so this is the same request.
    assert_eq!((retry.status, retry.is_replayed()), (StatusCode::OK, true));
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn half_a_request_claims_nothing(pool: PgPool) {
    create_effects(&pool).await;
    let server = Server::start(&pool).await;
    let whole = raw("/effects", "key-1", "0123456789");
    for (cut, has_headers) in [(20, false), (whole.len() - 5, true)] {
        let mut client = server.connect().await;
        client.write_all(&whole.as_bytes()[..cut]).await.expect("sent");
        drop(client);
        if has_headers {
            timeout(PATIENCE, server.dropped.notified()).await.expect("the server has had the first half");
        }
        assert_eq!(server.runs.count(), 0);
    }
    server.end().await;
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn pipelined_and_chunked_requests_are_answered_in_order(pool: PgPool) {
    create_effects(&pool).await;
    let server = Server::start(&pool).await;
    let mut client = server.connect().await;
    let chunked = "POST /echo HTTP/1.1\r\nhost: x\r\nidempotency-key: key-2\r\ntransfer-encoding: chunked\r\n\r\n\
                   2\r\nab\r\n1\r\nc\r\n0\r\n\r\n";
    let last =
        "POST /echo HTTP/1.1\r\nhost: x\r\nidempotency-key: key-3\r\ncontent-length: 3\r\nconnection: close\r\n\r\nend";
    let all = [&*raw("/effects", "key-1", "x"), &raw("/effects", "key-1", "x"), chunked, last].concat();
    client.write_all(all.as_bytes()).await.expect("sent");
    let answers = read_until(&mut client, "\r\n\r\nend").await;
    let statuses: Vec<_> = answers.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
    assert_eq!(statuses, ["201", "201", "200", "200"]);
    assert_eq!(answers.matches("idempotent-replayed: true").count(), 1);
    assert!(answers.contains("\r\n\r\nabc"), "{answers}");
    assert_eq!(answers.matches("content-length: 8").count(), 2, "a replay has a length too: {answers}");
    server.end().await;
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn http_2_behaves_like_http_1(pool: PgPool) {
    create_effects(&pool).await;
    let server = Server::start(&pool).await;
    let client =
        reqwest::Client::builder().http2_prior_knowledge().no_proxy().timeout(PATIENCE).build().expect("a client");
    let post = async || {
        let request = client.post(format!("http://{}/effects", server.address)).header("idempotency-key", "key-1");
        request.body("x").send().await.expect("an answer")
    };
    let first = post().await;
    assert_eq!((first.version(), first.status().as_u16()), (reqwest::Version::HTTP_2, 201));
    let first = first.bytes().await.expect("a body");
    let repeat = post().await;
    assert_eq!(repeat.headers()["idempotent-replayed"], "true");
    assert_eq!(repeat.bytes().await.expect("a body"), first);
    drop(client);
    server.end().await;
    assert_eq!(effects(&pool).await, 1);
}

tokio::task_local! { static TRACE: &'static str; }

/// A run is a task of its own.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
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
