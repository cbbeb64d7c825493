//! The owner of a transaction: the caller, the crate, or unknown.

use std::time::Duration;

use pg_idempotency::{Error, Idempotency, Misuse, Verdict, ensure_idempotent};
use rig::database::backend;
use rig::fixture::Fixture;
use rig::gate::cancel_after;
use rig::proxy::Proxy;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, Executor as _, PgPool};

use crate::support::{
    clear, connect, create_effects, create_open_effects, effects, key, leave_effect, once, options, pool_of, records,
    setting, until,
};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_connection_in_no_transaction_that_sqlx_counts_is_refused(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    let mut conn = connect(&pool).await;
    for raw in [false, true] {
        if raw {
            conn.execute("begin").await?;
            leave_effect(&mut conn, "the caller's").await?;
        }
        let key = key("a");
        let plain = ensure_idempotent(&mut conn, &key, "body", async |_| -> Result<i64, Error> { panic!() }).await;
        assert!(matches!(plain, Err(Error::Misuse(Misuse::NotInTransaction))), "{plain:?}");
        let isolated = Idempotency::new()
            .ensure_isolated(&mut conn, &key, "body", async |_| -> Result<Verdict<i64>, Error> { panic!() })
            .await;
        assert!(matches!(isolated, Err(Error::Misuse(Misuse::NotInTransaction))), "{isolated:?}");
    }
    conn.execute("commit").await?;
    assert_eq!(effects(&pool).await, 1, "the caller's own transaction was left alone");
    assert!(!once(&pool, &key("a"), "body").await?.is_replayed(), "nothing was claimed");
    Ok(())
}

/// The forgotten transaction is a raw BEGIN, usable or aborted, one that sqlx counts, or four of them.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn run_rolls_back_a_foreign_transaction(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(1, &pool.connect_options()).await;
    create_open_effects(&pool).await;
    for replay_first in [false, true] {
        let way = Idempotency::new().replay_first(replay_first);
        for leak in ["begin", "begin; select 1 / 0", "one guard", "four guards"] {
            clear(&pool).await;
            let leaked = {
                let mut conn = pool.acquire().await?;
                let leaked = backend(&mut conn).await?;
                match leak {
                    "one guard" => std::mem::forget(conn.begin().await?),
                    "four guards" => {
                        for _ in 0..4 {
                            std::mem::forget(conn.begin().await?);
                        }
                    }
                    raw => drop(conn.execute(raw).await),
                }
                let _ = leave_effect(&mut conn, "leaked").await;
                // A look must not trust what an open transaction may still undo.
                let _ = Fixture::completed(&key("a"), "body", &1)?.write(&mut *conn).await;
                leaked
            };
            let outcome = way.run(&pool, &key("a"), "body", async |conn| leave_effect(conn, "body").await).await?;
            assert!(!outcome.is_replayed());
            let mut conn = pool.acquire().await?;
            assert_eq!(backend(&mut conn).await?, leaked, "{way:?}, {leak}: the connection is kept");
            let notes: Vec<String> = sqlx::query_scalar("select note from effect").fetch_all(&mut *conn).await?;
            assert_eq!(notes, ["body"], "{way:?}, {leak}: the leaked transaction was not committed");
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_at_commit_reaches_the_caller_and_stores_nothing(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    sqlx::raw_sql("create table once (id int unique deferrable initially deferred); insert into once values (1)")
        .execute(&pool)
        .await?;
    let error = Idempotency::new()
        .run(&pool, &key("a"), "body", async |conn| -> Result<i64, Error> {
            sqlx::query("insert into once values (1)").execute(conn).await?;
            Ok(1)
        })
        .await
        .expect_err("the deferred constraint");
    let Error::Database(sqlx::Error::Database(cause)) = error else { panic!("{error:?}") };
    assert_eq!(cause.code().as_deref(), Some("23505"));
    assert_eq!(records(&pool).await, 0);
    Ok(())
}

/// A statement of a dropped call fails later. The pool reads its error, so no later call takes it for its own.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_of_a_dropped_call_reaches_no_other_call(other: PgPool) -> anyhow::Result<()> {
    let pool = PgPoolOptions::new().max_connections(1).test_before_acquire(false).connect_with(options(&other)).await?;
    create_open_effects(&other).await;
    for sleeps in 1..=3 {
        let key_a = key(&format!("dropped {sleeps}"));
        let call = Idempotency::new().run(&pool, &key_a, "body", async |conn| -> Result<i64, Error> {
            conn.execute("select 1 / (pg_sleep(0.2) is null)::int").await?;
            Ok(1)
        });
        tokio::time::timeout(Duration::from_millis(100), call).await.expect_err("it sleeps");
        let key_b = key(&format!("next {sleeps}"));
        let outcome =
            Idempotency::new().run(&pool, &key_b, "body", async |conn| leave_effect(conn, "next").await).await?;
        assert!(!outcome.is_replayed());
        leave_effect(&mut *pool.acquire().await?, "in autocommit").await?;
        assert_eq!(effects(&other).await, 2 * sleeps, "both are there for others to see");
    }
    Ok(())
}

/// A forgotten guard whose transaction has written nothing: no look happens in it, and the end of a replay does not
/// commit it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_replay_leaves_the_transaction_of_a_forgotten_guard_without_effect(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(1, &pool.connect_options()).await;
    create_effects(&pool).await;
    assert!(!once(&pool, &key("a"), "body").await?.is_replayed());
    for replay_first in [false, true] {
        let way = Idempotency::new().replay_first(replay_first);
        for guards in [1, 2] {
            let mut conn = pool.acquire().await?;
            for _ in 0..guards {
                std::mem::forget(conn.begin().await?);
            }
            conn.execute("set application_name = 'foreign'").await?;
            drop(conn);
            let key = key("a");
            let replay = way.run(&pool, &key, "body", async |_| -> Result<i64, Error> { panic!("performed") });
            assert!(replay.await?.is_replayed());
            let mut conn = pool.acquire().await?;
            assert!(!conn.is_in_transaction());
            assert_ne!(setting(&mut conn, "application_name").await, "foreign", "{way:?}, {guards}");
        }
    }
    Ok(())
}

