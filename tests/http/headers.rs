//! The header `Idempotency-Key`, and other places that a key may come from.

use sqlx::PgPool;

use crate::support::{app, create_effects, effects, post_to, request, send, transactional};

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_service_takes_both_forms_as_one_key(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    assert!(!post_to(&app, "/effects", "abc", "x").await.is_replayed());
    assert!(post_to(&app, "/effects", "\"abc\"", "x").await.is_replayed());
    assert_eq!(post_to(&app, "/effects", "a, b", "x").await.problem(), "malformed-key");
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_key_may_come_from_the_body_and_must_be_long_enough(pool: PgPool) {
    create_effects(&pool).await;
    let from_body = transactional(&pool).with_shortest_key(4).with_key_from(|_, body| {
        let order: Option<serde_json::Value> = serde_json::from_slice(body).ok();
        Ok(order.and_then(|order| Some(order["reference"].as_str()?.to_owned())))
    });
    let app = app(from_body);
    for replayed in [false, true] {
        let answer = send(&app, request("POST", "/effects", None, r#"{"reference":"r-17"}"#)).await;
        assert_eq!(answer.is_replayed(), replayed, "{answer:?}");
    }
    for (body, problem) in [
        (r#"{"reference":"r-1"}"#, "malformed-key"),
        (r#"{"reference":"line\nbreak"}"#, "malformed-key"),
        ("{}", "missing-key"),
    ] {
        assert_eq!(send(&app, request("POST", "/effects", None, body)).await.problem(), problem, "{body}");
    }
    assert_eq!(effects(&pool).await, 1);
}
