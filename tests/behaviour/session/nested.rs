//! A nested transaction whose guard is forgotten. sqlx would end the nested transaction instead of the one around it.
//! So nothing is acknowledged, and the pool gets a connection on which nothing is open.

use std::mem::forget;
use std::time::Duration;

use pg_idempotency::{Error, Idempotency, Misuse, Verdict, commit, ensure_idempotent};
use rig::gate::{PATIENCE, cancel_after};
use sqlx::{Connection as _, PgConnection, PgPool};

use crate::support::{clear, create_effects, create_open_effects, effects, key, leave_effect, pool_of, records};

/// Leaves an effect in a nested transaction, and forgets the guard of that one and of another in it.
async fn leave_effect_and_forget(conn: &mut PgConnection) -> Result<(), Error> {
    let mut nested = conn.begin().await?;
    leave_effect(&mut nested, "nested").await?;
    forget(nested.begin().await?);
    forget(nested);
    Ok(())
}

/// The next caller that gets the connection writes in autocommit, and other connections see the write.
async fn assert_the_next_caller_is_alone(pool: &PgPool, other: &PgPool, expected: i64) -> anyhow::Result<()> {
    let mut conn = pool.acquire().await?;
    assert!(!conn.is_in_transaction());
    leave_effect(&mut conn, "the next caller's").await?;
    assert_eq!(effects(other).await, expected + 1, "in autocommit");
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum End {
    Success,
    Error,
    Dropped,
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_call_on_a_pool_acknowledges_nothing_and_returns_a_clean_connection(other: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(1, &other.connect_options()).await;
    create_open_effects(&other).await;
    for end in [End::Success, End::Error, End::Dropped] {
        clear(&other).await;
        let perform = async |conn: &mut PgConnection| {
            leave_effect_and_forget(conn).await?;
            match end {
                End::Success => Ok("x".repeat(20_000)),
                End::Error => Err(Error::LeaseLost),
                End::Dropped => std::future::pending().await,
            }
        };
        let limit = if matches!(end, End::Dropped) { Duration::from_millis(300) } else { PATIENCE };
        let called = tokio::time::timeout(limit, Idempotency::new().run(&pool, &key("a"), "body", perform)).await;
        match (end, called) {
            (End::Success, Ok(Err(Error::Misuse(Misuse::NestedTransaction))))
            | (End::Error, Ok(Err(Error::LeaseLost)))
            | (End::Dropped, Err(_)) => {}
            (_, other) => panic!("{end:?}: {other:?}"),
        }
        assert_the_next_caller_is_alone(&pool, &other, 0).await?;
        assert_eq!(records(&other).await, 0);
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_call_in_the_callers_transaction_undoes_the_nested_one_so_that_the_caller_can_end_it(
    other: PgPool,
) -> anyhow::Result<()> {
    let pool = pool_of(1, &other.connect_options()).await;
    create_open_effects(&other).await;
    for end in [End::Success, End::Error] {
        for committed in [false, true] {
            clear(&other).await;
            let mut tx = pool.begin().await?;
            leave_effect(&mut tx, "the caller's").await?;
            let perform = async |conn: &mut PgConnection| {
                leave_effect_and_forget(conn).await?;
                if matches!(end, End::Error) { Err(Error::LeaseLost) } else { Ok(1) }
            };
            let error = ensure_idempotent(&mut tx, &key("a"), "body", perform).await.expect_err("forgotten");
            match end {
                End::Error => assert!(matches!(error, Error::LeaseLost), "{error:?}"),
                _ => assert!(matches!(error, Error::Misuse(Misuse::NestedTransaction)), "{error:?}"),
            }
            if committed {
                tx.commit().await?;
                // As after any error: the key is left indeterminate, and nothing is performed again.
                assert_eq!((effects(&other).await, records(&other).await), (1, 1));
            } else {
                tx.rollback().await?;
                assert_eq!((effects(&other).await, records(&other).await), (0, 0));
            }
            assert_the_next_caller_is_alone(&pool, &other, i64::from(committed)).await?;
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_isolated_call_releases_the_key_and_leaves_the_callers_transaction_usable(
    other: PgPool,
) -> anyhow::Result<()> {
    let pool = pool_of(1, &other.connect_options()).await;
    create_open_effects(&other).await;
    let mut tx = pool.begin().await?;
    let perform = async |conn: &mut PgConnection| {
        leave_effect_and_forget(conn).await?;
        Ok(Verdict::Keep(1))
    };
    let error = Idempotency::new().ensure_isolated(&mut tx, &key("a"), "body", perform).await.expect_err("forgotten");
    assert!(matches!(error, Error::Misuse(Misuse::NestedTransaction)), "{error:?}");
    let perform = async |conn: &mut PgConnection| leave_effect(conn, "again").await.map(Verdict::Keep);
    assert!(!Idempotency::new().ensure_isolated(&mut tx, &key("a"), "body", perform).await?.is_replayed());
    commit(tx).await?;
    assert_eq!((effects(&other).await, records(&other).await), (1, 1));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_nested_transaction_that_is_committed_is_a_part_of_the_call(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let perform = async |conn: &mut PgConnection| {
        let mut nested = conn.begin().await?;
        leave_effect(&mut nested, "nested").await?;
        nested.commit().await?;
        leave_effect(conn, "after").await
    };
    assert!(!Idempotency::new().run(&pool, &key("a"), "body", perform).await?.is_replayed());
    assert_eq!((effects(&pool).await, records(&pool).await), (2, 1));
    let mut tx = pool.begin().await?;
    let mut savepoint = tx.begin().await?;
    assert!(!Idempotency::new().ensure(&mut savepoint, &key("b"), "body", perform).await?.is_replayed());
    savepoint.commit().await?;
    let mut savepoint = tx.begin().await?;
    assert!(!Idempotency::new().ensure(&mut savepoint, &key("undone"), "body", perform).await?.is_replayed());
    savepoint.rollback().await?;
    commit(tx).await?;
    assert_eq!((effects(&pool).await, records(&pool).await), (4, 2));
    Ok(())
}

/// Before the first poll it has begun nothing, and sqlx's own guard ends one of the transactions.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_commit_with_a_forgotten_guard_rolls_everything_back_also_if_it_is_dropped(
    other: PgPool,
) -> anyhow::Result<()> {
    let pool = pool_of(1, &other.connect_options()).await;
    create_open_effects(&other).await;
    for polls in 1..100 {
        clear(&other).await;
        let mut tx = pool.begin().await?;
        leave_effect(&mut tx, "the caller's").await?;
        leave_effect_and_forget(&mut tx).await?;
        let committed = cancel_after(polls, commit(tx)).await;
        assert_the_next_caller_is_alone(&pool, &other, 0).await?;
        if let Some(committed) = committed {
            let error = committed.expect_err("refused");
            assert!(matches!(error, Error::Misuse(Misuse::NestedTransaction)), "{error:?}");
            return Ok(());
        }
    }
    panic!("it never completed");
}
