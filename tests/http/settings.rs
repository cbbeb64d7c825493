//! The layer refuses invalid settings when the service starts.

use std::time::Duration;

use axum::http::{HeaderName, StatusCode, header};
use pg_idempotency::InFlight;
use pg_idempotency::http::{IdempotencyLayer, InvalidSetting};
use sqlx::PgPool;

use crate::support::{app, calls, post_to, transactional, user};

#[sqlx::test(migrations = false)]
async fn invalid_settings_are_refused(pool: PgPool) {
    let layer = || transactional(&pool);
    for status in [StatusCode::OK, StatusCode::INTERNAL_SERVER_ERROR] {
        assert_eq!(layer().with_stored_errors([status]).err(), Some(InvalidSetting::StatusNotStorable(status)));
    }
    for name in [header::SET_COOKIE, header::DATE, header::TRANSFER_ENCODING, HeaderName::from_static("keep-alive")] {
        let error = layer().with_replayed_header(name.clone()).err();
        assert_eq!(error, Some(InvalidSetting::HeaderNotReplayable(name)));
    }
    for pointer in ["", "sent_at", "#/sent_at", "/a~2b", "/a~"] {
        let error = layer().with_canonical_json(["/fine", pointer]).err();
        assert_eq!(error, Some(InvalidSetting::NotAPointer(pointer.to_owned())));
    }
    assert!(matches!(layer().with_run_timeout(Duration::ZERO), Err(InvalidSetting::Duration(_))));
}

/// As for a call without the layer.
#[sqlx::test(migrations = false)]
async fn a_wait_that_is_not_shorter_than_the_retention_is_a_mistake_of_the_service(pool: PgPool) {
    let minute = Duration::from_secs(60);
    let options = calls().with_retention(minute).expect("a retention");
    let options = options.with_in_flight(InFlight::Wait(minute)).expect("a wait");
    let app = app(IdempotencyLayer::transactional(pool, options, user));
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.problem(), "misconfigured");
}
