//! What an operator reads of single records, and the one that they forget.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::operator::{self, UnsettledPart};
use pg_idempotency::{Error, Key, lease};
use sqlx::PgPool;

use crate::fixture::Fixture;

const AT_LEAST_ONCE: lease::Policy = lease::Policy::AtLeastOnce { lease: Duration::from_secs(40) };

fn key(n: i64) -> Key {
    Key::new("scope", "operation", format!("{n:03}")).expect("a valid key")
}

/// Records that expire at the same moment belong to one part, so no part skips one or repeats one.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_search_in_parts_finds_each_record_once(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = pool.acquire().await?;
    for n in 0..40 {
        match n % 4 {
            0 => Fixture::indeterminate(&key(n), "body")?.write(&mut *conn).await?,
            1 => Fixture::completed(&key(n), "body", &n)?.write(&mut *conn).await?,
            2 => Fixture::lapsed(&key(n), "body", AT_LEAST_ONCE)?.with_attempt(3).write(&mut *conn).await?,
            _ => Fixture::indeterminate(&key(n), "body")?.expired().write(&mut *conn).await?,
        }
    }
    // Five at each moment, so that parts of another size end between two of them.
    let now: chrono::DateTime<chrono::Utc> = sqlx::query_scalar("select now()").fetch_one(&mut *conn).await?;
    for n in (0..40).filter(|n| n % 4 != 3) {
        let update = "update idempotency.record set expires_at = $1 where (scope, operation, value) = ('scope', 'operation', $2)";
        let expires_at = now + chrono::TimeDelta::hours(n / 5 + 1);
        sqlx::query(update).bind(expires_at).bind(key(n).value()).execute(&mut *conn).await?;
    }
    for (max_attempts, modulo, count) in [(None, 4, 10), (NonZeroU32::new(3), 2, 20)] {
        for size in [0, 1, 7, 30, 31, 100] {
            let (mut found, mut read, mut after) = (Vec::new(), 0, None);
            loop {
                let part: UnsettledPart = operator::unsettled_part(&pool, after, size, max_attempts).await?;
                assert!(part.read <= u64::from(size.max(1)), "{part:?}");
                assert!(part.found.is_sorted_by_key(|record| (record.claimed_at, record.value.clone())));
                // Without those at the same moment as the last one.
                read += part.read;
                found.extend(part.found.into_iter().map(|record| record.value));
                match part.next {
                    None => break,
                    next => after = next,
                }
            }
            found.sort();
            let expected: Vec<_> = (0..40).filter(|n| n % modulo == 0).map(|n| key(n).value().to_owned()).collect();
            assert_eq!(found, expected, "{size}");
            assert!(
                (1..=30).contains(&read) && (size < 30 || read == 30),
                "{size}: what has expired is not read: {read}"
            );
        }
        let oldest = operator::unsettled(&pool, 100, max_attempts).await?;
        assert_eq!(oldest.len(), count);
        assert!(oldest.is_sorted_by_key(|record| (record.claimed_at, record.value.clone())));
        assert_eq!(operator::unsettled(&pool, 3, max_attempts).await?, oldest[..3]);
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_list_names_the_downstream_key_of_the_lease_and_of_each_step(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = pool.acquire().await?;
    Fixture::lapsed(&key(1), "body", lease::Policy::AtMostOnce { lease: Duration::from_secs(40) })?
        .write(&mut *conn)
        .await?;
    Fixture::lapsed(&key(2), "body", lease::Policy::InSteps { lease: Duration::from_secs(40) })?
        .with_step_in_doubt("text")
        .with_step_in_doubt("email")
        .write(&mut *conn)
        .await?;
    Fixture::indeterminate(&key(3), "body")?.write(&mut *conn).await?;
    let listed = operator::unsettled(&pool, 10, None).await?;
    let named = |n| listed.iter().find(|record| record.value == key(n).value()).expect("listed");
    for n in [1, 2] {
        let shown = operator::show(&pool, &key(n)).await?.expect("a record");
        assert_eq!(named(n).downstream_key, shown.downstream_key);
        assert_eq!(named(n).steps, shown.steps_in_doubt());
        for step in &shown.steps {
            assert_eq!(named(n).step_downstream_key(&step.name).as_ref(), Some(&step.downstream_key));
        }
    }
    assert_eq!(named(2).steps.len(), 2);
    assert_eq!(named(3).downstream_key, None, "transaction mode calls no other service");
    assert_eq!(named(3).step_downstream_key("text"), None);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_response_is_read_up_to_a_limit_and_under_its_token(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = pool.acquire().await?;
    Fixture::completed(&key(1), "body", &"answer")?.write(&mut *conn).await?;
    let shown = operator::show(&pool, &key(1)).await?.expect("a record");
    for (most, body) in [(100, "\"answer\""), (u32::MAX, "\"answer\""), (3, "\"an"), (0, "")] {
        let response = operator::response(&pool, &key(1), shown.token, most).await?.expect("a response");
        assert_eq!((response.body.as_deref(), response.bytes), (Some(body.as_bytes()), 8));
        assert_eq!((response.status, response.headers), (None, Vec::new()));
    }
    assert_eq!(operator::response(&pool, &key(1), shown.token.wrapping_add(1), 100).await?, None);
    sqlx::query(
        "update idempotency.record set response_status = 422, response_body = null, response_headers = '[[\"a\", \"b\"]]'",
    )
    .execute(&mut *conn)
    .await?;
    let response = operator::response(&pool, &key(1), shown.token, 100).await?.expect("a response");
    assert_eq!((response.status, response.body, response.bytes), (Some(422), None, 0));
    assert_eq!(response.headers, [("a".to_owned(), "b".to_owned())]);
    Fixture::indeterminate(&key(2), "body")?.write(&mut *conn).await?;
    let shown = operator::show(&pool, &key(2)).await?.expect("a record");
    assert_eq!(operator::response(&pool, &key(2), shown.token, 100).await?, None);
    Ok(())
}

/// A completion keeps the token of its claim.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn what_was_completed_after_it_was_shown_is_not_forgotten(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = pool.acquire().await?;
    Fixture::indeterminate(&key(1), "body")?.write(&mut *conn).await?;
    let unfinished = operator::show(&pool, &key(1)).await?.expect("a record");
    operator::resolve(&pool, &key(1), unfinished.token, &1, Duration::from_secs(60)).await?;
    let forgotten = operator::forget(&pool, &key(1), &unfinished).await;
    assert!(matches!(forgotten, Err(Error::Changed)), "{forgotten:?}");
    let completed = operator::show(&pool, &key(1)).await?.expect("a record");
    assert_eq!(completed.token, unfinished.token);
    operator::forget(&pool, &key(1), &completed).await?;
    assert!(operator::show(&pool, &key(1)).await?.is_none());
    Ok(())
}
