//! Layers further out that change the body: limits of its size, and decoders.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Request, StatusCode};
use axum::routing::post;
use futures_util::stream;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use pg_idempotency::http::IdempotentTx;
use sqlx::PgPool;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::limit::RequestBodyLimitLayer;

use crate::frames::Served;
use crate::support::{app, create_effects, post_to, records, request, send, transactional};

/// Five chunks of a thousand bytes, without an announced length.
fn chunks() -> Body {
    Body::from_stream(stream::iter([[b'x'; 1000]; 5].map(|chunk| Ok::<_, std::io::Error>(Bytes::from_owner(chunk)))))
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_body_over_a_limit_further_out_is_too_large(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool).optional_key(true)).layer(RequestBodyLimitLayer::new(1000));
    for key in [Some("key-1"), None] {
        let refused = send(&app, request("POST", "/effects", key, "").map(|_| chunks())).await;
        assert_eq!((refused.status, &*refused.problem()), (StatusCode::PAYLOAD_TOO_LARGE, "body-too-large"));
        assert!(!refused.rejection.expect("a rejection").is_retryable());
    }
    assert_eq!(records(&pool).await, 0);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_body_over_a_limit_further_out_is_too_large_on_a_socket(pool: PgPool) {
    let server = Served::of(app(transactional(&pool)).layer(RequestBodyLimitLayer::new(1000))).await;

    let mut client = server.connect().await;
    let head = "POST /effects HTTP/1.1\r\nhost: x\r\nidempotency-key: key-1\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = format!("3e8\r\n{}\r\n", "x".repeat(1000));
    client.write_all(format!("{head}{}0\r\n\r\n", chunk.repeat(5)).as_bytes()).await.expect("sent");
    let mut answer = [0; 13];
    client.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 413 ");

    let (mut client, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(server.connect().await)).await.expect("a connection");
    let driving = tokio::spawn(connection);
    let request = Request::post("http://x/effects").header("idempotency-key", "key-2").body(chunks());
    let answer = client.send_request(request.expect("a request")).await.expect("an answer");
    assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
    driving.abort();
}

/// `gzip` of `amount=1000`.
const GZIP: [u8; 31] = [
    0x1f, 0x8b, 0x08, 0, 0, 0, 0, 0, 0, 0x03, 0x4b, 0xcc, 0xcd, 0x2f, 0xcd, 0x2b, 0xb1, 0x35, 0x34, 0x30, 0x30, 0, 0,
    0x06, 0xde, 0x46, 0x3e, 0x0b, 0, 0, 0,
];

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_body_that_a_layer_further_out_cannot_decode_is_not_sent_again(pool: PgPool) {
    let route = post(async |_: IdempotentTx, body: Bytes| body);
    let app = Router::new().route("/echo", route).layer(transactional(&pool)).layer(RequestDecompressionLayer::new());
    let compressed = |key, body: Vec<u8>| {
        let mut request = request("POST", "/echo", Some(key), "").map(|_| Body::from(body));
        request.headers_mut().insert("content-encoding", "gzip".parse().expect("a value"));
        request
    };
    let changed = |at: usize| {
        let mut bytes = GZIP.to_vec();
        bytes[at] ^= 0xff;
        bytes
    };
    let cases = [
        ("no gzip", b"amount=1000".to_vec(), "invalid-body"),
        ("another block", changed(10), "invalid-body"),
        ("another sum", changed(23), "invalid-body"),
        ("the first half", GZIP[..15].to_vec(), "broken-body"),
        ("all but the sum", GZIP[..25].to_vec(), "broken-body"),
    ];
    for (name, body, kind) in cases {
        let refused = send(&app, compressed("key-1", body)).await;
        assert_eq!((refused.status, &*refused.problem()), (StatusCode::BAD_REQUEST, kind), "{name}");
        assert_eq!(refused.rejection.expect("a rejection").is_retryable(), kind == "broken-body", "{name}");
    }
    assert_eq!(send(&app, compressed("key-1", GZIP.to_vec())).await.body, "amount=1000");
    assert!(post_to(&app, "/echo", "key-1", "amount=1000").await.is_replayed());
}
