//! Single marks: first, duplicate, the window, and keys of other modes. The interleavings have the marks in flight.

use std::time::Duration;

use pg_idempotency::mark::{Marked, Marking, mark};
use pg_idempotency::{Error, Janitor};
use sqlx::PgPool;

use crate::support::{connect, create_effects, expire_in, key, once};

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
