//! The record keeps the trace of the request that did the work.

use axum::Router;
use axum::http::HeaderValue;
use axum::routing::post;
use pg_idempotency::lease::Lease;
use pg_idempotency::{Key, RoundTrips, operator};
use rig::lease::AT_LEAST_ONCE;
use sqlx::PgPool;

use crate::support::{Answer, app, create_effects, effects, leased, request, saving, send, transactional};

const FIRST: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const SECOND: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

async fn post_in(app: &Router, uri: &str, key: &str, traces: &[&str]) -> Answer {
    let mut request = request("POST", uri, Some(key), "x");
    for trace in traces {
        request.headers_mut().append("traceparent", HeaderValue::from_str(trace).expect("a value"));
    }
    send(app, request).await
}

async fn kept(pool: &PgPool, operation: &str, key: &str) -> Option<String> {
    let key = Key::new("ada", operation, key).expect("a key");
    operator::show(pool, &key).await.expect("shown").expect("a record").trace
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_record_keeps_the_first_requests_trace_and_a_replay_shows_none(pool: PgPool) {
    create_effects(&pool).await;
    for saved in [RoundTrips::Plain, RoundTrips::SelectFirst, RoundTrips::Fewest] {
        let (app, key) = (app(saving(&pool, saved)), format!("{saved:?}"));
        assert!(!post_in(&app, "/effects", &key, &[FIRST]).await.is_replayed(), "{key}");
        let replay = post_in(&app, "/effects", &key, &[SECOND]).await;
        assert!(replay.is_replayed(), "{key}: the trace is no part of the request");
        let shown = format!("{:?} {:?}", replay.headers, replay.body);
        assert!(!shown.contains("traceparent") && !shown.contains(&FIRST[3..35]), "{shown}");
        assert_eq!(kept(&pool, "POST /effects", &key).await.as_deref(), Some(FIRST), "{key}");
    }
    let texts = Router::new().route("/texts", post(async |_: Lease| "sent")).layer(leased(&pool, AT_LEAST_ONCE));
    assert_eq!(post_in(&texts, "/texts", "key-1", &[FIRST]).await.body, "sent");
    assert!(post_in(&texts, "/texts", "key-1", &[SECOND]).await.is_replayed());
    assert_eq!(kept(&pool, "POST /texts", "key-1").await.as_deref(), Some(FIRST));
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_trace_that_is_not_valid_counts_as_none(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    let upper = FIRST.to_uppercase();
    for (n, traces) in [&[][..], &["nonsense"], &[&*upper], &[FIRST, SECOND], &[FIRST, FIRST]].into_iter().enumerate() {
        let key = format!("key-{n}");
        assert!(!post_in(&app, "/effects", &key, traces).await.is_replayed());
        assert_eq!(kept(&pool, "POST /effects", &key).await, None, "{traces:?}");
    }
    assert_eq!(effects(&pool).await, 5);
}
