//! What a client or a proxy sees on a real socket, above all with HTTP/1.1.

use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use futures_util::future::join_all;
use http_body_util::BodyExt as _;
use http_body_util::Full;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use pg_idempotency::http::IdempotentTx;
use rig::gate::PATIENCE;
use sqlx::PgPool;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::frames::Served;
use crate::support::{app, create_effects, effects, insert, records, transactional};

/// More than hyper reads at once.
const LIMIT: usize = 64 * 1024;
const CHUNK: usize = 8 * 1024;

/// Reads until the text ends like this.
async fn read_until(client: &mut TcpStream, end: &str) -> String {
    let mut read = Vec::new();
    let reading = async {
        while !read.ends_with(end.as_bytes()) {
            let mut part = [0; 4096];
            let count = client.read(&mut part).await.expect("no reset");
            assert_ne!(count, 0, "closed after {:?}", String::from_utf8_lossy(&read));
            read.extend_from_slice(&part[..count]);
        }
    };
    timeout(PATIENCE, reading).await.expect("in time");
    String::from_utf8(read).expect("text")
}

/// Sends a body of this many chunks, and gives the server time after each.
async fn send_slowly(client: &mut TcpStream, chunks: usize, framed: bool) -> std::io::Result<()> {
    for _ in 0..chunks {
        if framed {
            client.write_all(format!("{CHUNK:x}\r\n").as_bytes()).await?;
        }
        client.write_all(&[b'x'; CHUNK]).await?;
        if framed {
            client.write_all(b"\r\n").await?;
        }
        for _ in 0..4 {
            yield_now().await;
        }
    }
    if framed { client.write_all(b"0\r\n\r\n").await } else { Ok(()) }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_slow_client_reads_that_its_body_is_too_large(pool: PgPool) {
    create_effects(&pool).await;
    let server = Served::of(app(transactional(&pool).request_limit(LIMIT))).await;
    let chunks = 4 * LIMIT / CHUNK;
    let client = async |number: usize| {
        let mut client = server.connect().await;
        let framed = number.is_multiple_of(2);
        let length =
            if framed { "transfer-encoding: chunked".to_owned() } else { format!("content-length: {}", 4 * LIMIT) };
        let head = format!("POST /effects HTTP/1.1\r\nhost: x\r\nidempotency-key: key-{number}\r\n{length}\r\n\r\n");
        client.write_all(head.as_bytes()).await.expect("sent");
        send_slowly(&mut client, chunks, framed).await.expect("the server reads to the end");
        let answer = read_until(&mut client, "}").await;
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
        assert!(answer.contains("problem:body-too-large"), "{answer}");
        // The connection is as good as before.
        let next = format!(
            "POST /effects HTTP/1.1\r\nhost: x\r\nidempotency-key: next-{number}\r\ncontent-length: 1\r\n\r\nx"
        );
        client.write_all(next.as_bytes()).await.expect("sent");
        let answer = read_until(&mut client, "}").await;
        assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    };
    for round in 0..10 {
        join_all((0..10).map(|number| client(10 * round + number))).await;
    }
    assert_eq!(records(&pool).await, 100);
}

/// The client asks before it sends the body, and a much larger one is not read.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_body_that_nobody_should_send_is_refused_unread(pool: PgPool) {
    create_effects(&pool).await;
    let server = Served::of(app(transactional(&pool).request_limit(LIMIT))).await;
    for announced in
        [format!("expect: 100-continue\r\ncontent-length: {}", 4 * LIMIT), format!("content-length: {}", u64::MAX / 2)]
    {
        let mut client = server.connect().await;
        let head = format!("POST /effects HTTP/1.1\r\nhost: x\r\nidempotency-key: key-1\r\n{announced}\r\n\r\n");
        client.write_all(head.as_bytes()).await.expect("sent");
        let answer = timeout(Duration::from_secs(5), read_until(&mut client, "}")).await.expect("at once");
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    }
}

