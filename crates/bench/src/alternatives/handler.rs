//! An axum handler that is idempotent without the crate, as a good team would write it: on a table of its own, with the
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
pub(crate) const ACCOUNT: &str = "x-account";

pub(crate) const TABLE: &str = "
    create table handler_key (
        account text not null,
        operation text not null,
        key text not null,
        request_hash bytea not null,
        status smallint,
        headers jsonb,
        body bytea,
        expires_at timestamptz not null,
        primary key (account, operation, key)
    )";

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
    let account = account(&headers).ok_or(StatusCode::UNAUTHORIZED)?;
    let operation = format!("{method} {}", uri.path());
    let mut hash = Sha256::new();
    for part in [operation.as_bytes(), headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes), &body] {
        hash.update(part.len().to_be_bytes());
        hash.update(part);
    }
    let answered = answer(&shop, [account, &operation, key], &hash.finalize()).await;
    answered.unwrap_or_else(|_| Err(StatusCode::SERVICE_UNAVAILABLE))
}

/// The owner of the request. A real service takes it from the session.
pub(crate) fn account(headers: &HeaderMap) -> Option<&str> {
    headers.get(ACCOUNT)?.to_str().ok()
}

async fn answer(
    shop: &Shop,
    [account, operation, key]: [&str; 3],
    hash: &[u8],
) -> Result<Result<Response, StatusCode>, sqlx::Error> {
    let mut tx = shop.pool.begin().await?;
    let inserted = sqlx::query(
        "insert into handler_key (account, operation, key, request_hash, expires_at)
        values ($1, $2, $3, $4, now() + interval '1 day')
        on conflict (account, operation, key) do nothing",
    )
    .bind(account)
    .bind(operation)
    .bind(key)
    .bind(hash)
    .execute(&mut *tx)
    .await?;
    if inserted.rows_affected() == 0 {
        return replay(tx, [account, operation, key], hash).await;
    }
    effect(&mut tx).await?;
    let content_type = "text/plain; charset=utf-8";
    sqlx::query(
        "update handler_key set status = 200, headers = $4::text::jsonb, body = $5
        where account = $1 and operation = $2 and key = $3",
    )
    .bind(account)
    .bind(operation)
    .bind(key)
    .bind(serde_json::json!([["content-type", content_type]]).to_string())
    .bind(shop.answer.as_bytes())
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(Ok(([(CONTENT_TYPE, content_type)], shop.answer.clone()).into_response()))
}

async fn replay(
    mut tx: PgTransaction<'_>,
    [account, operation, key]: [&str; 3],
    hash: &[u8],
) -> Result<Result<Response, StatusCode>, sqlx::Error> {
    let row = sqlx::query(
        "select request_hash, status, headers::text as headers, body from handler_key
        where account = $1 and operation = $2 and key = $3 and status is not null and expires_at > now()",
    )
    .bind(account)
    .bind(operation)
    .bind(key)
    .fetch_optional(&mut *tx)
    .await?;
    tx.rollback().await?;
    let Some(row) = row else { return Ok(Err(StatusCode::CONFLICT)) };
    if row.try_get::<&[u8], _>("request_hash")? != hash {
        return Ok(Err(StatusCode::UNPROCESSABLE_ENTITY));
    }
    stored(&row).map(Ok).map_err(|error| sqlx::Error::Decode(error.into()))
}

fn stored(row: &sqlx::postgres::PgRow) -> anyhow::Result<Response> {
    let status = u16::try_from(row.try_get::<i16, _>("status")?)?;
    let headers: Vec<(String, String)> = serde_json::from_str(row.try_get("headers")?)?;
    let mut response = Response::builder().status(status).header("idempotent-replayed", "true");
    for (name, value) in headers {
        response = response.header(name, value);
    }
    Ok(response.body(row.try_get::<Vec<u8>, _>("body")?.into())?)
}
