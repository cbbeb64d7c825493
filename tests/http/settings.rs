//! The layer refuses invalid settings when the service starts.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use axum::http::{HeaderName, StatusCode, header};
use pg_idempotency::http::IdempotencyLayer;
use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::{Idempotency, OnDuplicate};
use sqlx::PgPool;

use crate::support::{transactional, user};

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
