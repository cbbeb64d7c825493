//! Answers of another service that end before their last byte, over HTTP/2, and handlers that pass them on.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
use pg_idempotency::lease::Policy;
use sqlx::PgPool;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::frames::{NO_ERROR, data, headers, reset, settings, until_headers};
use crate::support::{leased, records, request, send, transactional};

const LEASE: Duration = Duration::from_secs(60);

/// A service that answers each request with these frames, and serves one request for each connection.
async fn upstream(frames: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let frames = [settings(), frames.clone()].concat();
            tokio::spawn(async move {
                socket.read_exact(&mut [0; crate::frames::PREFACE.len()]).await.expect("a preface");
                until_headers(&mut socket).await;
                socket.write_all(&frames).await.expect("sent");
                // Keeps the connection open until the client closes it.
                let _ = socket.read_to_end(&mut Vec::new()).await;
            });
        }
    });
    address
}

/// How the handler passes on the body.
#[derive(Clone, Copy, Debug)]
enum Passed {
    AsItCame,
    /// Only the header announces the length.
    AsStream,
}

/// Passes on the answer of the other service.
async fn pass_on(upstream: SocketAddr, method: Method, passed: Passed) -> Response {
    let socket = TcpStream::connect(upstream).await.expect("connected");
    let (mut client, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await.expect("a connection");
    tokio::spawn(connection);
    let request = Request::builder().method(method).uri("http://x/").body(Body::empty()).expect("a request");
    let answer = client.send_request(request).await.expect("an answer").into_response();
    match passed {
        Passed::AsItCame => answer,
        Passed::AsStream => answer.map(|body| Body::from_stream(body.into_data_stream())),
    }
}

/// The handler behind each kind of layer, for requests of one method.
fn services(pool: &PgPool, upstream: SocketAddr, method: &Method, passed: Passed) -> Vec<(&'static str, Router)> {
    let service = |layer: IdempotencyLayer, transactional| {
        let layer = layer.methods([method.clone()]);
        let route = match transactional {
            true => any(async move |_: IdempotentTx, method: Method| pass_on(upstream, method, passed).await),
            false => any(async move |method: Method| pass_on(upstream, method, passed).await),
        };
        Router::new().route("/", route).layer(layer)
    };
    vec![
        ("transaction", service(transactional(pool), true)),
        ("at least once", service(leased(pool, Policy::AtLeastOnce { lease: LEASE }), false)),
        ("at most once", service(leased(pool, Policy::AtMostOnce { lease: LEASE }), false)),
        ("in steps", service(leased(pool, Policy::InSteps { lease: LEASE }), false)),
    ]
}

async fn stored(pool: &PgPool) -> i64 {
    sqlx::query_scalar("select count(*) from idempotency.record where completed_at is not null")
        .fetch_one(pool)
        .await
        .expect("a count")
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_answer_shorter_than_it_announced_is_not_stored(pool: PgPool) {
    let head = headers(&[(":status", "200"), ("content-length", "1000")], false);
    let upstream = upstream([head, data("{\"charged\":1"), reset(NO_ERROR)].concat()).await;
    for passed in [Passed::AsItCame, Passed::AsStream] {
        for (name, app) in services(&pool, upstream, &Method::POST, passed) {
            let key = format!("\"{name} {passed:?}\"");
            let answer = send(&app, request("POST", "/", Some(&key), "x")).await;
            let refused = (StatusCode::INTERNAL_SERVER_ERROR, "misconfigured");
            assert_eq!((answer.status, &*answer.problem()), refused, "{key}");
            assert_eq!(stored(&pool).await, 0, "{key}");
        }
    }
}

/// They announce the length of a body that does not come.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_answer_without_a_body_is_stored_whatever_it_announces(pool: PgPool) {
    let cases = [(Method::HEAD, 200), (Method::POST, 204), (Method::POST, 304)];
    for (method, status) in cases {
        let status = StatusCode::from_u16(status).expect("a status");
        let upstream = upstream(headers(&[(":status", status.as_str()), ("content-length", "1000")], true)).await;
        for passed in [Passed::AsItCame, Passed::AsStream] {
            for (name, app) in services(&pool, upstream, &method, passed) {
                let key = format!("\"{name} {method} {status} {passed:?}\"");
                for replayed in [false, true] {
                    let answer = send(&app, request(method.as_str(), "/", Some(&key), "x")).await;
                    assert_eq!((answer.status, answer.is_replayed()), (status, replayed), "{key}: {answer:?}");
                    assert_eq!(answer.body, "", "{key}");
                }
            }
        }
    }
    assert_eq!(records(&pool).await, 24);
}
