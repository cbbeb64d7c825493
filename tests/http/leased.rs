//! Handlers with effects outside the database, under a lease.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse as _;
use axum::routing::post;
use pg_idempotency::http::{IdempotencyLayer, LastError, NoLease};
use pg_idempotency::lease::Lease;
use pg_idempotency::testing::lapse;
use rig::cases::each;
use rig::gate::Gate;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS};
use sqlx::PgPool;

use crate::support::{leased, leasing, post_to, recorded, request, send, until, user};

/// A gateway that counts its calls and answers with the status in the path.
fn app(layer: IdempotencyLayer) -> (Router, Arc<AtomicU32>) {
    let sent = Arc::new(AtomicU32::new(0));
    let counted = sent.clone();
    let send = async move |Path(status): Path<u16>, lease: Lease| {
        counted.fetch_add(1, Ordering::SeqCst);
        match status {
            // The handler did not call the gateway.
            499 => lease.not_performed(StatusCode::BAD_REQUEST).into_response(),
            502 => {
                let reason = LastError(format!("the gateway is closed\0 until {}", "x".repeat(3000)));
                (axum::Extension(reason), StatusCode::BAD_GATEWAY).into_response()
            }
            status => {
                let status = StatusCode::from_u16(status).expect("a status");
                (status, format!("{} {}", lease.attempt(), lease.downstream_key())).into_response()
            }
        }
    };
    (Router::new().route("/send/{status}", post(send)).layer(layer), sent)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn at_least_once_a_failure_frees_the_key(pool: PgPool) {
    let options = leasing(AT_LEAST_ONCE).max_attempts(NonZeroU32::new(3).expect("three"));
    let (app, sent) = app(IdempotencyLayer::leased(pool.clone(), options, user));
    for attempt in 1..=3 {
        let answer = post_to(&app, "/send/503", "key-1", "x").await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.body.starts_with(format!("{attempt} ").as_bytes()), "the handler's own answer: {answer:?}");
    }
    let exhausted = post_to(&app, "/send/503", "key-1", "x").await;
    assert_eq!((exhausted.status, &*exhausted.problem()), (StatusCode::CONFLICT, "exhausted"));
    assert_eq!(sent.load(Ordering::SeqCst), 3);
    assert_eq!(recorded::<String>(&pool, "last_error").await, "the handler answered 503 Service Unavailable");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_handler_says_why_it_failed(pool: PgPool) {
    let policies = [AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS];
    each(policies.into_iter().enumerate(), async |(number, policy)| {
        let (app, _) = app(leased(&pool, policy));
        let answer = post_to(&app, "/send/502", &format!("key-{number}"), "x").await;
        assert_eq!((answer.status, &*answer.body), (StatusCode::BAD_GATEWAY, &b""[..]));
        Ok(())
    })
    .await;
    let reasons: Vec<String> =
        sqlx::query_scalar("select last_error from idempotency.record").fetch_all(&pool).await.expect("three");
    assert_eq!(reasons.len(), 3);
    for reason in reasons {
        assert!(reason.starts_with("the gateway is closed until xxx"), "{reason}");
        assert_eq!(reason.len(), 2000, "what the record holds");
    }
}

/// As in a test of a service, the first router is a process that has died, and the second is another process.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_second_router_takes_over_what_has_lapsed_in_the_first(pool: PgPool) {
    let gate = Gate::new();
    let router = || {
        let gate = gate.clone();
        let handler = async move |lease: Lease| {
            if lease.attempt() == 1 {
                gate.pass().await;
            }
            format!("attempt {}", lease.attempt())
        };
        Router::new().route("/send", post(handler)).route_layer(leased(&pool, AT_LEAST_ONCE))
    };
    let (one, other) = (router(), router());
    let first = crate::support::spawned_post(&one, "/send", "key-1", "x");
    gate.reached().await;
    let key = pg_idempotency::Key::new("ada", "POST /send", "key-1").expect("a key");
    lapse(&pool, &key).await.expect("lapsed");
    assert_eq!(post_to(&one, "/send", "key-1", "x").await.problem(), "in-flight", "its own run is alive");
    assert_eq!(post_to(&other, "/send", "key-1", "x").await.body, "attempt 2");
    gate.open();
    let lost = first.await.expect("joined");
    assert_eq!((lost.status, &*lost.problem()), (StatusCode::SERVICE_UNAVAILABLE, "unavailable"));
    assert_eq!(post_to(&one, "/send", "key-1", "x").await.body, "attempt 2");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn at_most_once_a_failure_is_indeterminate_unless_nothing_was_done(pool: PgPool) {
    let (app, sent) = app(leased(&pool, AT_MOST_ONCE));
    for (key, status) in [("key-1", 503), ("key-2", 400)] {
        let uri = format!("/send/{status}");
        assert_eq!(post_to(&app, &uri, key, "x").await.status.as_u16(), status);
        let repeat = post_to(&app, &uri, key, "x").await;
        assert_eq!((repeat.status, &*repeat.problem()), (StatusCode::CONFLICT, "indeterminate"));
    }
    assert_eq!(sent.load(Ordering::SeqCst), 2);
    for _ in 0..2 {
        assert_eq!(post_to(&app, "/send/499", "key-3", "x").await.status, StatusCode::BAD_REQUEST);
    }
    assert_eq!(sent.load(Ordering::SeqCst), 4);
}

/// A task that the handler has spawned keeps a clone of the lease. The row is locked, so the release is sent and has no
/// answer.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_lease_that_has_ended_is_lost_before_its_release_is_sent(pool: PgPool) {
    for (status, declared) in [(StatusCode::BAD_GATEWAY, false), (StatusCode::BAD_REQUEST, true)] {
        let clones = Arc::new(Mutex::new(None));
        let kept = clones.clone();
        let gate = Gate::new();
        let gated = gate.clone();
        let handler = async move |lease: Lease| {
            *kept.lock().expect("not poisoned") = Some(lease.clone());
            gated.pass().await;
            if declared { lease.not_performed(status) } else { status }
        };
        let layer = leased(&pool, AT_MOST_ONCE);
        let app = Router::new().route("/send", post(handler)).layer(layer);
        let first = tokio::spawn(async move { post_to(&app, "/send", status.as_str(), "x").await });
        gate.reached().await;
        let lease = clones.lock().expect("not poisoned").take().expect("a lease");
        assert!(!lease.is_lost());
        let mut locked = pool.begin().await.expect("begun");
        sqlx::raw_sql("select from idempotency.record for update").execute(&mut *locked).await.expect("locked");
        gate.open();
        until(
            &pool,
            "select count(*) = 1 from pg_stat_activity
             where datname = current_database() and wait_event_type = 'Lock' and query like '%update /* pg_idempotency: %'",
        )
        .await;
        assert!(!first.is_finished());
        assert!(lease.is_lost(), "{status}");
        locked.rollback().await.expect("unlocked");
        assert_eq!(first.await.expect("joined").status, status);
        assert!(lease.is_lost(), "{status}");
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_response_that_an_operator_has_resolved_is_replayed_as_json(pool: PgPool) {
    let (app, sent) = app(leased(&pool, AT_MOST_ONCE));
    assert_eq!(post_to(&app, "/send/503", "key-1", "x").await.status, StatusCode::SERVICE_UNAVAILABLE);
    let key = pg_idempotency::Key::new("ada", "POST /send/{}", "key-1").expect("a key");
    let shown = pg_idempotency::operator::show(&pool, &key).await.expect("a database").expect("a record");
    let day = Duration::from_secs(24 * 3600);
    shown.resolve(&pool, &serde_json::json!({"text": 7}), day).await.expect("resolved");
    let answer = post_to(&app, "/send/503", "key-1", "x").await;
    assert_eq!((answer.status, answer.is_replayed(), &*answer.body), (StatusCode::OK, true, &br#"{"text":7}"#[..]));
    assert_eq!(answer.headers["content-type"], "application/json");
    assert_eq!(sent.load(Ordering::SeqCst), 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn without_a_key_a_handler_has_no_lease(pool: PgPool) {
    let (app, sent) = app(leased(&pool, AT_LEAST_ONCE).optional_key(true));
    let answer = send(&app, request("POST", "/send/202", None, "x")).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "this handler asks for one");
    assert_eq!(sent.load(Ordering::SeqCst), 0);
}

/// A middleware inside the layer calls the handler again after it has answered.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_second_call_of_the_handler_gets_no_lease_under_at_most_once(pool: PgPool) {
    each([("once", AT_MOST_ONCE, 1), ("often", AT_LEAST_ONCE, 2)], async |(key, policy, effects)| {
        let sent = Arc::new(AtomicU32::new(0));
        let counted = sent.clone();
        let send = async move |_: Lease| {
            counted.fetch_add(1, Ordering::Relaxed);
            StatusCode::SERVICE_UNAVAILABLE
        };
        let again = from_fn(async |request: Request, next: Next| {
            let (parts, _) = request.into_parts();
            let first = Request::from_parts(parts.clone(), Body::empty());
            drop(next.clone().run(first).await);
            next.run(Request::from_parts(parts, Body::empty())).await
        });
        let app = Router::new().route("/texts", post(send)).layer(again).layer(leased(&pool, policy));
        let answer = post_to(&app, "/texts", key, "x").await;
        assert_eq!(sent.load(Ordering::Relaxed), effects, "{policy:?}: {answer:?}");
        let retry = post_to(&app, "/texts", key, "x").await;
        let at_most_once = effects == 1;
        let is_indeterminate = retry.rejection.is_some_and(|rejection| rejection.kind() == "indeterminate");
        assert_eq!(is_indeterminate, at_most_once, "{policy:?}");
        Ok(())
    })
    .await;
}

/// A service that gets keys step by step works without a lease only for a request without a key. If the layer is
/// missing, the same branch would let a retry act again.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_handler_can_tell_a_request_without_a_key_from_a_missing_layer(pool: PgPool) {
    let route = || {
        post(async |lease: Result<Lease, NoLease>| match lease {
            Ok(_) => "a lease",
            Err(NoLease::NoKey) => "no key",
            Err(NoLease::NotLent) => "no layer",
            Err(_) => "another reason",
        })
    };
    let covered = Router::new().route("/send", route()).layer(leased(&pool, AT_LEAST_ONCE).optional_key(true));
    for (app, key, expected) in [
        (covered.clone(), Some("key-1"), "a lease"),
        (covered, None, "no key"),
        (Router::new().route("/send", route()), Some("key-2"), "no layer"),
        (Router::new().route("/send", route()), None, "no layer"),
    ] {
        assert_eq!(send(&app, request("POST", "/send", key, "x")).await.body, expected, "{key:?}");
    }
}
