//! The layer refuses invalid settings when the service starts.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use axum::http::{HeaderName, StatusCode, header};
use pg_idempotency::http::IdempotencyLayer;
use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::{Idempotency, OnDuplicate};
use sqlx::PgPool;

use crate::support::{app, create_effects, effects, post_to, transactional, user};

const LARGEST_RESPONSE: usize = 256 * 1024 * 1024;

/// The text of the panic of a setter.
fn refusal<R>(set: impl FnOnce() -> R) -> String {
    let panic = catch_unwind(AssertUnwindSafe(|| drop(set()))).expect_err("the setting should be refused");
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => (*panic.downcast::<&str>().expect("a text")).to_owned(),
    }
}

#[sqlx::test(migrations = false)]
async fn a_setter_of_the_layer_panics_for_what_no_layer_can_do(pool: PgPool) {
    let layer = || transactional(&pool);
    for status in [StatusCode::OK, StatusCode::INTERNAL_SERVER_ERROR] {
        assert!(refusal(|| layer().store_errors([status])).contains("only 400 to 499"), "{status}");
    }
    for name in [header::SET_COOKIE, header::DATE, header::TRANSFER_ENCODING, HeaderName::from_static("keep-alive")] {
        assert!(refusal(|| layer().replay_header(name.clone())).contains("must not be replayed"), "{name}");
    }
    for name in [header::AUTHORIZATION, header::COOKIE, header::PROXY_AUTHORIZATION] {
        assert!(refusal(|| layer().store_header(name.clone())).contains("must not be stored"), "{name}");
    }
    for pointer in ["", "sent_at", "#/sent_at", "/a~2b", "/a~"] {
        assert!(refusal(|| layer().canonical_json(["/fine", pointer])).contains("JSON pointer"), "{pointer}");
    }
    assert!(refusal(|| layer().run_timeout(Duration::ZERO)).contains("run time-out"));
    for longer in [256, usize::MAX] {
        assert!(refusal(|| layer().shortest_key(longer)).contains("at most 255"), "{longer}");
    }
    for larger in [LARGEST_RESPONSE + 1, usize::MAX] {
        assert!(refusal(|| layer().response_limit(larger)).contains("at most 256 MiB"), "{larger}");
    }
    assert!(refusal(|| layer().max_runs(0)).contains("one run or more"));
    assert!(refusal(|| layer().max_runs_of_one_scope(0)).contains("one run or more"));
    for name in ["", " ", "bill ing", "billing\t", "billing\n", "billing\u{200b}", "f\u{fc}r", "\u{3000}"] {
        assert!(refusal(|| layer().service(name)).contains("a word of visible ASCII"), "{name:?}");
    }
    assert!(refusal(|| layer().service(&"b".repeat(65))).contains("at most 64 bytes"));
    let own = |layer: IdempotencyLayer| layer.operation(|_| Some("pay".to_owned()));
    for refused in [refusal(|| own(layer()).service("billing")), refusal(|| own(layer().service("billing")))] {
        assert!(refused.contains("only for the default operation"), "{refused}");
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_layer_answers_at_both_ends_of_its_bounds(pool: PgPool) {
    create_effects(&pool).await;
    let years = Duration::from_secs(3660 * 24 * 3600);
    let least = transactional(&pool).request_limit(0).response_limit(0).shortest_key(0);
    let least = app(least.max_runs(1).max_runs_of_one_scope(1).run_timeout(years));
    let greatest = transactional(&pool).request_limit(usize::MAX).response_limit(LARGEST_RESPONSE).shortest_key(255);
    let greatest = app(greatest.max_runs(usize::MAX).max_runs_of_one_scope(usize::MAX).run_timeout(years));
    assert_eq!(post_to(&least, "/effects", "a", "").await.status, StatusCode::CREATED);
    assert_eq!(post_to(&least, "/effects", "a", "").await.problem(), "not-replayable");
    assert_eq!(post_to(&least, "/effects", "b", "x").await.status, StatusCode::PAYLOAD_TOO_LARGE);
    let key = "k".repeat(255);
    for replayed in [false, true] {
        let answer = post_to(&greatest, "/effects", &key, &"x".repeat(100_000)).await;
        assert_eq!((answer.status, answer.is_replayed()), (StatusCode::CREATED, replayed));
    }
    assert_eq!(effects(&pool).await, 2);
}

/// The order of the setters of the options does not matter, so no setter can check this.
#[sqlx::test(migrations = false)]
async fn no_layer_is_made_of_options_that_contradict_each_other(pool: PgPool) {
    let second = Duration::from_secs(1);
    let waits = Idempotency::new().on_duplicate(OnDuplicate::Wait(second)).retention(second);
    let forgets = LeaseOptions::new(Policy::AtMostOnce { lease: second }).retention(second);
    let refused = refusal(|| IdempotencyLayer::transactional(pool.clone(), waits, user));
    assert!(refused.contains("shorter than the retention"), "{refused}");
    let refused = refusal(|| IdempotencyLayer::leased(pool.clone(), forgets, user));
    assert!(refused.contains("retention of 1s is out of range"), "{refused}");
}
