//! The layer refuses invalid settings when the service starts.

use std::time::Duration;

use axum::http::{HeaderName, StatusCode, header};
use pg_idempotency::InFlight;
use pg_idempotency::http::{IdempotencyLayer, InvalidSetting};
use pg_idempotency::lease::Policy;
use sqlx::PgPool;

use crate::support::{transactional, user};

#[sqlx::test(migrations = false)]
async fn invalid_settings_are_refused(pool: PgPool) {
    let layer = || transactional(&pool);
    let leased = |lease| IdempotencyLayer::leased(pool.clone(), user, Policy::AtLeastOnce { lease });
    for status in [StatusCode::OK, StatusCode::INTERNAL_SERVER_ERROR] {
        assert_eq!(layer().with_stored_errors([status]).err(), Some(InvalidSetting::StatusNotStorable(status)));
    }
    for name in [header::SET_COOKIE, header::DATE, header::TRANSFER_ENCODING, HeaderName::from_static("keep-alive")] {
        let error = layer().with_replayed_header(name.clone()).err();
        assert_eq!(error, Some(InvalidSetting::HeaderNotReplayable(name)));
    }
    assert!(matches!(layer().with_retention(Duration::ZERO), Err(InvalidSetting::Duration(_))));
    assert!(matches!(layer().with_in_flight(InFlight::Wait(Duration::ZERO)), Err(InvalidSetting::Duration(_))));
    // A wait that is not shorter than the retention, whichever comes first.
    let (half, whole) = (Duration::from_secs(30 * 60), InFlight::Wait(Duration::from_secs(60 * 60)));
    let short = layer().with_retention(half).expect("a retention");
    assert!(matches!(short.with_in_flight(whole), Err(InvalidSetting::Duration(_))));
    let waiting = layer().with_in_flight(whole).expect("a wait");
    assert!(matches!(waiting.with_retention(half), Err(InvalidSetting::Duration(_))));
    let lease = Duration::from_secs(60);
    let short = leased(lease).expect("a lease").with_retention(half).expect("a retention");
    assert!(matches!(short.with_in_flight(whole), Err(InvalidSetting::Duration(_))));
    let waiting = leased(lease).expect("a lease").with_in_flight(whole).expect("a wait");
    assert!(matches!(waiting.with_retention(half), Err(InvalidSetting::Duration(_))));
    assert!(leased(Duration::ZERO).is_err());
    let minute = leased(Duration::from_secs(60)).expect("a lease");
    assert!(matches!(minute.with_retention(Duration::from_secs(60)), Err(InvalidSetting::Duration(_))));
}
