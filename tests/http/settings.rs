//! The layer refuses invalid settings when the service starts.

use std::time::Duration;

use axum::http::{HeaderName, StatusCode, header};
use pg_idempotency::http::InvalidSetting;
use sqlx::PgPool;

use crate::support::transactional;

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
