//! Attempts beyond the service's limit, which an operator permits.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions, Policy};
use pg_idempotency::operator::{Shown, State, show, unsettled};
use pg_idempotency::testing::{expire, lapse};
use pg_idempotency::{Error, Key, SettleError};
use rig::fixture::Fixture;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS, owner};
use sqlx::PgPool;

use crate::support::{assert_changed, key, shown};

const MOST: NonZeroU32 = NonZeroU32::new(2).expect("two");
const WHY: &str = "the gateway is repaired";

async fn grant(pool: &PgPool, key: &Key) -> Result<Shown, SettleError> {
    shown(pool, key).await.grant(pool, WHY).await
}

/// Claims, and releases with an error.
async fn fail(pool: &PgPool, key: &Key, policy: Policy) -> Result<u32, Error> {
    match LeaseOptions::new(policy).max_attempts(MOST).acquire::<i64, _>(pool, key, "body").await? {
        Acquired::Owner(owner) => {
            let attempt = owner.attempt();
            owner.release("the gateway said no").await?;
            Ok(attempt)
        }
        Acquired::Replayed(_) => panic!("nothing is completed"),
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_operator_permits_one_attempt_beyond_the_limit(pool: PgPool) -> anyhow::Result<()> {
    for (name, policy) in [("at least once", AT_LEAST_ONCE), ("in steps", IN_STEPS), ("at most once", AT_MOST_ONCE)] {
        let key = key(name);
        for attempt in 1..=2 {
            assert!(!show(&pool, &key).await?.is_some_and(|shown| shown.is_exhausted(MOST)), "{name}");
            assert_eq!(fail(&pool, &key, policy).await?, attempt, "{name}");
        }
        // Each permission is for one attempt.
        for attempt in 3..=4 {
            let refused = fail(&pool, &key, policy).await;
            assert!(matches!(refused, Err(Error::Exhausted { .. })), "{name}: {refused:?}");
            let before = shown(&pool, &key).await;
            assert!(before.is_exhausted(MOST) && before.state == State::Released, "{name}: {before:?}");
            assert_eq!(unsettled(&pool, 10, Some(MOST), None).await?.len(), 1, "{name}");
            let granted = grant(&pool, &key).await?;
            assert_eq!(granted.granted_attempt, Some(attempt), "{name}");
            assert_eq!((granted.state, granted.last_error.as_deref()), (State::Released, Some(WHY)), "{name}");
            assert!(granted.token != before.token && !granted.is_exhausted(MOST), "{name}");
            assert!(unsettled(&pool, 10, Some(MOST), None).await?.is_empty(), "{name}");
            assert_changed(before.grant(&pool, WHY).await, "the token of before");
            assert_eq!(fail(&pool, &key, policy).await?, attempt, "{name}");
        }
        assert!(shown(&pool, &key).await.is_exhausted(MOST), "{name}");
        let resolved = shown(&pool, &key).await.resolve(&pool, &1, Duration::from_secs(60)).await?;
        assert_eq!(resolved.granted_attempt, None, "{name}: it is completed");
    }
    Ok(())
}

/// A lapsed operation, too. The owner may only be suspended: what it sends later finds another token.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_grant_fences_an_owner_that_was_suspended(pool: PgPool) -> anyhow::Result<()> {
    let leasing = LeaseOptions::new(AT_LEAST_ONCE).max_attempts(NonZeroU32::MIN);
    let suspended = owner(&pool, leasing, &key("a")).await;
    assert_changed(grant(&pool, &key("a")).await, "under a live lease");
    lapse(&pool, &key("a")).await?;
    assert!(shown(&pool, &key("a")).await.is_exhausted(NonZeroU32::MIN));
    grant(&pool, &key("a")).await?;
    assert!(matches!(suspended.complete(&1).await, Err(Error::LeaseLost)));
    let next = leasing.acquire::<i64, _>(&pool, &key("a"), "body").await?;
    assert!(matches!(next, Acquired::Owner(owner) if owner.attempt() == 2));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_does_not_wait_for_an_attempt_gets_no_grant(pool: PgPool) -> anyhow::Result<()> {
    let lapsed = |policy| Fixture::lapsed(&key("a"), "body", policy);
    for (what, record) in [
        ("in doubt", lapsed(IN_STEPS)?.with_step_in_doubt("text")),
        ("nobody knows whether it took effect", lapsed(AT_MOST_ONCE)?),
        ("in transaction mode", Fixture::released(&key("a"), "body")?),
        ("completed", Fixture::completed(&key("a"), "body", &1)?),
    ] {
        record.write(&pool).await?;
        assert_changed(grant(&pool, &key("a")).await, what);
    }
    lapsed(AT_LEAST_ONCE)?.write(&pool).await?;
    expire(&pool, &key("a")).await?;
    assert_changed(grant(&pool, &key("a")).await, "past its retention the key is new");
    Ok(())
}

/// A release without a step in doubt decides about the effect alone. The number of attempts is another question.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_release_without_steps_grants_nothing(pool: PgPool) -> anyhow::Result<()> {
    Fixture::lapsed(&key("a"), "body", AT_MOST_ONCE)?.with_attempt(2).write(&pool).await?;
    shown(&pool, &key("a")).await.release(&pool, "not charged").await?;
    let refused = fail(&pool, &key("a"), AT_MOST_ONCE).await;
    assert!(matches!(refused, Err(Error::Exhausted { attempts: 2, .. })), "{refused:?}");
    grant(&pool, &key("a")).await?;
    assert_eq!(fail(&pool, &key("a"), AT_MOST_ONCE).await?, 3);
    Ok(())
}