/// The ROLLBACK of a call is cancelled. sqlx then counts no transaction, and the one of the server is open and
/// aborted. The call may also be dropped meanwhile, at any poll.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_rollback_that_is_cancelled_leaves_the_pool_a_connection_that_is_fit_for_use(
    direct: PgPool,
) -> anyhow::Result<()> {
    let proxy = Proxy::before(&direct.connect_options()).await?;
    let pool = pool_of(1, &proxy.options).await;
    // The last polls first: later calls need fewer, because their statements are prepared.
    for polls in (0..20).rev() {
        let before = backend(&mut *pool.acquire().await?).await?;
        proxy.spoil_rollback();
        let key = key("a");
        let failing = Idempotency::new().run(&pool, &key, "body", async |conn| {
            conn.execute("select 1 / 0").await?;
            Ok::<_, Error>(1)
        });
        let failed = cancel_after(polls, failing).await;
        let mut tx = pool.begin().await?;
        if let Some(failed) = failed {
            failed.expect_err("it divides by zero");
            assert_eq!(backend(&mut tx).await?, before, "the same connection");
        } else {
            assert!(polls < 19, "a call needs fewer polls");
        }
        tx.commit().await?;
    }
    Ok(())
}

/// The server ends the session of a duplicate that waits too long. A retry gets the answer.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_transaction_timeout_ends_the_wait_of_a_duplicate(pool: PgPool) -> anyhow::Result<()> {
    let version: i32 = sqlx::query_scalar("select current_setting('server_version_num')::int").fetch_one(&pool).await?;
    if version < 170_000 {
        return Ok(());
    }
    create_effects(&pool).await;
    let mut first = pool.begin().await?;
    let key = key("a");
    let performed = ensure_idempotent(&mut first, &key, "body", async |conn| leave_effect(conn, "first").await);
    assert!(!performed.await?.is_replayed());
    let limited = pool_of(1, &options(&pool).options([("transaction_timeout", "50ms")])).await;
    let ended = once(&limited, &key, "body").await.expect_err("the wait is longer");
    assert!(ended.is_transient(), "{ended:?}");
    first.commit().await?;
    assert!(once(&limited, &key, "body").await?.is_replayed());
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
    Ok(())
}

/// While the thread is blocked, the runtime does not poll the task that returns the connection to the pool.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_replay_ends_its_transaction_although_nothing_polls_the_runtime(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    assert!(!once(&pool, &key("a"), "body").await?.is_replayed());
    let of_observer = options(&pool);
    assert!(once(&pool, &key("a"), "body").await?.is_replayed());
    let observer = std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(async {
            let observer = pool_of(1, &of_observer).await;
            let ended = "select count(*) = 0 from pg_stat_activity
                where datname = current_database() and state like 'idle in transaction%'";
            until(&observer, ended).await;
            observer.close().await;
        });
    });
    observer.join().expect("no open transaction");
    Ok(())
}