/// A client that sends nothing more does not keep its request for ever, and neither does one that never ends.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn reading_on_is_bounded(pool: PgPool) {
    create_effects(&pool).await;
    let server = Served::of(app(transactional(&pool).request_limit(LIMIT))).await;
    let head = "POST /effects HTTP/1.1\r\nhost: x\r\nidempotency-key: key-1\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut silent = server.connect().await;
    silent.write_all(head.as_bytes()).await.expect("sent");
    silent.write_all(format!("{:x}\r\n", 4 * LIMIT).as_bytes()).await.expect("sent");
    silent.write_all(&[b'x'; 2 * LIMIT]).await.expect("sent");
    assert!(read_until(&mut silent, "}").await.starts_with("HTTP/1.1 413 "));

    let mut endless = server.connect().await;
    endless.write_all(head.as_bytes()).await.expect("sent");
    let sending = async {
        let chunk = format!("{CHUNK:x}\r\n{}\r\n", "x".repeat(CHUNK));
        while endless.write_all(chunk.as_bytes()).await.is_ok() {}
    };
    timeout(PATIENCE, sending).await.expect("it stops");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn trailers_reach_the_client(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |_: IdempotentTx| {
        let trailers =
            HeaderMap::from_iter([(header::HeaderName::from_static("x-sum"), HeaderValue::from_static("abc"))]);
        let body = Full::new(Bytes::from("hello")).with_trailers(async { Some(Ok(trailers)) });
        ([(header::TRAILER, "x-sum")], Body::new(body))
    };
    let server = Served::of(Router::new().route("/sum", post(handler)).layer(transactional(&pool))).await;
    let mut client = server.connect().await;
    let request =
        "POST /sum HTTP/1.1\r\nhost: x\r\nte: trailers\r\nidempotency-key: key-1\r\ncontent-length: 1\r\n\r\nx";
    client.write_all(request.as_bytes()).await.expect("sent");
    let answer = read_until(&mut client, "\r\nx-sum: abc\r\n\r\n").await;
    assert!(answer.contains("transfer-encoding: chunked"), "{answer}");
}

/// `hello` as a stream, with a header that frames another body. Such a header remains when a handler passes on the head
/// of another service's answer, and changes the body.
fn framed(header: &str) -> Response {
    let (name, value) = header.split_once(": ").expect("a header");
    let parts = ["hel", "lo"].map(Ok::<_, std::io::Error>);
    ([(name, value)], Body::from_stream(futures_util::stream::iter(parts))).into_response()
}

/// Otherwise the rest of one answer would be a part of the next answer, and a proxy sends the next answer to another
/// client.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_answer_on_a_connection_ends_where_its_head_says(pool: PgPool) {
    let app = Router::new()
        .route("/framed", post(async |_: IdempotentTx, body: String| framed(&body)))
        .layer(transactional(&pool));
    let server = Served::of(app).await;
    for body in ["content-length: 3", "transfer-encoding: chunked", "content-length: 5"] {
        let head = format!("POST /framed HTTP/1.1\r\nhost: x\r\nidempotency-key: \"{body}\"");
        let request = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let mut client = server.connect().await;
        for replayed in [false, true, true] {
            client.write_all(request.as_bytes()).await.expect("sent");
            let answer = read_until(&mut client, "\r\n\r\nhello").await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{body}: {answer}");
            assert_eq!(answer.contains("idempotent-replayed: true"), replayed, "{body}: {answer}");
            assert!(answer.contains("\r\ncontent-length: 5\r\n"), "{body}: {answer}");
        }
    }
}

