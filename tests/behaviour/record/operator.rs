//! What an operator reads of single records, and the one that they forget.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::operator;
use pg_idempotency::{Error, Idempotency, Key, Mode, Outcome, lease};
use rig::fixture::Fixture;
use sqlx::PgPool;

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
            let steps = if record.mode == Mode::InSteps { vec!["text".to_owned()] } else { Vec::new() };
            assert_eq!(record.steps_in_doubt(), steps);
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
    let unfinished = operator::show(&pool, &key(1)).await?.expect("a record");
    operator::resolve(&pool, &key(1), unfinished.token, &1, Duration::from_secs(60)).await?;
    let forgotten = operator::forget(&pool, &unfinished).await;
    assert!(matches!(forgotten, Err(Error::Changed)), "{forgotten:?}");
    let replayed = Idempotency::new().run(&pool, &key(1), "body", async |_| Ok::<_, Error>(2)).await?;
    assert_eq!(replayed, Outcome::Replayed(1), "what the operator has found out");
    let completed = operator::show(&pool, &key(1)).await?.expect("a record");
    assert_eq!(completed.token, unfinished.token);
    operator::forget(&pool, &completed).await?;
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
        let shown = operator::show(&pool, &key(1)).await?.expect("a record");
        sqlx::query(meanwhile).execute(&pool).await?;
        let forgotten = operator::forget(&pool, &shown).await;
        assert!(matches!(forgotten, Err(Error::Changed)), "{meanwhile}: {forgotten:?}");
        let shown = operator::show(&pool, &key(1)).await?.expect("a record");
        operator::forget(&pool, &shown).await?;
    }
    Ok(())
}
