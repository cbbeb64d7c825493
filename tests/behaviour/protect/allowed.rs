//! Writes to a protected table that are inside an idempotent operation, or exempt: no door gives a false alarm.

use std::time::Duration;

use pg_idempotency::lease::LeaseOptions;
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{Error, Idempotency, Verdict};
use rig::lease::IN_STEPS;
use sqlx::{Acquire as _, Executor as _, PgConnection, PgPool};

use super::refused::{assert_refused, create_orders, orders, place};
use crate::support::key;

const WINDOW: Duration = Duration::from_secs(300);

/// Before the same calls again: each record can be taken over.
async fn expire(pool: &PgPool) -> anyhow::Result<()> {
    pool.execute("update idempotency.record set expires_at = statement_timestamp()").await?;
    pool.execute("begin; set local idempotency.claim = 'exempt'; truncate orders cascade; commit").await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_door_lets_its_call_write(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    let perform = async |conn: &mut PgConnection| -> Result<i32, Error> {
        let mut savepoint = conn.begin().await?;
        place(&mut *savepoint, 1).await?;
        savepoint.rollback().await?;
        Ok(place(conn, 1).await?)
    };
    let kept = async |conn: &mut PgConnection| perform(conn).await.map(Verdict::Keep);
    let way = Idempotency::new();
    // The second time each call takes an expired record over.
    for _ in 0..2 {
        assert!(!way.run(&pool, &key("run"), "body", perform).await?.is_replayed());
        expire(&pool).await?;
        let mut tx = pool.begin().await?;
        assert!(!way.ensure(&mut tx, &key("ensure"), "body", perform).await?.is_replayed());
        // The unit is the transaction: it may go on writing.
        place(&mut *tx, 2).await?;
        tx.commit().await?;
        assert_eq!(orders(&pool).await, [1, 2], "{way:?}");
        expire(&pool).await?;
        let mut tx = pool.begin().await?;
        assert!(!way.ensure_isolated(&mut tx, &key("ensure isolated"), "body", kept).await?.is_replayed());
        tx.commit().await?;
        expire(&pool).await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn marks_let_their_transaction_write(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    let keys = [key("many 1"), key("many 2")];
    let marking = MarkOptions::new(WINDOW);
    for _ in 0..2 {
        let mut tx = pool.begin().await?;
        assert_eq!(marking.mark(&mut tx, &key("one")).await?, Marked::First);
        place(&mut *tx, 1).await?;
        tx.commit().await?;
        let mut tx = pool.begin().await?;
        assert_eq!(marking.mark_many(&mut tx, &keys).await?, [Marked::First; 2]);
        place(&mut *tx, 2).await?;
        tx.commit().await?;
        assert_eq!(orders(&pool).await, [1, 2]);
        expire(&pool).await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_writes_and_a_step_that_marks_is_stored(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    let leasing = LeaseOptions::new(IN_STEPS);
    let marking = MarkOptions::new(WINDOW);
    let key_of_call = key("a");
    let working = leasing.run(&pool, &key_of_call, "body", async |lease| {
        lease.step("order", async |conn| Ok::<_, Error>(place(conn, 1).await?)).await?;
        let step = lease.step("event", async |conn| -> Result<_, Error> {
            assert_eq!(marking.mark(conn, &key("event")).await?, Marked::First);
            Ok(place(conn, 2).await?)
        });
        step.await
    });
    assert_eq!(working.await?.into_inner(), 2);
    assert_eq!(orders(&pool).await, [1, 2]);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_transaction_or_a_session_that_is_exempt_writes(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    let mut tx = pool.begin().await?;
    tx.execute("set local idempotency.claim = 'exempt'").await?;
    place(&mut *tx, 1).await?;
    // It may make a call, too.
    let perform = async |conn: &mut PgConnection| Ok::<_, Error>(place(conn, 2).await?);
    let _ = Idempotency::new().ensure(&mut tx, &key("a"), "body", perform).await?;
    tx.commit().await?;
    let mut conn = pool.acquire().await?.detach();
    assert_refused(place(&mut conn, 3).await);

    // As `PGOPTIONS='-c idempotency.claim=exempt'` and `alter role … set`: for a restore, and the role of migrations.
    conn.execute("set idempotency.claim = 'exempt'").await?;
    place(&mut conn, 3).await?;
    let mut copy = conn.copy_in_raw("copy orders from stdin").await?;
    copy.send(&b"4\ttea\n"[..]).await?;
    copy.finish().await?;
    assert_eq!(orders(&pool).await, [1, 2, 3, 4]);
    Ok(())
}

/// The worker of a logical replication applies changes in this role.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_replication_writes(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    let mut conn = pool.acquire().await?.detach();
    conn.execute("set session_replication_role = replica").await?;
    place(&mut conn, 1).await?;
    let mut copy = conn.copy_in_raw("copy orders from stdin").await?;
    copy.send(&b"2\ttea\n"[..]).await?;
    copy.finish().await?;
    conn.execute("set session_replication_role = origin").await?;
    assert_refused(place(&mut conn, 3).await);
    Ok(())
}
