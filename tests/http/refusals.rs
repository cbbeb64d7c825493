//! Requests that a leased handler refuses, or that are refused before it begins: a client's typing error leaves no key
//! for an operator.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, Path, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use pg_idempotency::http::{IdempotencyLayer, LeasedBody, method_not_allowed, not_found};
use pg_idempotency::lease::{Lease, LeaseOptions, Policy};
use pg_idempotency::operator::{Shown, State as Stands, show, unsettled};
use pg_idempotency::testing::age;
use pg_idempotency::{Error, Key};
use rig::cases::each;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS};
use serde_json::Value;
use sqlx::PgPool;

use crate::support::{Answer, leased, post_to, request, send, user};

fn key(operation: &str) -> Key {
    Key::new("ada", operation, "key-1").expect("a key")
}

async fn shown(pool: &PgPool) -> Shown {
    show(pool, &key("POST /rides")).await.expect("a database").expect("a record")
}

/// A handler that does what its body says.
fn app(pool: &PgPool, policy: Policy) -> Router {
    let handler = async |lease: Lease, body: String| -> Response {
        match body.as_str() {
            "panic" => panic!("on purpose"),
            "stepped" => {
                let failed = lease.step_at_least_once("charge", async |_| Err::<u32, Error>(Error::OutlivedRetention));
                failed.await.expect_err("on purpose");
                StatusCode::NOT_FOUND.into_response()
            }
            "ok" => lease.attempt().to_string().into_response(),
            status => StatusCode::from_u16(status.parse().expect("a number")).expect("a status").into_response(),
        }
    };
    Router::new().route("/rides", post(handler)).layer(leased(pool, policy))
}

async fn ask(app: &Router, body: &str) -> Answer {
    post_to(app, "/rides", "key-1", body).await
}

/// The client corrects its typing error under the same key, as often as it needs.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn in_steps_a_refusal_before_the_first_step_frees_the_key(pool: PgPool) -> anyhow::Result<()> {
    let app = app(&pool, IN_STEPS);
    for status in ["404", "422", "409"] {
        assert_eq!(ask(&app, status).await.status.as_str(), status);
        let shown = shown(&pool).await;
        assert_eq!((shown.state, shown.attempt), (Stands::Released, 0));
        assert!(shown.last_error.is_some_and(|error| error.contains(status)));
    }
    let performed = ask(&app, "ok").await;
    assert_eq!((performed.status, &*performed.body), (StatusCode::OK, &b"1"[..]), "the first attempt");
    assert_eq!(ask(&app, "404").await.problem(), "key-reused", "it is done");
    Ok(())
}

/// After a step, or an attempt that ended in another way, an effect of the first body may have happened.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn in_steps_any_other_end_keeps_the_body(pool: PgPool) -> anyhow::Result<()> {
    let app = app(&pool, IN_STEPS);
    for body in ["503", "panic", "stepped"] {
        // A panic goes on.
        let asking = app.clone();
        let _ = tokio::spawn(async move { ask(&asking, body).await }).await;
        assert_eq!(shown(&pool).await.attempt, 1, "{body}");
        assert_eq!(ask(&app, "404").await.problem(), "key-reused", "{body}");
        sqlx::raw_sql("truncate idempotency.record").execute(&pool).await?;
    }
    // A second attempt that is refused does not show what the first one did.
    let answers = Arc::new(Mutex::new(vec![StatusCode::NOT_FOUND, StatusCode::BAD_GATEWAY]));
    let handler = async move |_: Lease, _: Bytes| answers.lock().expect("not poisoned").pop().expect("two answers");
    let app = Router::new().route("/rides", post(handler)).layer(leased(&pool, IN_STEPS));
    assert_eq!(ask(&app, "body").await.status, StatusCode::BAD_GATEWAY);
    assert_eq!(ask(&app, "body").await.status, StatusCode::NOT_FOUND);
    assert_eq!(shown(&pool).await.attempt, 2);
    assert_eq!(ask(&app, "another body").await.problem(), "key-reused");
    Ok(())
}

/// A task with a clone of the lease has asked for a step while the handler answered.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn in_steps_a_task_with_a_step_keeps_the_body(pool: PgPool) -> anyhow::Result<()> {
    let handler = async |lease: Lease, _: Bytes| {
        let (reached, waits) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            let charge = lease.step_at_least_once("charge", async |_| {
                let _ = reached.send(());
                std::future::pending::<Result<u32, Error>>().await
            });
            let _ = charge.await;
        });
        waits.await.expect("it charges");
        StatusCode::UNPROCESSABLE_ENTITY
    };
    let app = Router::new().route("/rides", post(handler)).layer(leased(&pool, IN_STEPS));
    assert_eq!(ask(&app, "body").await.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!((shown(&pool).await.state, shown(&pool).await.attempt), (Stands::Released, 1));
    assert_eq!(ask(&app, "another body").await.problem(), "key-reused");
    Ok(())
}

