//! Requests that are refused before a leased handler begins: a client's typing error leaves no key for an operator.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, FromRequest, Path, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use pg_idempotency::http::{IdempotencyLayer, LeasedBody, method_not_allowed, not_found};
use pg_idempotency::lease::{Lease, LeaseOptions, Policy};
use pg_idempotency::operator::{State as Stands, unsettled};
use sqlx::PgPool;

use crate::resumed::MINUTE;
use crate::support::{leased, post_to, request, send, user};

const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: MINUTE };
const POLICIES: [Policy; 3] = [AT_MOST_ONCE, Policy::AtLeastOnce { lease: MINUTE }, Policy::InSteps { lease: MINUTE }];

/// The number of texts that were sent.
type Sent = Arc<AtomicU32>;

fn json(uri: &str, content_type: &str, body: &str) -> Request {
    let mut request = request("POST", uri, Some("key-1"), body);
    request.headers_mut().insert("content-type", content_type.parse().expect("a value"));
    request
}

async fn text(
    State(sent): State<Sent>,
    LeasedBody(lease, (Path(to), Json(text))): LeasedBody<(Path<u32>, Json<String>)>,
) -> String {
    format!("{} to {to}: {text}, attempt {}", sent.fetch_add(1, Ordering::SeqCst) + 1, lease.attempt())
}

async fn nothing_waits(pool: &PgPool) -> bool {
    unsettled(pool, 9, Some(NonZeroU32::MIN), Some(Duration::ZERO)).await.expect("a list").is_empty()
}

/// Each typing error of a client, and the same key for the corrected request.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_that_the_extractor_refuses_leaves_its_key_free(pool: PgPool) -> anyhow::Result<()> {
    for policy in POLICIES {
        sqlx::raw_sql("truncate idempotency.record").execute(&pool).await?;
        let sent = Sent::default();
        // At most one attempt: none of these counts.
        let leasing = LeaseOptions::new(policy).store_request(true).max_attempts(NonZeroU32::MIN);
        let layer = IdempotencyLayer::leased(pool.clone(), leasing, user);
        let limit = DefaultBodyLimit::max(30);
        let app =
            Router::new().route("/to/{whom}", post(text)).layer(limit).route_layer(layer).with_state(sent.clone());
        for (status, request) in [
            (415, json("/to/7", "text/plain", "\"hello\"")),
            (400, json("/to/7", "application/json", "\"hello")),
            (422, json("/to/7", "application/json", "12")),
            (400, json("/to/ada", "application/json", "\"hello\"")),
            (413, json("/to/7", "application/json", &format!("\"{}\"", "x".repeat(40)))),
            (400, json("/to/7", "application/json", "\"hello")),
        ] {
            let refused = send(&app, request).await;
            assert_eq!(refused.status.as_u16(), status, "{policy:?}");
            assert!(nothing_waits(&pool).await, "{policy:?} {status}");
        }
        let answer = send(&app, json("/to/7", "application/json", "\"hello\"")).await;
        assert_eq!((answer.status, &*answer.body), (StatusCode::OK, &b"1 to 7: hello, attempt 1"[..]), "{policy:?}");
        assert_eq!(sent.load(Ordering::SeqCst), 1);
    }
    Ok(())
}

/// `Router::route_layer` covers the 405 of a route, and `Router::layer` also the 404 of the router.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_without_a_handler_leaves_its_key_free_with_the_fallbacks_of_the_crate(pool: PgPool) {
    for policy in POLICIES {
        let routes = || Router::new().route("/status", get(async || "fine"));
        let layer = || leased(&pool, policy).operation(|parts| Some(format!("{} any", parts.method)));
        let bare = routes().layer(layer());
        let with_fallbacks =
            routes().method_not_allowed_fallback(method_not_allowed).fallback(not_found).layer(layer());
        let covered = routes().method_not_allowed_fallback(method_not_allowed).route_layer(layer());
        for (app, uri, status) in [
            (&with_fallbacks, "/status", StatusCode::METHOD_NOT_ALLOWED),
            (&with_fallbacks, "/none", StatusCode::NOT_FOUND),
            (&covered, "/status", StatusCode::METHOD_NOT_ALLOWED),
            (&bare, "/status", StatusCode::METHOD_NOT_ALLOWED),
        ] {
            sqlx::raw_sql("truncate idempotency.record").execute(&pool).await.expect("empty");
            let answer = post_to(app, uri, "key-1", "x").await;
            assert_eq!(answer.status, status, "{policy:?} {uri}");
            assert_eq!(answer.headers.contains_key("allow"), status == StatusCode::METHOD_NOT_ALLOWED);
            let is_open = std::ptr::eq(app, &bare) && matches!(policy, Policy::AtMostOnce { .. });
            let state =
                pg_idempotency::operator::show(&pool, &key("POST any")).await.expect("shown").expect("one").state;
            assert_eq!(state, if is_open { Stands::Indeterminate } else { Stands::Released }, "{policy:?} {uri}");
        }
    }
    // Without a layer they are what they are called.
    let plain = Router::new().fallback(not_found);
    assert_eq!(post_to(&plain, "/", "key-1", "x").await.status, StatusCode::NOT_FOUND);
}

