//! WAL, counted on the server.

use std::time::Duration;

use pg_idempotency::mark::{MarkOptions, Marked, mark};
use pg_idempotency::{Error, Idempotency};
use sqlx::{PgConnection, PgPool};

use crate::support::key;

/// Bytes of WAL that this work writes: the least of several tries, because the server has work of its own.
async fn wal_bytes<F>(pool: &PgPool, mut work: F) -> i64
where
    F: AsyncFnMut(),
{
    let mut least = i64::MAX;
    for _ in 0..30 {
        let before: String =
            sqlx::query_scalar("select pg_current_wal_insert_lsn()::text").fetch_one(pool).await.expect("an LSN");
        work().await;
        let written: i64 =
            sqlx::query_scalar("select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1::text::pg_lsn)::int8")
                .bind(before)
                .fetch_one(pool)
                .await
                .expect("a difference");
        least = least.min(written);
    }
    least
}

async fn marked(pool: &PgPool, value: &str) -> Result<Marked, Error> {
    let mut tx = pool.begin().await?;
    let marked = mark(&mut tx, &key(value), Duration::from_secs(300)).await?;
    tx.commit().await?;
    Ok(marked)
}

/// Duplicates are what there is most of, and they change nothing.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn duplicates_of_settled_keys_write_no_wal(pool: PgPool) -> anyhow::Result<()> {
    let _turn = crate::turn().await;
    let keys: Vec<_> = (0..100).map(|n| key(&n.to_string())).collect();
    let batch = async || {
        let mut tx = pool.begin().await.expect("a transaction");
        let marked = MarkOptions::new(Duration::from_secs(300)).mark_many(&mut tx, &keys).await.expect("marked");
        tx.commit().await.expect("a commit");
        marked
    };
    assert_eq!(batch().await, [Marked::First; 100]);
    let written = wal_bytes(&pool, async || assert_eq!(batch().await, [Marked::Duplicate; 100])).await;
    assert_eq!(written, 0, "a hundred in one statement");
    let written =
        wal_bytes(&pool, async || assert_eq!(marked(&pool, "7").await.expect("marked"), Marked::Duplicate)).await;
    assert_eq!(written, 0, "one by one");
    let run = async || {
        let perform = async |_: &mut PgConnection| Ok::<_, Error>(1);
        Idempotency::new().run(&pool, &key("run"), "body", perform).await.expect("an outcome")
    };
    assert!(!run().await.is_replayed());
    let written = wal_bytes(&pool, async || assert!(run().await.is_replayed())).await;
    assert_eq!(written, 0, "a replay");
    Ok(())
}