/// The worker of an earlier attempt has stored the request. A client was told 404. Then the account appears, and the
/// resumer runs.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_whose_client_was_told_of_its_refusal_is_never_resumed(pool: PgPool) -> anyhow::Result<()> {
    each([IN_STEPS, AT_LEAST_ONCE], async |policy| {
        let leasing = LeaseOptions::new(policy).max_attempts(std::num::NonZeroU32::new(9).expect("nine"));
        let leasing = leasing.resume_after(Duration::ZERO);
        for (status, resumed) in [(404, false), (422, false), (409, true), (425, true), (429, true)] {
            sqlx::raw_sql("truncate idempotency.record").execute(&pool).await?;
            let status = StatusCode::from_u16(status)?;
            let answers = Arc::new(Mutex::new(vec![status, StatusCode::BAD_GATEWAY]));
            let handler = async move |_: Lease, _: Bytes| answers.lock().expect("not poisoned").pop().expect("two");
            let app = Router::new().route("/rides", post(handler)).layer(leased(&pool, policy));
            assert_eq!(ask(&app, "body").await.status, StatusCode::BAD_GATEWAY);
            sqlx::query("update idempotency.record set request = '1'").execute(&pool).await?;
            assert_eq!(ask(&app, "body").await.status, status);
            let charges = AtomicU32::new(0);
            assert_eq!(shown(&pool).await.resumable, resumed, "{policy:?} {status}");
            age(&pool, &key("POST /rides"), Duration::from_secs(3600)).await?;
            let work = async |_: &Lease, _: Value| -> Result<u32, Error> { Ok(charges.fetch_add(1, Ordering::SeqCst)) };
            let done = leasing.resume_one(&pool, "POST /rides", work).await?.is_some();
            assert_eq!((done, charges.load(Ordering::SeqCst)), (resumed, u32::from(resumed)), "{policy:?} {status}");
        }
        Ok(())
    })
    .await;
    Ok(())
}

/// A transaction has locked the record, so the refusal cannot be stored. A client that was told of it would not come
/// back, and a resumer could carry the request out.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_refusal_that_cannot_be_stored_is_no_answer(pool: PgPool) -> anyhow::Result<()> {
    let lease = Duration::from_millis(500);
    each([Policy::InSteps { lease }, Policy::AtLeastOnce { lease }], async |policy| {
        sqlx::raw_sql("truncate idempotency.record").execute(&pool).await?;
        let (locking, locked) = (pool.clone(), Arc::new(Mutex::new(None)));
        let holder = locked.clone();
        let handler = async move |_: Lease, _: Bytes| {
            let mut tx = locking.begin().await.expect("a connection");
            sqlx::query("update idempotency.record set last_error = last_error")
                .execute(&mut *tx)
                .await
                .expect("a lock");
            *holder.lock().expect("not poisoned") = Some(tx);
            StatusCode::UNPROCESSABLE_ENTITY
        };
        let app = Router::new().route("/rides", post(handler)).layer(leased(&pool, policy));
        let answer = ask(&app, "body").await;
        assert_eq!(
            (answer.status, answer.problem()),
            (StatusCode::SERVICE_UNAVAILABLE, "unavailable".to_owned()),
            "{policy:?}"
        );
        drop(locked.lock().expect("not poisoned").take());
        Ok(())
    })
    .await;
    Ok(())
}

const POLICIES: [Policy; 3] = [AT_MOST_ONCE, AT_LEAST_ONCE, IN_STEPS];

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
    each(POLICIES, async |policy| {
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
        Ok(())
    })
    .await;
    Ok(())
}

/// `Router::route_layer` covers the 405 of a route, and `Router::layer` also the 404 of the router.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_without_a_handler_leaves_its_key_free_with_the_fallbacks_of_the_crate(pool: PgPool) {
    each(POLICIES, async |policy| {
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
            let state = show(&pool, &key("POST any")).await.expect("shown").expect("one").state;
            assert_eq!(state, if is_open { Stands::Indeterminate } else { Stands::Released }, "{policy:?} {uri}");
        }
        Ok(())
    })
    .await;
    // Without a layer they are what they are called.
    let plain = Router::new().fallback(not_found);
    assert_eq!(post_to(&plain, "/", "key-1", "x").await.status, StatusCode::NOT_FOUND);
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
    each(POLICIES, async |policy| {
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
        Ok(())
    })
    .await;
    Ok(())
}

/// Only the crate's own response proves that the handler did nothing.
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
