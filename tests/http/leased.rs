//! Handlers with effects outside the database, under a lease.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use axum::routing::post;
use pg_idempotency::http::{IdempotencyLayer, Rejection};
use pg_idempotency::lease::{Lease, Policy};
use pg_idempotency::testing::Gate;
use sqlx::PgPool;

use crate::support::{leased, leasing, post_to, request, send, until, user};

const LEASE: Duration = Duration::from_secs(60);

/// A gateway that counts its calls and answers with the status in the path.
fn app(layer: IdempotencyLayer) -> (Router, Arc<AtomicU32>) {
    let sent = Arc::new(AtomicU32::new(0));
    let counted = sent.clone();
    let send = async move |Path(status): Path<u16>, lease: Lease| {
        counted.fetch_add(1, Ordering::SeqCst);
        match status {
            0 => panic!("on purpose"),
            // The handler did not call the gateway.
            499 => lease.not_performed(StatusCode::BAD_REQUEST).into_response(),
            status => {
                let status = StatusCode::from_u16(status).expect("a status");
                (status, format!("{} {}", lease.attempt(), lease.downstream_key())).into_response()
            }
        }
    };
    (Router::new().route("/send/{status}", post(send)).layer(layer), sent)
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_answer_is_stored_and_replayed(pool: PgPool) {
    for (n, policy) in
        [Policy::AtLeastOnce { lease: LEASE }, Policy::AtMostOnce { lease: LEASE }].into_iter().enumerate()
    {
        let (app, sent) = app(leased(&pool, policy));
        let key = format!("key-{n}");
        let first = post_to(&app, "/send/202", &key, "x").await;
        assert_eq!((first.status, first.is_replayed()), (StatusCode::ACCEPTED, false));
        assert!(first.body.starts_with(b"1 "));
        let repeat = post_to(&app, "/send/202", &key, "x").await;
        assert_eq!((repeat.status, repeat.is_replayed(), repeat.body), (StatusCode::ACCEPTED, true, first.body));
        assert_eq!(sent.load(Ordering::SeqCst), 1);
    }
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn at_least_once_a_failure_frees_the_key(pool: PgPool) {
    let options = leasing(Policy::AtLeastOnce { lease: LEASE }).with_max_attempts(NonZeroU32::new(3).expect("three"));
    let (app, sent) = app(IdempotencyLayer::leased(pool.clone(), options, user));
    for attempt in 1..=3 {
        let answer = post_to(&app, "/send/503", "key-1", "x").await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.body.starts_with(format!("{attempt} ").as_bytes()), "the handler's own answer: {answer:?}");
    }
    let exhausted = post_to(&app, "/send/503", "key-1", "x").await;
    assert_eq!((exhausted.status, &*exhausted.problem()), (StatusCode::CONFLICT, "exhausted"));
    assert_eq!(sent.load(Ordering::SeqCst), 3);
    let reason: String =
        sqlx::query_scalar("select last_error from idempotency.record").fetch_one(&pool).await.expect("one");
    assert_eq!(reason, "the handler answered 503 Service Unavailable");
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn at_most_once_a_failure_is_indeterminate_unless_nothing_was_done(pool: PgPool) {
    let (app, sent) = app(leased(&pool, Policy::AtMostOnce { lease: LEASE }));
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

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_handler_that_declares_that_it_did_nothing_frees_the_key(pool: PgPool) {
    let handler = async |Path(number): Path<u32>, lease: Lease| match number {
        1 => lease.not_performed(StatusCode::BAD_REQUEST),
        _ => StatusCode::BAD_GATEWAY,
    };
    let layer = leased(&pool, Policy::AtMostOnce { lease: LEASE });
    let app = Router::new().route("/send/{number}", post(handler)).route_layer(layer);
    for _ in 0..2 {
        assert_eq!(post_to(&app, "/send/1", "key-1", "x").await.status, StatusCode::BAD_REQUEST);
    }
    // Nobody has declared that an extractor's refusal did nothing.
    assert_eq!(post_to(&app, "/send/no-number", "key-2", "x").await.status, StatusCode::BAD_REQUEST);
    assert_eq!(post_to(&app, "/send/no-number", "key-2", "x").await.problem(), "indeterminate");
    assert_eq!(post_to(&app, "/send/2", "key-4", "x").await.status, StatusCode::BAD_GATEWAY);
    let repeat = post_to(&app, "/send/2", "key-4", "x").await;
    assert_eq!(repeat.problem(), "indeterminate");
    let token: i64 = sqlx::query_scalar("select token from idempotency.record where value = 'key-4'")
        .fetch_one(&pool)
        .await
        .expect("a token");
    assert!(matches!(repeat.rejection, Some(Rejection::Indeterminate { token: told, .. }) if told == token));
}

/// A task that the handler has spawned keeps a clone of the lease. The row is locked, so the release is sent and has no
/// answer.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "the coordinator does not show that a statement waits on a worker")]
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
        let layer = leased(&pool, Policy::AtMostOnce { lease: LEASE });
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
             where datname = current_database() and wait_event_type = 'Lock' and query like '%update idempotency.record%'",
        )
        .await;
        assert!(!first.is_finished());
        assert!(lease.is_lost(), "{status}");
        locked.rollback().await.expect("unlocked");
        assert_eq!(first.await.expect("joined").status, status);
        assert!(lease.is_lost(), "{status}");
    }
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_panic_is_a_failure(pool: PgPool) {
    for (policy, outcome) in
        [(Policy::AtLeastOnce { lease: LEASE }, "released"), (Policy::AtMostOnce { lease: LEASE }, "indeterminate")]
    {
        let (app, sent) = app(leased(&pool, policy));
        let (panicking, key) = (app.clone(), outcome.to_owned());
        let panicked = tokio::spawn(async move { post_to(&panicking, "/send/0", &key, "x").await }).await;
        assert!(panicked.is_err_and(|error| error.is_panic()));
        let state: Option<bool> =
            sqlx::query_scalar("select lease_until = '-infinity' from idempotency.record where value = $1")
                .bind(outcome)
                .fetch_one(&pool)
                .await
                .expect("a record");
        assert_eq!(state, Some(outcome == "released"));
        assert_eq!(sent.load(Ordering::SeqCst), 1);
    }
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_response_that_an_operator_has_resolved_is_replayed_as_json(pool: PgPool) {
    let (app, sent) = app(leased(&pool, Policy::AtMostOnce { lease: LEASE }));
    assert_eq!(post_to(&app, "/send/503", "key-1", "x").await.status, StatusCode::SERVICE_UNAVAILABLE);
    let key = pg_idempotency::Key::new("ada", "POST /send/{status}", "key-1").expect("a key");
    let token: i64 =
        sqlx::query_scalar("select token from idempotency.record").fetch_one(&pool).await.expect("a token");
    let day = Duration::from_secs(24 * 3600);
    let resolved = pg_idempotency::operator::resolve(&pool, &key, token, &serde_json::json!({"text": 7}), day).await;
    resolved.expect("resolved");
    let answer = post_to(&app, "/send/503", "key-1", "x").await;
    assert_eq!((answer.status, answer.is_replayed(), &*answer.body), (StatusCode::OK, true, &br#"{"text":7}"#[..]));
    assert_eq!(answer.headers["content-type"], "application/json");
    assert_eq!(sent.load(Ordering::SeqCst), 1);
}

/// Another owner takes the key over, so the lease is lost before the handler ends.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_lost_lease_is_never_the_handlers_success(pool: PgPool) {
    let gate = Gate::new();
    let gated = gate.clone();
    let handler = async move || {
        gated.pass().await;
        "sent"
    };
    let layer = leased(&pool, Policy::AtLeastOnce { lease: Duration::from_millis(600) });
    let app = Router::new().route("/slow", post(handler)).layer(layer);
    let first = tokio::spawn({
        let app = app.clone();
        async move { post_to(&app, "/slow", "key-1", "x").await }
    });
    gate.reached().await;
    sqlx::raw_sql("update idempotency.record set token = token + 1").execute(&pool).await.expect("taken over");
    let lost = first.await.expect("joined");
    assert_eq!((lost.status, &*lost.problem()), (StatusCode::SERVICE_UNAVAILABLE, "unavailable"));
    gate.open();
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn without_a_key_a_handler_has_no_lease(pool: PgPool) {
    let (app, sent) = app(leased(&pool, Policy::AtLeastOnce { lease: LEASE }).with_optional_key(true));
    let answer = send(&app, request("POST", "/send/202", None, "x")).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "this handler asks for one");
    assert_eq!(sent.load(Ordering::SeqCst), 0);
}
