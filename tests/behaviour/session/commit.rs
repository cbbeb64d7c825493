//! The COMMIT of a consumer's own transaction: it says `Ok` only where something was saved.

use std::time::Duration;

use pg_idempotency::mark::{Marked, mark};
use pg_idempotency::{Error, Key, Misuse, commit};
use rig::gate::cancel_after;
use rig::proxy::Proxy;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};

use crate::support::{connect, create_effects, create_open_effects, effects, key, leave_effect, records, setting};

const WINDOW: Duration = Duration::from_secs(3600);

/// An event that comes for the first time is marked and processed.
async fn process(conn: &mut PgConnection, event: &Key) -> Result<(), Error> {
    assert_eq!(mark(conn, event, WINDOW).await?, Marked::First);
    leave_effect(conn, "processed").await?;
    Ok(())
}

/// In no transaction, for sqlx and for the server.
async fn assert_idle(conn: &mut PgConnection) {
    assert!(!conn.is_in_transaction());
    conn.execute("savepoint none").await.expect_err("outside a transaction there is none");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_transaction_that_is_well_is_committed(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let mut tx = pool.begin().await?;
    process(&mut tx, &key("pooled")).await?;
    commit(tx).await?;
    let mut conn = connect(&pool).await;
    let mut tx = conn.begin().await?;
    process(&mut tx, &key("borrowed")).await?;
    commit(tx).await?;
    assert_idle(&mut conn).await;
    commit(conn.begin().await?).await?;
    assert_idle(&mut conn).await;
    assert_eq!((effects(&pool).await, records(&pool).await), (2, 2));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_aborted_transaction_is_not_committed(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let swallowing = async |tx: &mut PgConnection| -> Result<(), Error> {
        process(tx, &key("a")).await?;
        tx.execute("select 1 / 0").await.expect_err("swallowed");
        Ok(())
    };
    let mut tx = pool.begin().await?;
    swallowing(&mut tx).await?;
    tx.commit().await.expect("what sqlx says");
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0), "and what it has saved");

    let mut conn = connect(&pool).await;
    let mut tx = conn.begin().await?;
    swallowing(&mut tx).await?;
    let error = commit(tx).await.expect_err("aborted");
    assert!(matches!(error, Error::Misuse(Misuse::TransactionAborted(_))), "{error:?}");
    assert!(!error.is_transient());
    assert_idle(&mut conn).await;
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    let mut tx = conn.begin().await?;
    process(&mut tx, &key("a")).await.expect("delivered again");
    commit(tx).await?;
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_transaction_that_has_ended_is_not_committed(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    for raw in ["commit", "rollback"] {
        let mut conn = connect(&pool).await;
        let mut tx = conn.begin().await?;
        tx.execute(raw).await?;
        leave_effect(&mut tx, "in autocommit").await?;
        let error = commit(tx).await.expect_err("ended");
        assert!(matches!(error, Error::Misuse(Misuse::NotInTransaction)), "{raw}: {error:?}");
        assert_idle(&mut conn).await;
    }
    // sqlx rolls back the transaction around a `begin` that is dropped while it waits.
    let mut conn = connect(&pool).await;
    let mut tx = conn.begin().await?;
    process(&mut tx, &key("a")).await?;
    // The answer to the sleep comes first, so the begin waits for sure.
    cancel_after(1, tx.execute("select pg_sleep(0.02)")).await;
    assert!(cancel_after(1, tx.begin()).await.is_none());
    leave_effect(&mut tx, "in autocommit").await?;
    let error = commit(tx).await.expect_err("ended");
    assert!(matches!(error, Error::Misuse(Misuse::NotInTransaction)), "{error:?}");
    assert_idle(&mut conn).await;
    assert_eq!((effects(&pool).await, records(&pool).await), (3, 0));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_of_the_commit_itself_comes_back(pool: PgPool) -> anyhow::Result<()> {
    pool.execute("create table deferred (n int unique deferrable initially deferred)").await?;
    let mut tx = pool.begin().await?;
    tx.execute("insert into deferred values (1), (1)").await?;
    let error = commit(tx).await.expect_err("a deferred constraint");
    let Error::Database(cause) = &error else { panic!("{error:?}") };
    assert_eq!(cause.as_database_error().and_then(|error| error.code()).as_deref(), Some("23505"));

    // Two that read what the other writes.
    let serializable = "begin isolation level serializable";
    let (mut one, mut two) = (pool.begin_with(serializable).await?, pool.begin_with(serializable).await?);
    for (tx, n) in [(&mut one, 1), (&mut two, 2)] {
        tx.execute("select * from deferred").await?;
        sqlx::query("insert into deferred values ($1)").bind(n).execute(&mut **tx).await?;
    }
    commit(one).await?;
    let error = commit(two).await.expect_err("write skew");
    assert!(matches!(error, Error::Retryable(_)), "{error:?}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_nested_transaction_is_refused_and_the_outer_one_is_over(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let mut tx = pool.begin().await?;
    process(&mut tx, &key("outer")).await?;
    let mut nested = tx.begin().await?;
    process(&mut nested, &key("nested")).await?;
    let error = commit(nested).await.expect_err("a savepoint");
    assert!(matches!(error, Error::Misuse(Misuse::NestedTransaction)), "{error:?}");
    assert_idle(&mut tx).await;
    let error = commit(tx).await.expect_err("over");
    assert!(matches!(error, Error::Misuse(Misuse::NotInTransaction)), "{error:?}");
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_commit_can_be_dropped_at_every_poll(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let mut conn = connect(&pool).await;
    for polls in 0..100 {
        let event = key(&polls.to_string());
        let mut tx = conn.begin().await?;
        process(&mut tx, &event).await?;
        let committed = cancel_after(polls, commit(tx)).await.transpose()?.is_some();
        assert_idle(&mut conn).await;
        assert_eq!(effects(&pool).await, records(&pool).await, "both, or neither, after {polls} polls");
        if committed {
            return Ok(());
        }
    }
    panic!("it never completed");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_checked_commit_takes_one_round_trip_more_and_changes_no_setting(pool: PgPool) -> anyhow::Result<()> {
    let proxy = Proxy::before(&pool.connect_options()).await?;
    let mut conn = PgConnection::connect_with(&proxy.options).await?;
    let tx = conn.begin().await?;
    proxy.take();
    tx.commit().await?;
    assert_eq!(proxy.take(), 1);
    let tx = conn.begin().await?;
    proxy.take();
    commit(tx).await?;
    assert_eq!(proxy.take(), 2);
    assert_eq!(setting(&mut conn, "lock_timeout").await, "0");
    Ok(())
}