/// Which versions and forms of HTTP reach the service depends on the proxy that a retry meets.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_retry_in_another_form_of_http_is_the_same_request(pool: PgPool) {
    create_effects(&pool).await;
    let server = Served::of(app(transactional(&pool).fingerprint_header(header::HOST))).await;
    let head = |line: &str| format!("POST {line}\r\nhost: shop.example\r\nidempotency-key: \"key-1\"\r\n");
    let forms = [
        head("/effects HTTP/1.1") + "content-length: 1\r\n\r\nx",
        head("/effects HTTP/1.0") + "content-length: 1\r\n\r\nx",
        head("/effects HTTP/1.1") + "transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        head("http://shop.example/effects HTTP/1.1") + "content-length: 1\r\n\r\nx",
    ];
    for (number, form) in forms.iter().enumerate() {
        let mut client = server.connect().await;
        client.write_all(form.as_bytes()).await.expect("sent");
        let answer = read_until(&mut client, "{\"id\":1}").await;
        assert!(answer.contains("content-length: 8"), "{form}: {answer}");
        assert_eq!(answer.contains("idempotent-replayed: true"), number > 0, "{form}: {answer}");
    }
    let (mut client, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(server.connect().await)).await.expect("a connection");
    let driving = tokio::spawn(connection);
    for (host, status) in [("shop.example", StatusCode::CREATED), ("other.example", StatusCode::UNPROCESSABLE_ENTITY)] {
        let request = Request::post(format!("http://{host}/effects")).header("idempotency-key", "key-1");
        let request = request.body(Full::new(Bytes::from_static(b"x"))).expect("a request");
        assert_eq!(client.send_request(request).await.expect("an answer").status(), status, "{host}");
    }
    driving.abort();
}

/// The layer refuses such a request before the client sends its body, or asks for the body.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_client_that_waits_for_100_continue_gets_its_answer(pool: PgPool) {
    create_effects(&pool).await;
    let server = Served::of(app(transactional(&pool))).await;
    for (key, first) in [("key-1, key-2", "HTTP/1.1 400 "), ("key-1", "HTTP/1.1 100 "), ("key-1", "HTTP/1.1 100 ")] {
        let mut client = server.connect().await;
        let head = format!("POST /effects HTTP/1.1\r\nhost: x\r\nidempotency-key: {key}\r\nexpect: 100-continue");
        client.write_all(format!("{head}\r\ncontent-length: 1\r\n\r\n").as_bytes()).await.expect("sent");
        let answer = read_until(&mut client, if first.contains("100") { "\r\n\r\n" } else { "}" }).await;
        assert!(answer.starts_with(first), "{answer}");
        if first.contains("100") {
            client.write_all(b"x").await.expect("sent");
            assert!(read_until(&mut client, "{\"id\":1}").await.starts_with("HTTP/1.1 201 "));
        }
    }
    assert_eq!(records(&pool).await, 1);
}

/// The layer covers GET here, and the handler echoes what the client sends after the upgrade.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_upgrade_is_performed_once_and_cannot_be_replayed(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx, mut request: axum::extract::Request| {
        insert(&mut tx, "upgraded").await;
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut socket = TokioIo::new(upgrade.await.expect("upgraded"));
            let mut sent = [0; 4];
            socket.read_exact(&mut sent).await.expect("read");
            socket.write_all(&sent).await.expect("written");
        });
        (StatusCode::SWITCHING_PROTOCOLS, [(header::CONNECTION, "upgrade"), (header::UPGRADE, "echo")])
    };
    let layer = transactional(&pool).methods([Method::GET, Method::HEAD]);
    let server = Served::of(Router::new().route("/echo", get(handler)).layer(layer)).await;
    let request = "GET /echo HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: echo\r\n\
                   idempotency-key: key-1\r\n\r\n";
    let mut client = server.connect().await;
    client.write_all(request.as_bytes()).await.expect("sent");
    let answer = read_until(&mut client, "\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    client.write_all(b"ping").await.expect("sent");
    assert_eq!(read_until(&mut client, "ping").await, "ping");

    let mut retry = server.connect().await;
    retry.write_all(request.as_bytes()).await.expect("sent");
    let answer = read_until(&mut retry, "}").await;
    assert!(answer.starts_with("HTTP/1.1 409 ") && answer.contains("problem:not-replayable"), "{answer}");
    assert_eq!(effects(&pool).await, 1);
}