fn key(operation: &str) -> pg_idempotency::Key {
    pg_idempotency::Key::new("ada", operation, "key-1").expect("a key")
}

/// It says 404 itself, after its text; or passes on what a router behind it has refused.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn only_the_refusal_of_this_request_is_a_proof(pool: PgPool) -> anyhow::Result<()> {
    let behind = leased(&pool, AT_MOST_ONCE).operation(|_| Some("behind".to_owned()));
    let behind =
        Router::new().route("/to/{whom}", post(text)).fallback(not_found).layer(behind).with_state(Sent::default());
    let passes_on = async move || -> Response {
        let refused = tower::ServiceExt::oneshot(behind, json("/to/7", "text/plain", "x")).await;
        refused.expect("infallible")
    };
    let app = Router::new()
        .route("/says", post(async || StatusCode::NOT_FOUND))
        .route("/passes-on", post(passes_on))
        .route("/other", post(async |_: Lease, Json(text): Json<String>| text))
        .route_layer(leased(&pool, AT_MOST_ONCE));
    for uri in ["/says", "/passes-on", "/other"] {
        let answer = post_to(&app, uri, "key-1", "x").await;
        assert!(answer.status.is_client_error(), "{uri}");
        assert_eq!(post_to(&app, uri, "key-1", "x").await.problem(), "indeterminate", "{uri}");
    }
    Ok(())
}

/// An extractor that asks a database, which is away.
struct Away;

impl<S: Sync> FromRequest<S> for Away {
    type Rejection = StatusCode;

    async fn from_request(_: Request, _: &S) -> Result<Self, StatusCode> {
        Err(StatusCode::SERVICE_UNAVAILABLE)
    }
}

/// The client has been told to come back, and a resumer may be faster.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_extractor_that_fails_by_itself_leaves_the_request_to_a_retry(pool: PgPool) -> anyhow::Result<()> {
    for policy in POLICIES {
        sqlx::raw_sql("truncate idempotency.record").execute(&pool).await?;
        let layer = IdempotencyLayer::leased(pool.clone(), LeaseOptions::new(policy).store_request(true), user);
        let app = Router::new().route("/", post(async |_: LeasedBody<Away>| "sent")).route_layer(layer);
        for attempt in 1..=2_u32 {
            assert_eq!(post_to(&app, "/", "key-1", "x").await.status, StatusCode::SERVICE_UNAVAILABLE);
            let stored =
                "select attempt = $1 and request is not null and lease_until = '-infinity' from idempotency.record";
            let stored: bool = sqlx::query_scalar(stored).bind(i64::from(attempt)).fetch_one(&pool).await?;
            assert!(stored, "{policy:?}");
        }
    }
    Ok(())
}

/// Without the crate's own response there is no proof.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_refusal_that_a_middleware_replaces_is_no_proof(pool: PgPool) {
    let maps = async |request: Request, next: Next| {
        let refused = next.run(request).await;
        (refused.status(), "a page of the service").into_response()
    };
    let app = Router::new()
        .route("/to/{whom}", post(text))
        .route_layer(middleware::from_fn(maps))
        .route_layer(leased(&pool, AT_MOST_ONCE))
        .with_state(Sent::default());
    assert_eq!(post_to(&app, "/to/7", "key-1", "x").await.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert_eq!(post_to(&app, "/to/7", "key-1", "x").await.problem(), "indeterminate");
}

/// A middleware calls the handler again, with a body that it has spoilt: the first call may have sent its text.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_refusal_after_the_lease_was_lent_is_no_proof(pool: PgPool) {
    let again = async |request: Request, next: Next| -> Response {
        let (parts, _) = request.into_parts();
        let first = Request::from_parts(parts.clone(), "\"hello\"".into());
        let sent = next.clone().run(first).await;
        assert_eq!(sent.status(), StatusCode::OK);
        next.run(Request::from_parts(parts, "spoilt".into())).await
    };
    let sent = Sent::default();
    let app = Router::new()
        .route("/to/{whom}", post(text))
        .route_layer(middleware::from_fn(again))
        .route_layer(leased(&pool, AT_MOST_ONCE))
        .with_state(sent.clone());
    let refused = send(&app, json("/to/7", "application/json", "x")).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert_eq!(send(&app, json("/to/7", "application/json", "x")).await.problem(), "indeterminate");
    assert_eq!(sent.load(Ordering::SeqCst), 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn without_a_leased_layer_the_extractor_is_a_mistake_of_the_service(pool: PgPool) {
    let app = Router::new().route("/", post(async |LeasedBody(_, body): LeasedBody<String>| body));
    assert_eq!(post_to(&app, "/", "key-1", "x").await.status, StatusCode::INTERNAL_SERVER_ERROR);
    let app = app.route_layer(leased(&pool, AT_MOST_ONCE));
    assert_eq!(&*post_to(&app, "/", "key-1", "x").await.body, b"x");
}
