//! A record whose key has nothing to see, which an unreleased build or a person has written: nobody claims it, and it
//! is still finished.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Acquired, Lease, LeaseOptions, Policy};
use pg_idempotency::operator::{self, State};
use pg_idempotency::testing::{age, lapse};
use pg_idempotency::{Error, InvalidKey, Key, KeyPart};
use sqlx::PgPool;

use crate::support::key;

const MINUTE: Duration = Duration::from_secs(60);

/// What a program that lost the value has sent. The record has lapsed.
async fn blank(pool: &PgPool, leasing: LeaseOptions) -> anyhow::Result<Key> {
    let Acquired::Owner(owner) = leasing.acquire::<String, _>(pool, &key("a"), "body").await? else {
        anyhow::bail!("it is completed")
    };
    drop(owner);
    lapse(pool, &key("a")).await?;
    age(pool, &key("a"), MINUTE).await?;
    sqlx::query("update idempotency.record set value = ' ' || U&'\\200B'").execute(pool).await?;
    let refused = Key::new("tenant", "operation", " \u{200b}");
    assert_eq!(refused, Err(InvalidKey::NothingVisible { part: KeyPart::Value }));
    Ok(Key::recorded("tenant", "operation", " \u{200b}")?)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_blank_key_that_is_recorded_is_listed_and_settled(pool: PgPool) -> anyhow::Result<()> {
    let at_most_once = LeaseOptions::new(Policy::AtMostOnce { lease: MINUTE });
    let blank = blank(&pool, at_most_once).await?;
    let mut listed = operator::unsettled(&pool, 9, None, None).await?;
    let (Some(shown), true) = (listed.pop(), listed.is_empty()) else { panic!("{listed:?}") };
    assert_eq!((&shown.key, shown.state), (&blank, State::Indeterminate));
    let shown = shown.release(&pool, "no trace").await?.resolve(&pool, &7, MINUTE).await?;
    assert_eq!(shown.state, State::Completed);
    shown.forget(&pool).await?;
    assert!(operator::show(&pool, &blank).await?.is_none());
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_blank_key_that_is_recorded_is_resumed(pool: PgPool) -> anyhow::Result<()> {
    let leasing = LeaseOptions::new(Policy::AtLeastOnce { lease: MINUTE }).store_request(true);
    let leasing = leasing.max_attempts(NonZeroU32::MIN.saturating_add(1));
    let blank = blank(&pool, leasing).await?;
    let work = async |lease: &Lease, body: String| -> Result<String, Error> {
        assert_eq!(lease.key(), &blank);
        Ok(body)
    };
    assert_eq!(leasing.resume_one(&pool, "operation", work).await?.as_deref(), Some("body"));
    Ok(())
}
