//! Leases for tests that are not about their length: longer than any test.

use std::time::Duration;

use pg_idempotency::Key;
use pg_idempotency::lease::{Acquired, LeaseOptions, LeaseOwner, Policy};
use sqlx::PgPool;

pub const LEASE: Duration = Duration::from_secs(60);
pub const AT_LEAST_ONCE: Policy = Policy::AtLeastOnce { lease: LEASE };
pub const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: LEASE };
pub const IN_STEPS: Policy = Policy::InSteps { lease: LEASE };

/// Claims a key that is free, with the body `"body"`.
pub async fn owner(pool: &PgPool, leasing: LeaseOptions, key: &Key) -> LeaseOwner {
    match leasing.acquire::<serde_json::Value, _>(pool, key, "body").await.expect("acquired") {
        Acquired::Owner(lease) => lease,
        Acquired::Replayed(response) => panic!("replayed {response}"),
    }
}
