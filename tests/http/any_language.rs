//! One key for the layer and for callers of the SQL functions.

use std::panic::AssertUnwindSafe;

use axum::Router;
use axum::body::Bytes;
use axum::http::{StatusCode, header};
use axum::routing::post;
use pg_idempotency::http::{IDEMPOTENCY_KEY, IdempotentTx};
use pg_idempotency::{Fingerprint, Key};
use rig::database::backend;
use rig::functions::{complete, ensure};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, PgPool};

use crate::support::{app, create_effects, effects, options, pool_of, post_to, transactional};

/// What a caller in another language computes: the request as the client has sent it.
fn asked(target: &str, body: &str) -> Vec<u8> {
    Fingerprint::of_bytes(format!("POST {target}\n{body}").as_bytes()).as_bytes().to_vec()
}

fn key(operation: &str, value: &str) -> Key {
    Key::new("ada", operation, value).expect("a key")
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn the_sql_functions_replay_a_response_of_the_layer_with_status_and_headers(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    let target = "/accounts/7/effects?dry=0";
    let first = post_to(&app, target, "key-1", "é").await;
    assert_eq!(first.status, StatusCode::CREATED);
    let key = key("POST /accounts/{}/effects", "key-1");
    let mut tx = pool.begin().await?;
    let replayed = ensure(&mut tx, &key, &asked(target, "é"), None).await?;
    assert_eq!((&*replayed.outcome, replayed.status), ("replayed", Some(201)));
    assert_eq!(replayed.body.as_deref(), Some(&*first.body));
    let headers: Vec<(String, String)> = serde_json::from_str(&replayed.headers.unwrap_or_default())?;
    for (name, value) in &headers {
        assert_eq!(first.headers.get(name).expect("of the first response").as_bytes(), value.as_bytes());
    }
    assert!(headers.iter().any(|(name, _)| name == "content-type"), "{headers:?}");
    for (target, body) in [("/accounts/8/effects?dry=0", "é"), ("/accounts/7/effects?dry=1", "é"), (target, "e")] {
        assert_eq!(ensure(&mut tx, &key, &asked(target, body), None).await?.outcome, "key_reused", "{target}");
        let refused = post_to(&app, target, "key-1", body).await;
        assert_eq!((refused.status, &*refused.problem()), (StatusCode::UNPROCESSABLE_ENTITY, "key-reused"));
    }
    assert_eq!(effects(&pool).await, 1);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn the_layer_replays_a_response_of_the_sql_functions_with_status_and_headers(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    let headers =
        json!([["content-type", "text/plain; charset=utf-8"], ["ETag", "\"\u{ff}\""], ["link", "a"], ["link", "b"]]);
    for (value, status, headers, body) in [
        ("whole", 201, Some(headers.to_string()), Some(&b"\x00\xff{}"[..])),
        ("bare", 202, None, Some(b"x")),
        ("empty", 204, None, None),
    ] {
        let key = key("POST /effects", value);
        let mut tx = pool.begin().await?;
        let claimed = ensure(&mut tx, &key, &asked("/effects", "x"), None).await?;
        complete(&mut tx, &key, claimed.token, (Some(status), headers.as_deref(), body)).await?;
        tx.commit().await?;
        let replayed = post_to(&app, "/effects", value, "x").await;
        assert!(replayed.is_replayed(), "{value}");
        assert_eq!((i32::from(replayed.status.as_u16()), &*replayed.body), (status, body.unwrap_or_default()));
        if headers.is_some() {
            assert_eq!(replayed.headers[header::CONTENT_TYPE], "text/plain; charset=utf-8");
            assert_eq!(replayed.headers[header::ETAG].as_bytes(), b"\"\xff\"");
            assert_eq!(replayed.headers.get_all(header::LINK).iter().collect::<Vec<_>>(), ["a", "b"]);
        }
    }
    assert_eq!(effects(&pool).await, 0);
    Ok(())
}

/// Those with a payment are whole requests. The services in other languages are tested by them, too.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_layer_computes_the_vectors_of_requests(pool: PgPool) -> anyhow::Result<()> {
    let layer = transactional(&pool).operation(|_| Some("POST /payments".to_owned()));
    let app = Router::new().fallback(post(async |_: IdempotentTx, body: Bytes| body)).layer(layer);
    let vectors: Vec<Value> = serde_json::from_str(include_str!("../vectors/fingerprints.json"))?;
    let mut requests = 0;
    for vector in &vectors {
        let text = |name: &str| vector[name].as_str().unwrap_or_default();
        let request = hex::decode(text("request"))?;
        let Some((target, body)) = std::str::from_utf8(&request)
            .ok()
            .and_then(|request| request.strip_prefix("POST ")?.split_once('\n'))
            .filter(|(_, body)| body.contains("amount"))
        else {
            continue;
        };
        assert_eq!(post_to(&app, target, text("fingerprint"), body).await.status, StatusCode::OK);
        let stored: Vec<u8> = sqlx::query_scalar("select fingerprint from idempotency.record where value = $1")
            .bind(text("fingerprint"))
            .fetch_one(&pool)
            .await?;
        assert_eq!(hex::encode(stored), text("fingerprint"), "{target}");
        requests += 1;
    }
    assert_eq!(requests, 3);
    Ok(())
}

/// A stored `Content-Length` of another body would end the replay early, and its rest would begin the next response. A
/// unit test compares the two lists (`tests/unit/http/replay.rs`), and this test shows that both sides use their list.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn the_sql_functions_refuse_a_header_that_the_layer_never_replays(pool: PgPool) -> anyhow::Result<()> {
    refuse_the_same_headers(&pool).await?;

    // The lower case of I is another letter in Turkish.
    let database = format!("turkish_{}", backend(&mut *pool.acquire().await?).await?);
    let create =
        format!("create database {database} template template0 encoding 'UTF8' locale_provider icu icu_locale 'tr'");
    if sqlx::raw_sql(AssertSqlSafe(create)).execute(&pool).await.is_err() {
        return Ok(()); // before PostgreSQL 15, or without ICU
    }
    let turkish = pool_of(1, &options(&pool).database(&database)).await;
    pg_idempotency::migrate_any_language(&turkish).await?;
    let refused = refuse_the_same_headers(&turkish).await;
    turkish.close().await;
    sqlx::raw_sql(AssertSqlSafe(format!("drop database {database}"))).execute(&pool).await?;
    refused
}

async fn refuse_the_same_headers(pool: &PgPool) -> anyhow::Result<()> {
    let mut tx = pool.begin().await?;
    for (name, is_refused) in [(IDEMPOTENCY_KEY, true), (header::CONTENT_LENGTH, true), (header::LOCATION, false)] {
        let layer = transactional(pool);
        let by_the_layer = std::panic::catch_unwind(AssertUnwindSafe(|| drop(layer.replay_header(name.clone()))));
        assert_eq!(by_the_layer.is_err(), is_refused, "{name}");
        let mut savepoint = tx.begin().await?;
        let claimed = ensure(&mut savepoint, &key("o", "v"), &asked("/", ""), None).await?;
        let headers = json!([[name.as_str().to_uppercase(), "1"]]).to_string();
        let completed =
            complete(&mut savepoint, &key("o", "v"), claimed.token, (Some(200), Some(&headers), None)).await;
        assert_eq!(completed.is_err(), is_refused, "{name}: {completed:?}");
        savepoint.rollback().await?;
    }
    Ok(())
}
