//! The service of the guide's page `existing`, before and after the change.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Request, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use demos::service::serve;
use pg_idempotency::OnEscape;
use pg_idempotency::http::{IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED};
use sqlx::PgPool;
use tower::ServiceExt as _;

// The page shows whole programs. Their `main` is compiled here, and not run.
#[allow(dead_code)]
#[path = "../../../src/guide/existing/after.rs"]
mod after;
#[allow(dead_code)]
#[path = "../../../src/guide/existing/before.rs"]
mod before;

const BEFORE: &str = include_str!("../../../src/guide/existing/before.rs");
const AFTER: &str = include_str!("../../../src/guide/existing/after.rs");
const CHANGE: &str = include_str!("../../../src/guide/existing/change.diff");
const PAGE: &str = include_str!("../../../src/guide/existing.md");

/// The lines of the change that begin with one of these characters, without it.
fn lines(beginnings: [char; 2]) -> String {
    CHANGE.lines().filter_map(|line| line.strip_prefix(beginnings)).map(|line| line.to_owned() + "\n").collect()
}

#[test]
fn the_page_shows_the_whole_change_and_counts_its_lines() {
    assert_eq!(lines([' ', '-']), BEFORE);
    assert_eq!(lines([' ', '+']), AFTER);
    let count = |beginning: char| CHANGE.lines().filter(|line| line.starts_with(beginning)).count();
    let counted = format!("+{} −{} lines", count('+'), count('-'));
    assert!(PAGE.contains(&counted), "{counted}");
}

/// A gateway that recognizes repeats by their key, declines 13 cents, and counts the requests that it performs.
async fn gateway() -> anyhow::Result<(String, Arc<AtomicUsize>)> {
    async fn charge(
        State((charges, keys)): State<(Arc<AtomicUsize>, Keys)>,
        headers: HeaderMap,
        Json(cents): Json<i64>,
    ) -> (StatusCode, &'static str) {
        let key = headers.get(IDEMPOTENCY_KEY).map(|key| key.to_str().expect("a key").to_owned());
        let mut keys = keys.lock().expect("no panic");
        if key.is_none() || !keys.contains(&key) {
            charges.fetch_add(1, Ordering::Relaxed);
            keys.push(key);
        }
        if cents == 13 { (StatusCode::PAYMENT_REQUIRED, "declined") } else { (StatusCode::OK, "charge") }
    }
    let charges = Arc::new(AtomicUsize::new(0));
    let router = Router::new().route("/", post(charge)).with_state((charges.clone(), Keys::default()));
    Ok((serve(router).await?, charges))
}

type Keys = Arc<std::sync::Mutex<Vec<Option<String>>>>;

/// Sends one request, and returns the status, whether the answer is a replay, and its body.
async fn send(router: &Router, path: &str, key: &str, body: &str) -> anyhow::Result<(StatusCode, bool, String)> {
    let request = Request::post(path).header("x-account", "ada").header(IDEMPOTENCY_KEY, key);
    let request = request.header("content-type", "application/json").body(Body::from(body.to_owned()))?;
    let answer = router.clone().oneshot(request).await?;
    let replayed = answer.headers().contains_key(IDEMPOTENT_REPLAYED);
    let (status, body) = (answer.status(), to_bytes(answer.into_body(), 1 << 20).await?);
    Ok((status, replayed, String::from_utf8(body.to_vec())?))
}

async fn count(pool: &PgPool, table: &'static str) -> anyhow::Result<i64> {
    let query = match table {
        "orders" => "select count(*) from orders",
        _ => "select count(*) from payments",
    };
    Ok(sqlx::query_scalar(query).fetch_one(pool).await?)
}

#[sqlx::test]
async fn before_the_change_each_retry_orders_and_charges_again(pool: PgPool) -> anyhow::Result<()> {
    let (url, charges) = gateway().await?;
    let gateway = before::Gateway { http: reqwest::Client::new(), url };
    let router = before::router(before::AppState { pool: pool.clone(), gateway })?;
    for id in 1..=2 {
        assert_eq!(send(&router, "/orders", "a", "\"tea\"").await?, (StatusCode::CREATED, false, id.to_string()));
        assert_eq!(send(&router, "/orders/1/payment", "a", "5").await?, (StatusCode::CREATED, false, id.to_string()));
    }
    assert_eq!((count(&pool, "orders").await?, count(&pool, "payments").await?), (2, 2));
    assert_eq!(charges.load(Ordering::Relaxed), 2);
    Ok(())
}

#[sqlx::test]
async fn after_the_change_a_retry_gets_the_first_answer_or_decline_and_another_body_is_refused(
    pool: PgPool,
) -> anyhow::Result<()> {
    pg_idempotency::migrate(&pool).await?;
    for table in ["stock", "orders", "payments"] {
        pg_idempotency::protect(&pool, table, OnEscape::Refuse).await?;
    }
    let (url, charges) = gateway().await?;
    let gateway = after::Gateway { http: reqwest::Client::new(), url };
    let (router, _) = after::router(after::AppState { pool: pool.clone(), gateway })?;
    for (path, body, other) in [("/orders", "\"tea\"", "\"milk\""), ("/orders/1/payment", "5", "6")] {
        for replayed in [false, true] {
            assert_eq!(send(&router, path, "a", body).await?, (StatusCode::CREATED, replayed, "1".to_owned()));
        }
        assert_eq!(send(&router, path, "a", other).await?.0, StatusCode::UNPROCESSABLE_ENTITY);
    }
    assert_eq!((count(&pool, "orders").await?, count(&pool, "payments").await?), (1, 1));
    assert_eq!(charges.load(Ordering::Relaxed), 1);

    for replayed in [false, true] {
        let declined = (StatusCode::PAYMENT_REQUIRED, replayed, "declined".to_owned());
        assert_eq!(send(&router, "/orders/1/payment", "b", "13").await?, declined);
    }
    assert_eq!(charges.load(Ordering::Relaxed), 2, "the card is not tried again");
    assert_eq!(count(&pool, "payments").await?, 1);
    Ok(())
}
