use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing::post};
use pg_idempotency::http::{Denied, IdempotencyLayer, IdempotentTx};
use serde_json::{Value, json};

pub(crate) fn router(layer: IdempotencyLayer) -> Router {
    // Each attempt has another `id`, and its own `_meta`, such as a progress token.
    let layer = layer.canonical_json(["/id", "/params/_meta"]).key_from(key).optional_key(true);
    Router::new().route("/mcp", post(call)).route_layer(layer).layer(middleware::from_fn(own_id))
}

/// Makes the key from the name of the tool and its argument `reference`. The schema of the tool requires a new
/// reference for each order that the person wants.
fn key(_: &axum::http::request::Parts, body: &Bytes) -> Result<Option<String>, Denied> {
    let call: Value = serde_json::from_slice(body).map_err(|_| StatusCode::BAD_REQUEST)?;
    let reference = call.pointer("/params/arguments/reference").and_then(Value::as_str);
    Ok(reference.map(|reference| format!("{}:{reference}", call["params"]["name"])))
}

async fn call(mut tx: IdempotentTx, Json(call): Json<Value>) -> Result<Json<Value>, StatusCode> {
    // A real server also answers other methods, such as `tools/list`, which needs no key. An order needs a key.
    if call["method"] != "tools/call" || tx.key().is_none() {
        return Err(StatusCode::BAD_REQUEST);
    }
    let item = call["params"]["arguments"]["item"].as_str().unwrap_or_default().to_owned();
    let insert = sqlx::query_scalar("insert into effect (note) values ($1) returning id").bind(item);
    let order: i64 = insert.fetch_one(&mut *tx).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let content = json!([{"type": "text", "text": format!("order {order}")}]);
    Ok(Json(json!({"jsonrpc": "2.0", "id": call["id"], "result": {"content": content}})))
}

/// Sets the `id` of each answer to the `id` of its request. This middleware is outside the layer, because a replay has
/// the `id` of the first attempt.
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
