//! What `perform` can do wrong, and what is left of it.

use std::time::Duration;

use pg_idempotency::{Error, Idempotency, Misuse, ensure_idempotent};
use rig::gate::cancel_after;
use sqlx::{Executor as _, PgConnection, PgPool};
use tokio::time::timeout;

use crate::support::{clear, connect, create_effects, create_open_effects, effects, key, leave_effect, once, records};

#[derive(Debug, thiserror::Error)]
enum Declined {
    #[error("insufficient funds")]
    Funds,
    #[error(transparent)]
    Idempotency(#[from] Error),
}

/// A panic stays a panic for the caller.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_or_a_panic_of_perform_leaves_no_trace(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for panics in [false, true] {
        clear(&pool).await;
        let call = tokio::spawn({
            let pool = pool.clone();
            async move {
                Idempotency::new()
                    .run(&pool, &key("a"), "body", async |conn| -> Result<i64, Declined> {
                        leave_effect(conn, "undone").await?;
                        assert!(!panics, "on purpose");
                        Err(Declined::Funds)
                    })
                    .await
            }
        });
        match call.await {
            Ok(failed) => assert!(!panics && matches!(failed, Err(Declined::Funds)), "{failed:?}"),
            Err(panicked) => assert!(panics && panicked.is_panic(), "{panicked:?}"),
        }
        let again = once(&pool, &key("a"), "another body").await?;
        assert!(!again.is_replayed(), "the key is free, for a corrected body too");
        assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_swallowed_sql_error_is_not_acknowledged(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let mut tx = pool.begin().await?;
    let error = ensure_idempotent(&mut tx, &key("a"), "body", async |conn| {
        let id = leave_effect(conn, "lost").await?;
        let _ = conn.execute("select 1 / 0").await;
        Ok::<_, Error>(id)
    })
    .await
    .expect_err("the transaction is aborted");
    assert!(matches!(error, Error::Misuse(Misuse::TransactionAborted(_))), "{error:?}");
    tx.commit().await?;
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0), "that COMMIT was a ROLLBACK");
    Ok(())
}

/// sqlx 0.9 answers it by rolling back the outer transaction.
const DROPPED_BEGIN: &str = "a nested begin that is dropped";

/// How `perform` ends the claim's transaction, and the effects that stay: after a COMMIT, the key is indeterminate.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_transaction_that_perform_ends_is_never_acknowledged(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    // Without a new BEGIN, the effect after the end is in autocommit, and stays.
    let endings = [("commit", 2), ("commit; begin", 1), ("rollback", 1), ("rollback; begin", 0), (DROPPED_BEGIN, 1)];
    for (ending, stay) in endings {
        clear(&pool).await;
        let error = Idempotency::new()
            .run(&pool, &key("a"), "body", async |conn| {
                leave_effect(&mut *conn, "before").await?;
                if ending == DROPPED_BEGIN {
                    // The answer to the sleep comes first, so the begin waits for sure.
                    cancel_after(1, conn.execute("select pg_sleep(0.2)")).await;
                    assert!(cancel_after(1, sqlx::Connection::begin(&mut *conn)).await.is_none());
                } else {
                    conn.execute(ending).await?;
                }
                leave_effect(conn, "after").await
            })
            .await
            .expect_err("the claim's transaction is gone");
        assert!(matches!(error, Error::Misuse(Misuse::NotInTransaction)), "{ending}: {error:?}");
        assert_eq!(effects(&pool).await, stay, "{ending}");
        let again = once(&pool, &key("a"), "body").await;
        if ending.starts_with("commit") {
            assert!(matches!(again, Err(Error::Indeterminate { attempt: 1, .. })), "{ending}: {again:?}");
        } else {
            assert!(!again?.is_replayed(), "{ending}");
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_same_key_inside_perform_is_refused(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let error = Idempotency::new()
        .run(&pool, &key("a"), "body", async |conn| {
            leave_effect(&mut *conn, "outer").await?;
            let key = key("a");
            let inner = ensure_idempotent(conn, &key, "body", async |conn| leave_effect(conn, "inner").await);
            Ok::<_, Error>(Box::pin(inner).await?.into_inner())
        })
        .await
        .expect_err("it calls itself");
    assert!(matches!(error, Error::Misuse(Misuse::AlreadyInTransaction)), "{error:?}");
    assert_eq!(effects(&pool).await, 0);
    Ok(())
}

/// The server waits for the data of the copy, and sqlx for the server.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_raw_copy_whose_future_is_dropped_holds_the_call_and_leaves_nothing(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let copies = async |conn: &mut PgConnection| {
        // The answer to the sleep comes first, so the copy is dropped without an answer.
        assert!(cancel_after(1, conn.execute("select pg_sleep(0.5); copy effect (note) from stdin")).await.is_none());
        Ok::<_, Error>(1)
    };
    let (way, key) = (Idempotency::new(), key("a"));
    let held = timeout(Duration::from_secs(2), way.run(&pool, &key, "body", copies)).await;
    assert!(held.is_err(), "the call ended: {held:?}; the documentation of `ensure_idempotent` says that it waits");
    let others = "select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()";
    sqlx::query(others).execute(&mut connect(&pool).await).await?;
    assert!(!once(&pool, &key, "body").await?.is_replayed());
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
    Ok(())
}

/// The ROLLBACK also undoes the claim, so no record remains beside a later effect. A protected table refuses this
/// effect.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_rollback_to_an_older_savepoint_inside_perform_is_never_acknowledged(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    let mut tx = pool.begin().await?;
    tx.execute("savepoint older").await?;
    let perform = async |conn: &mut PgConnection| {
        conn.execute("rollback to savepoint older").await?;
        leave_effect(conn, "after").await
    };
    let ended = ensure_idempotent(&mut tx, &key("a"), "body", perform).await;
    assert!(matches!(ended, Err(Error::Misuse(Misuse::NotInTransaction))), "{ended:?}");
    tx.rollback().await?;
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    assert!(!once(&pool, &key("a"), "body").await?.is_replayed());
    Ok(())
}

/// The guide forbids such triggers.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn with_a_row_trigger_that_changes_a_column_no_call_succeeds(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let rounds = "
        create function rounds() returns trigger language plpgsql as $$
        begin
            new.claimed_at := pg_catalog.date_trunc('second', new.claimed_at) - interval '1 s';
            return new;
        end $$;
        create trigger rounds before insert on idempotency.record for each row execute function rounds()";
    pool.execute(rounds).await?;
    for _ in 0..2 {
        let refused = once(&pool, &key("a"), "body").await;
        assert!(matches!(refused, Err(Error::Misuse(Misuse::NotInTransaction))), "{refused:?}");
        assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    }
    Ok(())
}
