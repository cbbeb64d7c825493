//! Agents that repeat a tool call over JSON-RPC, with a new `id` for each attempt. The guide shows this code.

use sqlx::PgPool;

use crate::support::{Answer, create_effects, effects, request, send, transactional};

mod shown {
    // begin
    use axum::body::{Body, Bytes, to_bytes};
    use axum::extract::Request;
    use axum::http::{StatusCode, header};
    use axum::middleware::{self, Next};
    use axum::response::{IntoResponse, Response};
    use axum::{Json, Router, routing::post};
    use pg_idempotency::http::{Denied, IdempotencyLayer, IdempotentTx, InvalidSetting};
    use serde_json::{Value, json};

    pub(crate) fn router(layer: IdempotencyLayer) -> Result<Router, InvalidSetting> {
        // Each attempt has another `id`, and its own `_meta`, such as a progress token.
        let layer = layer.with_canonical_json(["/id", "/params/_meta"])?.with_key_from(key).with_optional_key(true);
        Ok(Router::new().route("/mcp", post(call)).route_layer(layer).layer(middleware::from_fn(own_id)))
    }

    /// The reference of the tool's arguments: its schema requires one for each order that the person wants.
    fn key(_: &axum::http::request::Parts, body: &Bytes) -> Result<Option<String>, Denied> {
        let call: Value = serde_json::from_slice(body).map_err(|_| StatusCode::BAD_REQUEST)?;
        let reference = call.pointer("/params/arguments/reference").and_then(Value::as_str);
        Ok(reference.map(|reference| format!("{}:{reference}", call["params"]["name"])))
    }

    async fn call(mut tx: IdempotentTx, Json(call): Json<Value>) -> Result<Json<Value>, StatusCode> {
        // Listing the tools needs no key, but an order does.
        if call["method"] != "tools/call" || tx.key().is_none() {
            return Err(StatusCode::BAD_REQUEST);
        }
        let item = call["params"]["arguments"]["item"].as_str().unwrap_or_default().to_owned();
        let insert = sqlx::query_scalar("insert into effect (note) values ($1) returning id").bind(item);
        let order: i64 = insert.fetch_one(&mut *tx).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
        let content = json!([{"type": "text", "text": format!("order {order}")}]);
        Ok(Json(json!({"jsonrpc": "2.0", "id": call["id"], "result": {"content": content}})))
    }

    /// Outside the layer, because a replay has the `id` of the first attempt. Each attempt gets its own back.
    async fn own_id(request: Request, next: Next) -> Result<Response, StatusCode> {
        let (parts, body) = request.into_parts();
        let body = to_bytes(body, 1 << 20).await.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE)?;
        let call: Value = serde_json::from_slice(&body).map_err(|_| StatusCode::BAD_REQUEST)?;
        let (mut parts, body) = next.run(Request::from_parts(parts, Body::from(body))).await.into_parts();
        let body = to_bytes(body, 1 << 20).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
        let Ok(mut answer) = serde_json::from_slice::<Value>(&body) else { return Ok((parts, body).into_response()) };
        if answer.get("jsonrpc").is_some() {
            answer["id"] = call["id"].clone();
        }
        parts.headers.remove(header::CONTENT_LENGTH);
        Ok((parts, answer.to_string()).into_response())
    }
    // end
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_repeated_tool_call_is_performed_once_and_answered_under_its_own_id(pool: PgPool) {
    create_effects(&pool).await;
    let app = shown::router(transactional(&pool)).expect("pointers");
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

#[test]
fn the_guide_shows_this_code() {
    let here = include_str!("tool_calls.rs").split("    // begin\n").nth(1).expect("begin");
    let here: Vec<_> = here.lines().take_while(|line| line.trim() != "// end").map(str::trim).collect();
    let guide: Vec<_> = include_str!("../../src/guide/http.md").lines().map(str::trim).collect();
    assert!(
        guide.windows(here.len()).any(|lines| lines == here),
        "src/guide/http.md differs from tests/http/tool_calls.rs"
    );
}
