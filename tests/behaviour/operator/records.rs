//! What an operator sees: records that wait, abandoned operations, and records that no call leaves behind.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Lease, LeaseOptions};
use pg_idempotency::operator::{self, State};
use pg_idempotency::testing::{age, lapse};
use pg_idempotency::{Error, InvalidKey, Key, KeyPart, Mode};
use rig::fixture::Fixture;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS, owner};
use sqlx::PgPool;

use crate::support::{key, steps_in_doubt};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(60 * 60);

fn numbered(n: i64) -> Key {
    key(&format!("{n:03}"))
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_oldest_unsettled_records_are_listed_as_they_are_shown(pool: PgPool) -> anyhow::Result<()> {
    for n in 0..40 {
        match n % 5 {
            0 => Fixture::indeterminate(&numbered(n), "body")?.write(&pool).await?,
            1 => Fixture::completed(&numbered(n), "body", &n)?.write(&pool).await?,
            2 => Fixture::lapsed(&numbered(n), "body", AT_LEAST_ONCE)?.with_attempt(3).write(&pool).await?,
            3 => Fixture::lapsed(&numbered(n), "body", IN_STEPS)?.with_step_in_doubt("text").write(&pool).await?,
            _ => Fixture::indeterminate(&numbered(n), "body")?.expired().write(&pool).await?,
        }
    }
    for (max_attempts, listed) in [(None, [0, 3].as_slice()), (NonZeroU32::new(3), &[0, 2, 3])] {
        let oldest = operator::unsettled(&pool, 100, max_attempts, None).await?;
        let mut found: Vec<_> = oldest.iter().map(|record| record.key.clone()).collect();
        found.sort_by(|a, b| a.value().cmp(b.value()));
        let expected: Vec<_> = (0..40).filter(|n| listed.contains(&(n % 5))).map(numbered).collect();
        assert_eq!(found, expected);
        assert!(oldest.is_sorted_by_key(|record| (record.claimed_at, record.key.value().to_owned())));
        let tokens = |records: &[operator::Shown]| records.iter().map(|record| record.token).collect::<Vec<_>>();
        assert_eq!(tokens(&operator::unsettled(&pool, 3, max_attempts, None).await?), tokens(&oldest[..3]));
        for record in oldest {
            let mut shown = operator::show(&pool, &record.key).await?.expect("a record");
            // Time goes on.
            shown.retention_left = record.retention_left;
            assert_eq!(shown, record);
            let steps = if record.mode == Mode::InSteps { vec!["text"] } else { Vec::new() };
            assert_eq!(steps_in_doubt(&record), steps);
            let has_one = !matches!(record.mode, Mode::Transaction | Mode::InSteps);
            assert_eq!(record.downstream_key.is_some(), has_one, "transaction mode calls no other service");
        }
    }
    Ok(())
}

/// The process dies inside the first step, after the gateway has charged. Gives the key that the gateway saw.
async fn charged_and_gone(pool: &PgPool, name: &str) -> anyhow::Result<String> {
    let lease = owner(pool, LeaseOptions::new(IN_STEPS), &key(name)).await;
    let mut seen = String::new();
    let charge = lease.step_at_least_once("charge", async |step| -> anyhow::Result<i64> {
        seen = step.downstream_key().to_owned();
        anyhow::bail!("the process dies here")
    });
    charge.await.expect_err("no answer");
    lapse(pool, &key(name)).await?;
    Ok(seen)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_charge_that_nobody_comes_back_for_is_listed_with_its_key(pool: PgPool) -> anyhow::Result<()> {
    let seen = charged_and_gone(&pool, "charged").await?;
    assert!(operator::unsettled(&pool, 10, None, None).await?.is_empty());
    assert!(operator::unsettled(&pool, 10, None, Some(HOUR)).await?.is_empty(), "not for an hour yet");
    sqlx::query("update idempotency.record set claimed_at = now() - interval '2 hours'").execute(&pool).await?;
    let listed = operator::unsettled(&pool, 10, None, Some(HOUR)).await?;
    assert!(listed.is_empty(), "its owner renewed the lease, and died a moment ago");
    sqlx::query("update idempotency.record set lease_until = now() - interval '1 hour'").execute(&pool).await?;
    let found = operator::unsettled(&pool, 10, None, Some(HOUR)).await?;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].state, found[0].steps.len()), (State::Lapsed, 0));
    assert_eq!(found[0].downstream_key_of_step("charge"), Some(seen));
    assert_eq!(found[0].downstream_key, None, "the operation itself called nobody");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_row_whose_key_is_not_valid_hides_no_other(pool: PgPool) -> anyhow::Result<()> {
    charged_and_gone(&pool, "by hand").await?;
    charged_and_gone(&pool, "by a caller").await?;
    let by_hand = "update idempotency.record set value = E'a\\nb' where value like '%by hand%'";
    sqlx::query(by_hand).execute(&pool).await.expect_err("the rule of strict.sql");
    sqlx::query("alter table idempotency.record drop constraint key_without_control_characters").execute(&pool).await?;
    assert_eq!(sqlx::query(by_hand).execute(&pool).await?.rows_affected(), 1);
    assert_eq!(operator::unsettled(&pool, 10, None, Some(Duration::ZERO)).await?.len(), 1);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_search_finds_the_values_that_begin_so(pool: PgPool) -> anyhow::Result<()> {
    let keys = [
        ("a", "order", "50%"),
        ("a", "order", "50%_\\ off"),
        ("a", "order", "500"),
        ("a", "order", "ÿ"),
        ("a", "order", "ÿ\u{10ffff}\u{10ffff}z"),
        ("a", "ride", "50%"),
        ("b", "order", "50%"),
    ];
    for (scope, operation, value) in keys {
        Fixture::lapsed(&Key::new(scope, operation, value)?, "body", AT_MOST_ONCE)?.write(&pool).await?;
    }
    let long = "x".repeat(1 << 20);
    for (scope, operation, beginning, found) in [
        (Some("a"), Some("order"), "", &[0, 1, 2, 3, 4][..]),
        (Some("a"), Some("order"), "50", &[0, 1, 2]),
        (Some("a"), Some("order"), "50%", &[0, 1]),
        (Some("a"), Some("order"), "50%_", &[1]),
        (Some("a"), Some("order"), "50%_\\", &[1]),
        (Some("a"), Some("order"), "%", &[]),
        (Some("a"), Some("order"), "_", &[]),
        (Some("a"), Some("order"), "\\", &[]),
        (Some("a"), Some("order"), "5\0", &[]),
        (Some("a\0"), None, "", &[]),
        (Some("a"), Some("order"), "ÿ", &[3, 4]),
        (Some("a"), Some("order"), "ÿ\u{10ffff}", &[4]),
        (Some("a"), Some("order"), &long, &[]),
        (Some("a"), None, "50%", &[0, 1, 5]),
        (Some("a"), None, "", &[0, 1, 2, 3, 4, 5]),
        (None, Some("order"), "50%", &[0, 1, 6]),
        (None, None, "50%", &[0, 1, 5, 6]),
        (None, None, "", &[0, 1, 2, 3, 4, 5, 6]),
    ] {
        let shown = operator::search(&pool, scope, operation, beginning, 9, HOUR).await?;
        let mut expected = Vec::new();
        for number in found {
            let (scope, operation, value) = keys[*number];
            expected.push(Key::new(scope, operation, value)?);
        }
        // The keys above are in another order.
        expected.sort_by(|a, b| (a.value(), a.scope(), a.operation()).cmp(&(b.value(), b.scope(), b.operation())));
        assert!(
            shown.iter().map(|record| &record.key).eq(&expected),
            "{scope:?} {operation:?} {beginning:?}: {shown:?}"
        );
        let first = operator::search(&pool, scope, operation, beginning, 1, HOUR).await?;
        assert!(first.iter().map(|record| &record.key).eq(expected.first()), "{beginning:?}: {first:?}");
    }
    let shown = operator::search(&pool, None, None, "500", 9, HOUR).await?;
    let lapsed: f64 = sqlx::query_scalar(
        "select extract(epoch from lease_until)::float8 from idempotency.record where value = '500'",
    )
    .fetch_one(&pool)
    .await?;
    assert_eq!(shown[0].lease_until.map(|until| until.timestamp_micros()), Some((lapsed * 1e6).round() as i64));
    let released = shown[0].clone().release(&pool, "no effect").await?;
    assert_eq!(released.lease_until, None);
    Ok(())
}

/// The table is locked for as long as the search would read it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_server_ends_a_search_after_its_time(pool: PgPool) -> anyhow::Result<()> {
    let mut lock = pool.begin().await?;
    sqlx::query("lock table idempotency.record").execute(&mut *lock).await?;
    let search = operator::search(&pool, None, None, "", 9, Duration::from_millis(50)).await;
    let Err(Error::Database(error)) = search else { panic!("{search:?}") };
    assert_eq!(error.as_database_error().and_then(|error| error.code()).as_deref(), Some("57014"));
    lock.rollback().await?;
    let left: String = sqlx::query_scalar("show statement_timeout").fetch_one(&pool).await?;
    assert_eq!(left, "0", "the limit ends with the search");
    Ok(())
}

