//! Mark mode, one by one: first, duplicate, in flight, and the window between them.

use std::time::Duration;

use pg_idempotency::mark::{Marked, Marking, mark};
use pg_idempotency::{Error, InFlight, Janitor};
use sqlx::PgPool;

use crate::backend::until_blocked;
use crate::support::{connect, create_effects, expire_in, key, once, setting};

const WINDOW: Duration = Duration::from_secs(300);

/// In a transaction of its own, committed.
async fn marked(pool: &PgPool, value: &str) -> Result<Marked, Error> {
    let mut tx = pool.begin().await?;
    let marked = mark(&mut tx, &key(value), WINDOW).await?;
    tx.commit().await?;
    Ok(marked)
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_first_is_first_and_all_others_are_duplicates(pool: PgPool) -> anyhow::Result<()> {
    assert_eq!(marked(&pool, "a").await?, Marked::First);
    for _ in 0..3 {
        assert_eq!(marked(&pool, "a").await?, Marked::Duplicate);
    }
    assert_eq!(marked(&pool, "b").await?, Marked::First);
    let mut tx = pool.begin().await?;
    assert_eq!(mark(&mut tx, &key("c"), WINDOW).await?, Marked::First);
    assert_eq!(mark(&mut tx, &key("c"), WINDOW).await?, Marked::Duplicate, "in one transaction");
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_mark_goes_with_its_transaction(pool: PgPool) -> anyhow::Result<()> {
    let mut tx = pool.begin().await?;
    assert_eq!(mark(&mut tx, &key("a"), WINDOW).await?, Marked::First);
    tx.rollback().await?;
    assert_eq!(marked(&pool, "a").await?, Marked::First);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_concurrent_duplicate_waits_and_takes_over_if_the_first_rolls_back(pool: PgPool) -> anyhow::Result<()> {
    for commits in [true, false] {
        let value = commits.to_string();
        let mut first = pool.begin().await?;
        assert_eq!(mark(&mut first, &key(&value), WINDOW).await?, Marked::First);
        let second = tokio::spawn({
            let pool = pool.clone();
            async move { marked(&pool, &value).await }
        });
        until_blocked(&pool, 1).await?;
        if commits {
            first.commit().await?;
            assert_eq!(second.await??, Marked::Duplicate);
        } else {
            first.rollback().await?;
            assert_eq!(second.await??, Marked::First);
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn an_uncommitted_mark_is_in_flight_and_no_duplicate(pool: PgPool) -> anyhow::Result<()> {
    let mut first = pool.begin().await?;
    assert_eq!(mark(&mut first, &key("a"), WINDOW).await?, Marked::First);

    let mut second = pool.begin().await?;
    let error = Marking::new(WINDOW)?.with_in_flight(InFlight::Reject)?.mark(&mut second, &key("a")).await;
    assert!(matches!(error, Err(Error::InFlight { .. })), "{error:?}");
    assert_eq!(setting(&mut second, "lock_timeout").await, "0", "usable");
    second.rollback().await?;

    let mut third = pool.begin().await?;
    let brief = InFlight::Wait(Duration::from_millis(50));
    let error = Marking::new(WINDOW)?.with_in_flight(brief)?.mark(&mut third, &key("a")).await;
    assert!(matches!(error, Err(Error::InFlight { .. })), "{error:?}");
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn autocommit_is_refused_before_anything_is_marked(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    let error = mark(&mut conn, &key("a"), WINDOW).await;
    assert!(matches!(error, Err(Error::NotInTransaction)), "{error:?}");
    let error = Marking::new(WINDOW)?.mark_many(&mut conn, &[key("a")]).await;
    assert!(matches!(error, Err(Error::NotInTransaction)), "{error:?}");
    assert_eq!(marked(&pool, "a").await?, Marked::First);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_window_ends_by_the_databases_clock_swept_or_not(pool: PgPool) -> anyhow::Result<()> {
    for swept in [false, true] {
        let value = swept.to_string();
        assert_eq!(marked(&pool, &value).await?, Marked::First);
        let exact: bool = sqlx::query_scalar(
            "select expires_at - completed_at = interval '300 s' from idempotency.record where value = $1",
        )
        .bind(&value)
        .fetch_one(&pool)
        .await?;
        assert!(exact);
        // A minute before its end, and a moment after it.
        expire_in(&pool, &key(&value), Duration::from_secs(60)).await?;
        if swept {
            assert_eq!(Janitor::new(pool.clone()).with_grace(Duration::ZERO).sweep_once(10).await?.rows(), 0);
        }
        assert_eq!(marked(&pool, &value).await?, Marked::Duplicate);
        expire_in(&pool, &key(&value), Duration::ZERO).await?;
        if swept {
            assert_eq!(Janitor::new(pool.clone()).with_grace(Duration::ZERO).sweep_once(10).await?.marks, 1);
        }
        assert_eq!(marked(&pool, &value).await?, Marked::First);
        assert_eq!(marked(&pool, &value).await?, Marked::Duplicate);
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_mark_and_a_full_record_do_not_share_a_key(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    assert_eq!(marked(&pool, "mark").await?, Marked::First);
    let error = once(&pool, &key("mark"), "body").await.expect_err("a mark");
    assert!(matches!(error, Error::OtherMode { .. }), "{error:?}");
    let _ = once(&pool, &key("record"), "body").await?;
    let error = marked(&pool, "record").await.expect_err("a record");
    assert!(matches!(error, Error::OtherMode { .. }), "{error:?}");
    let mut tx = pool.begin().await?;
    let error = Marking::new(WINDOW)?.mark_many(&mut tx, &[key("new"), key("record")]).await;
    assert!(matches!(error, Err(Error::OtherMode { .. })), "{error:?}");
    Ok(())
}
