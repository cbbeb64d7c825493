//! What an operator reads of single records, and the one that they forget.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::operator;
use pg_idempotency::{Error, Idempotency, Key, Mode, Outcome, lease};
use rig::fixture::Fixture;
use sqlx::PgPool;

use crate::support::{assert_changed, shown, steps_in_doubt};

const AT_LEAST_ONCE: lease::Policy = lease::Policy::AtLeastOnce { lease: Duration::from_secs(40) };

fn key(n: i64) -> Key {
    Key::new("scope", "operation", format!("{n:03}")).expect("a valid key")
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_oldest_unsettled_records_are_listed_as_they_are_shown(pool: PgPool) -> anyhow::Result<()> {
    let in_steps = lease::Policy::InSteps { lease: Duration::from_secs(40) };
    for n in 0..40 {
        match n % 5 {
            0 => Fixture::indeterminate(&key(n), "body")?.write(&pool).await?,
            1 => Fixture::completed(&key(n), "body", &n)?.write(&pool).await?,
            2 => Fixture::lapsed(&key(n), "body", AT_LEAST_ONCE)?.with_attempt(3).write(&pool).await?,
            3 => Fixture::lapsed(&key(n), "body", in_steps)?.with_step_in_doubt("text").write(&pool).await?,
            _ => Fixture::indeterminate(&key(n), "body")?.expired().write(&pool).await?,
        }
    }
    for (max_attempts, listed) in [(None, [0, 3].as_slice()), (NonZeroU32::new(3), &[0, 2, 3])] {
        let oldest = operator::unsettled(&pool, 100, max_attempts, None).await?;
        let mut found: Vec<_> = oldest.iter().map(|record| record.key.clone()).collect();
        found.sort_by(|a, b| a.value().cmp(b.value()));
        let expected: Vec<_> = (0..40).filter(|n| listed.contains(&(n % 5))).map(key).collect();
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

/// A completion keeps the token of its claim.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_was_completed_after_it_was_shown_is_not_forgotten(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = pool.acquire().await?;
    Fixture::indeterminate(&key(1), "body")?.write(&mut *conn).await?;
    let unfinished = shown(&pool, &key(1)).await;
    let complete = "update idempotency.record set completed_at = now(), response_body = '1'";
    sqlx::query(complete).execute(&pool).await?;
    assert_changed(unfinished.clone().forget(&pool).await, "forget");
    assert_changed(unfinished.clone().resolve(&pool, &2, Duration::from_secs(60)).await, "resolve");
    let replayed = Idempotency::new().run(&pool, &key(1), "body", async |_| Ok::<_, Error>(2)).await?;
    assert_eq!(replayed, Outcome::Replayed(1), "what it was completed with");
    let completed = shown(&pool, &key(1)).await;
    assert_eq!(completed.token, unfinished.token);
    completed.forget(&pool).await?;
    assert!(operator::show(&pool, &key(1)).await?.is_none());
    Ok(())
}

/// The owner's machine slept, and has worked on under the same token since the record was shown.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_whose_lease_or_steps_have_changed_since_it_was_shown_is_not_forgotten(
    pool: PgPool,
) -> anyhow::Result<()> {
    let in_steps = lease::Policy::InSteps { lease: Duration::from_secs(40) };
    let renewed = "update idempotency.record set lease_until = statement_timestamp()";
    let stepped = r#"update idempotency.record set steps = '{"ride": {"result": "1", "attempt": 1}}'"#;
    for meanwhile in [renewed, stepped] {
        Fixture::lapsed(&key(1), "body", in_steps)?.with_step("ride", &0).write(&pool).await?;
        let seen = shown(&pool, &key(1)).await;
        sqlx::query(meanwhile).execute(&pool).await?;
        assert_changed(seen.forget(&pool).await, meanwhile);
        shown(&pool, &key(1)).await.forget(&pool).await?;
    }
    Ok(())
}
