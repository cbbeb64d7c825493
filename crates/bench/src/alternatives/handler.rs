//! An axum handler that is idempotent without the crate, as a good team would write it: on the crate's table, with the
//! layer's checks of the key and of the body, and with the insert, the select and the update in its own transaction.
//!
//! It has no wait with a limit, no fence and no sweep.

use axum::Extension;
use axum::body::Bytes;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use sha2::{Digest as _, Sha256};
use sqlx::{PgPool, PgTransaction, Row as _};

use crate::client::effect;

pub(crate) const NAME: &str = "hand-made handler";

/// The owner of the requests. A real service takes it from the session.
const ACCOUNT: &str = "bench";

#[derive(Clone)]
pub(crate) struct Shop {
    pub(crate) pool: PgPool,
    pub(crate) answer: String,
}

pub(crate) async fn handler(
    Extension(shop): Extension<Shop>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, StatusCode> {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok()).ok_or(StatusCode::BAD_REQUEST)?;
    if key.is_empty() || key.len() > 255 {
        return Err(StatusCode::BAD_REQUEST);
    }
    let operation = format!("{method} {}", uri.path());
    let mut hash = Sha256::new();
    for part in [operation.as_bytes(), headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes), &body] {
        hash.update(part.len().to_be_bytes());
        hash.update(part);
    }
    let answered = answer(&shop, &operation, key, &hash.finalize()).await;
    answered.unwrap_or_else(|_| Err(StatusCode::SERVICE_UNAVAILABLE))
}

async fn answer(
    shop: &Shop,
    operation: &str,
    key: &str,
    hash: &[u8],
) -> Result<Result<Response, StatusCode>, sqlx::Error> {
    let mut tx = shop.pool.begin().await?;
    let token = getrandom::u64().map_err(std::io::Error::other)?.cast_signed();
    let inserted = sqlx::query(
        "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at)
        values ('transaction', $1, $2, $3, $4, $5, now() + interval '1 day')
        on conflict (scope, operation, value) do nothing",
    )
    .bind(ACCOUNT)
    .bind(operation)
    .bind(key)
    .bind(hash)
    .bind(token)
    .execute(&mut *tx)
    .await?;
    if inserted.rows_affected() == 0 {
        return replay(tx, operation, key, hash).await;
    }
    effect(&mut tx).await?;
    let content_type = "text/plain; charset=utf-8";
    sqlx::query(
        "update idempotency.record
        set completed_at = now(), response_status = 200, response_headers = $4::text::jsonb, response_body = $5
        where scope = $1 and operation = $2 and value = $3 and token = $6",
    )
    .bind(ACCOUNT)
    .bind(operation)
    .bind(key)
    .bind(serde_json::json!([["content-type", content_type]]).to_string())
    .bind(shop.answer.as_bytes())
    .bind(token)
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(Ok(([(CONTENT_TYPE, content_type)], shop.answer.clone()).into_response()))
}

async fn replay(
    mut tx: PgTransaction<'_>,
    operation: &str,
    key: &str,
    hash: &[u8],
) -> Result<Result<Response, StatusCode>, sqlx::Error> {
    let row = sqlx::query(
        "select fingerprint, response_status, response_headers::text as response_headers, response_body
        from idempotency.record
        where scope = $1 and operation = $2 and value = $3 and completed_at is not null and expires_at > now()",
    )
    .bind(ACCOUNT)
    .bind(operation)
    .bind(key)
    .fetch_optional(&mut *tx)
    .await?;
    tx.rollback().await?;
    let Some(row) = row else { return Ok(Err(StatusCode::CONFLICT)) };
    if row.try_get::<&[u8], _>("fingerprint")? != hash {
        return Ok(Err(StatusCode::UNPROCESSABLE_ENTITY));
    }
    stored(&row).map(Ok).map_err(|error| sqlx::Error::Decode(error.into()))
}

fn stored(row: &sqlx::postgres::PgRow) -> anyhow::Result<Response> {
    let status = u16::try_from(row.try_get::<i16, _>("response_status")?)?;
    let headers: Vec<(String, String)> = serde_json::from_str(row.try_get("response_headers")?)?;
    let mut response = Response::builder().status(status).header("idempotent-replayed", "true");
    for (name, value) in headers {
        response = response.header(name, value);
    }
    Ok(response.body(row.try_get::<Vec<u8>, _>("response_body")?.into())?)
}
