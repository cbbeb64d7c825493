//! Clients that say nothing for a long time take nothing away from others.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use pg_idempotency::http::IdempotencyLayer;
use rig::gate::PATIENCE;
use rig::lease::AT_MOST_ONCE;
use sqlx::PgPool;
use tokio::io::AsyncWriteExt as _;
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::frames::Served;
use crate::support::{app_without_layer, create_effects, leased, pool_of, post_to, request, send, transactional};

const SILENT: usize = 100;

/// The heads of these requests arrive, and their bodies do not.
async fn a_stranger_is_answered_beside_silent_sockets(app: Router, layer: &IdempotencyLayer, pool: &PgPool) {
    let server = Served::of(app.clone()).await;
    let mut sockets = Vec::new();
    for number in 0..2 * SILENT {
        let key = if number < SILENT { String::new() } else { format!("idempotency-key: silent-{number}\r\n") };
        let head = format!("POST /effects HTTP/1.1\r\nhost: x\r\n{key}content-length: 5\r\n\r\n");
        let mut socket = server.connect().await;
        socket.write_all(head.as_bytes()).await.expect("sent");
        sockets.push(socket);
    }
    // The server answers this one, on a socket of its own, after it has read the heads before.
    let mut last = server.connect().await;
    last.write_all(b"GET /effects HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("sent");
    last.readable().await.expect("an answer");
    for key in [Some("stranger"), None] {
        let answer = send(&app, request("POST", "/effects", key, "x")).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    }
    assert_eq!(layer.runs().count(), 0);
    // No connection waits for a client.
    let all_idle = async {
        while pool.num_idle() < usize::try_from(pool.size()).expect("small") {
            yield_now().await;
        }
    };
    timeout(PATIENCE, all_idle).await.expect("in time");
    drop(sockets);
    assert!(post_to(&app, "/effects", "stranger", "x").await.is_replayed());
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn silent_sockets_hold_no_place_and_no_connection(pool: PgPool) {
    let pool = pool_of(3, &pool.connect_options()).await;
    create_effects(&pool).await;
    let layer = transactional(&pool).optional_key(true);
    a_stranger_is_answered_beside_silent_sockets(app_without_layer().layer(layer.clone()), &layer, &pool).await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn silent_sockets_hold_no_place_of_a_leased_layer(pool: PgPool) {
    let pool = pool_of(3, &pool.connect_options()).await;
    let layer = leased(&pool, AT_MOST_ONCE).optional_key(true);
    let layer = layer.max_runs(SILENT / 2);
    let route = post(async |_: String| StatusCode::CREATED).get(async || "read");
    let app = Router::new().route("/effects", route).layer(layer.clone());
    a_stranger_is_answered_beside_silent_sockets(app, &layer, &pool).await;
}
