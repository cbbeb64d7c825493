//! Agents that repeat a tool call over JSON-RPC, with a new `id` for each attempt.

use sqlx::PgPool;

use crate::support::{Answer, create_effects, effects, request, send, transactional};

#[path = "../../src/guide/http/tool_calls.rs"]
mod shown;

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_repeated_tool_call_is_performed_once_and_answered_under_its_own_id(pool: PgPool) {
    create_effects(&pool).await;
    let app = shown::router(transactional(&pool));
    let call = async |id: u32, reference: &str, item: &str| -> (Answer, serde_json::Value) {
        let body = serde_json::json!({
            "jsonrpc": "2.0", "id": id, "method": "tools/call",
            "params": {
                "name": "place_order", "_meta": {"progressToken": id},
                "arguments": {"reference": reference, "item": item},
            },
        });
        let mut request = request("POST", "/mcp", None, &body.to_string());
        request.headers_mut().insert("content-type", "application/json".parse().expect("a value"));
        let answer = send(&app, request).await;
        let body = serde_json::from_slice(&answer.body).unwrap_or_default();
        (answer, body)
    };
    let (first, first_body) = call(1, "r-17", "tea").await;
    let (repeat, repeat_body) = call(2, "r-17", "tea").await;
    assert_eq!((first.is_replayed(), repeat.is_replayed()), (false, true), "{repeat:?}");
    assert_eq!((&first_body["id"], &repeat_body["id"]), (&1.into(), &2.into()));
    assert_eq!(first_body["result"], repeat_body["result"]);
    assert_eq!(call(3, "r-17", "coffee").await.0.problem(), "key-reused");
    assert!(!call(4, "r-18", "tea").await.0.is_replayed(), "another order");
    assert_eq!(effects(&pool).await, 2);
}
