//! `ensure_isolated`: perform behind a savepoint.

use pg_idempotency::operator::State;
use pg_idempotency::{Error, Idempotency, Misuse, Verdict, ensure_idempotent};
use rig::gate::cancel_after;
use sqlx::{Executor as _, PgPool};

use crate::support::{create_effects, create_open_effects, effects, key, leave_effect, once, recorded};

#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("on purpose")]
    OnPurpose,
    #[error(transparent)]
    Idempotency(#[from] Error),
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn undo_stores_the_response_without_the_writes(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    for replayed in [false, true] {
        let mut tx = pool.begin().await?;
        let perform = async |conn: &mut sqlx::PgConnection| -> Result<_, Error> {
            leave_effect(conn, "undone").await?;
            Ok(Verdict::Undo("declined".to_owned()))
        };
        let outcome = Idempotency::new().ensure_isolated(&mut tx, &key("a"), "body", perform).await?;
        leave_effect(&mut tx, "the caller's own").await?;
        tx.commit().await?;
        assert_eq!((outcome.is_replayed(), &*outcome.into_inner()), (replayed, "declined"));
    }
    assert_eq!(effects(&pool).await, 2);
    Ok(())
}

/// Also one that comes from an aborted transaction, and one that `perform` swallows.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_leaves_the_transaction_usable_and_the_key_released(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    for swallowed in [false, true] {
        let key = key(&swallowed.to_string());
        let mut tx = pool.begin().await?;
        let error = Idempotency::new()
            .ensure_isolated(&mut tx, &key, "body", async |conn| -> Result<Verdict<i64>, Failed> {
                leave_effect(&mut *conn, "undone").await?;
                conn.execute("select 1 / 0").await.expect_err("it aborts the transaction");
                if swallowed { Ok(Verdict::Keep(1)) } else { Err(Failed::OnPurpose) }
            })
            .await
            .expect_err("an error");
        assert_eq!(
            matches!(error, Failed::Idempotency(Error::Misuse(Misuse::TransactionAborted(_)))),
            swallowed,
            "{error:?}"
        );
        leave_effect(&mut tx, "the caller's own").await?;
        tx.commit().await?;
        let shown = pg_idempotency::operator::show(&pool, &key).await?.expect("a record");
        assert_eq!((shown.state, shown.attempt), (State::Released, 1), "{swallowed}");
        assert!(!once(&pool, &key, "body").await?.is_replayed(), "released: the next caller performs");
        let attempt = pg_idempotency::operator::show(&pool, &key).await?.expect("a record").attempt;
        assert_eq!(attempt, 2, "{swallowed}");
    }
    assert_eq!(effects(&pool).await, 4, "two of the caller's own, and two of the next callers'");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_released_key_can_be_claimed_again_in_the_same_transaction(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let mut tx = pool.begin().await?;
    Idempotency::new()
        .ensure_isolated(&mut tx, &key("a"), "body", async |_| -> Result<Verdict<i64>, Failed> {
            Err(Failed::OnPurpose)
        })
        .await
        .expect_err("on purpose");
    let outcome =
        ensure_idempotent(&mut tx, &key("a"), "another", async |conn| leave_effect(conn, "second").await).await?;
    tx.commit().await?;
    assert!(!outcome.is_replayed());
    let attempt: i32 = recorded(&pool, "attempt").await;
    assert_eq!(attempt, 1, "another request starts counting anew");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_commit_inside_perform_is_never_acknowledged(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for verdict in [Verdict::Keep(1), Verdict::Undo(1)] {
        let key = key(&format!("{verdict:?}"));
        let mut tx = pool.begin().await?;
        let error = Idempotency::new()
            .ensure_isolated(&mut tx, &key, "body", async |conn| -> Result<_, Error> {
                conn.execute("commit").await?;
                Ok(verdict)
            })
            .await
            .expect_err("the transaction is gone");
        assert!(matches!(error, Error::Misuse(Misuse::NotInTransaction)), "{error:?}");
        let error = once(&pool, &key, "body").await.expect_err("nobody knows");
        assert!(matches!(error, Error::Indeterminate { .. }), "{error:?}");
    }
    Ok(())
}

/// An inner call that is dropped leaves its savepoint behind: an undo of the outer one must not stop there.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_dropped_inner_call_does_not_catch_the_outer_undo(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for polls in 0..40 {
        let (outer, inner) = (key(&format!("outer {polls}")), key(&format!("inner {polls}")));
        let mut tx = pool.begin().await?;
        let result = Idempotency::new()
            .ensure_isolated(&mut tx, &outer, "body", async |conn| -> Result<Verdict<i64>, Failed> {
                leave_effect(&mut *conn, "undone").await?;
                let call =
                    Idempotency::new().ensure_isolated(&mut *conn, &inner, "body", async |conn| -> Result<_, Error> {
                        Ok(Verdict::Keep(leave_effect(conn, "undone too").await?))
                    });
                let _ = cancel_after(polls, Box::pin(call)).await;
                Err(Failed::OnPurpose)
            })
            .await;
        assert!(matches!(result, Err(Failed::OnPurpose)), "{polls} polls: {result:?}");
        tx.commit().await?;
        assert_eq!(effects(&pool).await, 0, "{polls} polls");
        let (released, records): (i64, i64) = sqlx::query_as(
            "select count(*) filter (where lease_until = '-infinity' and value like 'outer%'), count(*) from idempotency.record",
        )
        .fetch_one(&pool)
        .await?;
        assert_eq!((released, records), (polls as i64 + 1, polls as i64 + 1), "{polls} polls");
    }
    Ok(())
}

/// A statement that `perform` has dropped fails later, in the middle of our own: the undo must be tried again.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_stale_error_does_not_spoil_the_undo(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    let mut tx = pool.begin().await?;
    let result = Idempotency::new()
        .ensure_isolated(&mut tx, &key("a"), "body", async |conn| -> Result<Verdict<i64>, Failed> {
            leave_effect(&mut *conn, "undone").await?;
            let failing = conn.execute("select 1 / (pg_sleep(0.05) is null)::int");
            assert!(cancel_after(1, failing).await.is_none(), "it was under way");
            Err(Failed::OnPurpose)
        })
        .await;
    assert!(matches!(result, Err(Failed::OnPurpose)), "{result:?}");
    leave_effect(&mut tx, "the caller's own").await?;
    tx.commit().await?;
    let notes: Vec<String> = sqlx::query_scalar("select note from effect").fetch_all(&pool).await?;
    assert_eq!(notes, ["the caller's own"]);
    assert!(!once(&pool, &key("a"), "body").await?.is_replayed());
    Ok(())
}