/// What a program that lost the value has sent. The record has lapsed.
async fn blank(pool: &PgPool, leasing: LeaseOptions) -> anyhow::Result<Key> {
    drop(owner(pool, leasing, &key("a")).await);
    lapse(pool, &key("a")).await?;
    age(pool, &key("a"), MINUTE).await?;
    sqlx::query("update idempotency.record set value = ' ' || U&'\\200B'").execute(pool).await?;
    let refused = Key::new("tenant", "operation", " \u{200b}");
    assert_eq!(refused, Err(InvalidKey::NothingVisible { part: KeyPart::Value }));
    Ok(Key::recorded("tenant", "operation", " \u{200b}")?)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_blank_key_that_is_recorded_is_listed_and_settled(pool: PgPool) -> anyhow::Result<()> {
    let at_most_once = LeaseOptions::new(AT_MOST_ONCE);
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
    let leasing = LeaseOptions::new(AT_LEAST_ONCE).store_request(true);
    let leasing = leasing.max_attempts(NonZeroU32::MIN.saturating_add(1));
    let blank = blank(&pool, leasing).await?;
    let work = async |lease: &Lease, body: String| -> Result<String, Error> {
        assert_eq!(lease.key(), &blank);
        Ok(body)
    };
    assert_eq!(leasing.resume_one(&pool, "operation", work).await?.as_deref(), Some("body"));
    Ok(())
}
