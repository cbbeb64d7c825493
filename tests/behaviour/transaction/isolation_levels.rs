//! The levels above READ COMMITTED, without a wait. The interleavings have the orders at repeatable read.

use pg_idempotency::{Error, ensure_idempotent};
use sqlx::{Connection as _, Executor as _, PgPool};

use crate::support::{connect, create_effects, effects, key, leave_effect, once};

const LEVELS: [&str; 2] = ["begin isolation level repeatable read", "begin isolation level serializable"];

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "a worker's snapshot begins with its first statement: it replays")]
async fn a_record_committed_after_the_snapshot_is_retryable(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for level in LEVELS {
        let mut conn = connect(&pool).await;
        let mut tx = conn.begin_with(level).await?;
        tx.execute("select count(*) from effect").await?;
        let _ = once(&pool, &key(level), "body").await?;
        let error = ensure_idempotent(&mut tx, &key(level), "body", async |conn| leave_effect(conn, "second").await)
            .await
            .expect_err("40001");
        assert!(matches!(error, Error::Retryable(_)), "{level}: {error:?}");
        tx.rollback().await?;
        let mut tx = conn.begin_with(level).await?;
        let outcome =
            ensure_idempotent(&mut tx, &key(level), "body", async |conn| leave_effect(conn, "no").await).await?;
        assert!(outcome.is_replayed(), "{level}: the whole transaction again");
        tx.commit().await?;
    }
    assert_eq!(effects(&pool).await, 2);
    Ok(())
}
