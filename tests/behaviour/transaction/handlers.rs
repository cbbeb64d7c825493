//! Signatures that no example, no demo and no code of the documentation has: each must compile, with `Send` where a
//! caller asks for it, and give the caller's own error back.

use std::error::Error as StdError;

use pg_idempotency::{Error, Idempotency, Key, ensure_idempotent};
use sqlx::{PgConnection, PgPool};

type BoxedError = Box<dyn StdError + Send + Sync>;

fn key(value: &str) -> Key {
    Key::new("tenant", "order", value).expect("a valid key")
}

async fn insert(conn: &mut PgConnection, count: i64) -> sqlx::Result<i64> {
    sqlx::query_scalar("select $1::int8").bind(count).fetch_one(conn).await
}

/// A boxed error is no `std::error::Error` itself.
async fn with_box(conn: &mut PgConnection, count: i64) -> Result<i64, BoxedError> {
    let outcome = ensure_idempotent(conn, &key("boxed"), &count, async |conn| -> Result<_, BoxedError> {
        let id = insert(conn, count).await?;
        if id < 0 { Err("negative".into()) } else { Ok(id) }
    })
    .await?;
    Ok(outcome.into_inner())
}

/// `async_trait` boxes the future as `Send`.
#[async_trait::async_trait]
trait Shop {
    async fn sell(&self, count: i64) -> anyhow::Result<i64>;
}

#[async_trait::async_trait]
impl Shop for PgPool {
    async fn sell(&self, count: i64) -> anyhow::Result<i64> {
        let mut tx = self.begin().await?;
        let outcome = ensure_idempotent(&mut tx, &key("trait"), &count, async |conn| -> anyhow::Result<_> {
            anyhow::ensure!(count > 0, "nothing ordered");
            Ok(insert(conn, count).await?)
        })
        .await?;
        tx.commit().await?;
        Ok(outcome.into_inner())
    }
}

/// In place of a closure.
async fn sell_two(conn: &mut PgConnection) -> Result<i64, Error> {
    Ok(insert(conn, 2).await?)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_handler_gets_its_answer_and_its_own_error(pool: PgPool) -> anyhow::Result<()> {
    let failed = pool.sell(0).await.expect_err("the handler's own error");
    assert_eq!(failed.to_string(), "nothing ordered");
    let mut tx = pool.begin().await?;
    let failed = with_box(&mut tx, -1).await.expect_err("the handler's own error");
    assert_eq!(failed.to_string(), "negative");
    drop(tx);
    for replayed in [false, true] {
        assert_eq!(pool.sell(2).await?, 2);
        let mut tx = pool.begin().await?;
        assert_eq!(with_box(&mut tx, 2).await.map_err(anyhow::Error::from_boxed)?, 2);
        tx.commit().await?;
        let named = Idempotency::new().run(&pool, &key("named"), "body", sell_two).await?;
        assert_eq!((named.is_replayed(), named.into_inner()), (replayed, 2));
    }
    let reused = pool.sell(1).await.expect_err("another body");
    assert!(matches!(reused.downcast_ref(), Some(Error::KeyReused { .. })), "{reused}");
    Ok(())
}
