//! Transaction mode.

use std::time::{Duration, Instant};

use pg_idempotency::{Error, Verdict, testing};
use sqlx::postgres::PgDatabaseError;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};

use crate::{calls, citus, citus_alone, effect, effects, key, once, options, rejecting, waiting};

#[tokio::test]
async fn a_first_call_is_one_commit_on_one_shard() -> anyhow::Result<()> {
    let Some(citus) = citus_alone().await else { return Ok(()) };
    let mut conn = citus.pool.acquire().await?;
    let _ = calls().run(&citus.pool, &key("warm"), "body", async |_| Ok::<_, Error>(1)).await?;
    let two_phase = "select count(*) from pg_dist_transaction";
    let before: i64 = sqlx::query_scalar(two_phase).fetch_one(&mut *conn).await?;
    for _ in 0..10 {
        let key = key("one shard");
        let _ = calls()
            .run(&citus.pool, &key, "body", async |conn| {
                let count = effect(&mut *conn, &key).await?;
                let workers: i64 = sqlx::query_scalar(
                    "select count(distinct nodeid) from citus_dist_stat_activity where global_pid = citus_backend_gpid()
                        and not is_worker_query",
                )
                .fetch_one(conn)
                .await?;
                assert_eq!(workers, 1);
                Ok::<_, Error>(count)
            })
            .await?;
    }
    let after: i64 = sqlx::query_scalar(two_phase).fetch_one(&mut *conn).await?;
    assert_eq!(after, before, "no two-phase commit");
    Ok(())
}

#[tokio::test]
async fn a_replay_is_one_statement_on_a_worker() -> anyhow::Result<()> {
    let Some(citus) = citus_alone().await else { return Ok(()) };
    let mut conn = citus.pool.acquire().await?;
    conn.execute("set citus.enable_stat_counters = on").await?;
    let key = key("counted");
    // A first call: the look, the claim and the completion.
    for expected in [3, 1, 1] {
        let before = statements_of_one_shard(&mut conn).await?;
        let mut tx = conn.begin().await?;
        let _ = calls().ensure(&mut tx, &key, "body", async |_| Ok::<_, Error>(1)).await?;
        tx.commit().await?;
        assert_eq!(statements_of_one_shard(&mut conn).await? - before, expected);
    }
    Ok(())
}

async fn statements_of_one_shard(conn: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar("select query_execution_single_shard from citus_stat_counters where name = current_database()")
        .fetch_one(conn)
        .await
}

/// A sweep or an operator locks a row without the key's lock.
#[tokio::test]
async fn a_row_that_is_locked_on_a_worker_is_waited_for_with_a_bound() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    let key = key("locked row");
    assert!(!once(&citus.pool, &key, "first").await?.is_replayed());
    testing::expire(&citus.pool, &key).await?;
    let mut locker = citus.pool.begin().await?;
    sqlx::query("update idempotency.record set attempt = attempt where scope = $1")
        .bind(key.scope())
        .execute(&mut *locker)
        .await?;
    let started = Instant::now();
    let rejected = rejecting().run(&citus.pool, &key, "second", async |conn| effect(conn, &key).await).await;
    assert!(matches!(rejected, Err(Error::InFlight { .. })), "{rejected:?}");
    let mut tx = citus.pool.begin().await?;
    let limit = Duration::from_millis(300);
    let late = waiting(limit).ensure(&mut tx, &key, "second", async |conn| effect(conn, &key).await).await;
    assert!(matches!(late, Err(Error::InFlight { .. })), "{late:?}");
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(effects(&mut tx, &key).await?, 1, "usable");
    tx.rollback().await?;
    let waiter = tokio::spawn({
        let (pool, key) = (citus.pool.clone(), key.clone());
        async move { once(&pool, &key, "second").await }
    });
    crate::a_moment().await;
    locker.rollback().await?;
    assert_eq!(waiter.await??.into_inner(), 2);
    Ok(())
}

/// A transaction that wrote to two nodes is in doubt after a crash, until Citus recovers it. The coordinator's locks
/// are gone by then, so the claim meets its row.
#[tokio::test]
async fn a_claim_in_doubt_is_waited_for_as_long_as_the_sessions_lock_timeout_allows() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    let key = key("in doubt");
    let (shard, host, port): (i64, String, i32) = sqlx::query_as(
        "select shardid, nodename, nodeport from citus_shards
        where shardid = get_shard_id_for_distribution_column('idempotency.record', $1::text)",
    )
    .bind(key.scope())
    .fetch_one(&citus.pool)
    .await?;
    let worker = options().expect("a coordinator").host(&host).port(u16::try_from(port)?);
    let mut worker = PgConnection::connect_with(&worker).await?;
    let (name, scope) = (key.scope(), key.scope());
    let doubtful = format!(
        "set citus.enable_manual_changes_to_shards = on; begin;
        insert into idempotency.record_{shard} (mode, scope, operation, value, fingerprint, token, attempt, claimed_at, expires_at)
        values ('transaction', '{scope}', 'in doubt', 'value', '\\x0100', 1, 1, now(), now() + interval '1 day');
        prepare transaction '{name}'"
    );
    worker.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(doubtful))).await?;
    for way in [calls(), rejecting()] {
        let mut conn = citus.pool.acquire().await?;
        conn.execute("set lock_timeout = '300ms'").await?;
        let mut tx = conn.begin().await?;
        let call = way.ensure(&mut tx, &key, "body", async |conn| effect(conn, &key).await);
        let late = tokio::time::timeout(Duration::from_secs(10), call).await?;
        tx.rollback().await?;
        conn.execute("reset lock_timeout").await?;
        let Err(Error::Database(sqlx::Error::Database(timed_out))) = &late else { panic!("{late:?}") };
        assert_eq!(timed_out.code().as_deref(), Some("55P03"));
    }
    worker.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(format!("rollback prepared '{name}'")))).await?;
    assert_eq!(once(&citus.pool, &key, "body").await?.into_inner(), 1);
    Ok(())
}

/// Kills the sessions on the workers that belong to this connection of the coordinator.
async fn lose_workers(pool: &PgPool, gpid: i64) -> anyhow::Result<()> {
    let kill = format!(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = 'citus_internal gpid={gpid}'"
    );
    let killed: i64 = sqlx::query_scalar("select sum(result::int8)::int8 from run_command_on_workers($1)")
        .bind(kill)
        .fetch_one(pool)
        .await?;
    anyhow::ensure!(killed > 0, "there was none");
    Ok(())
}

#[tokio::test]
async fn the_loss_of_a_worker_is_transient_and_leaves_nothing() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    let gpid_of = async |conn: &mut PgConnection| -> anyhow::Result<i64> {
        Ok(sqlx::query_scalar("select citus_backend_gpid()").fetch_one(conn).await?)
    };
    // In perform: the completion meets it.
    let key = key("lost worker");
    let lost = calls()
        .run(&citus.pool, &key, "body", async |conn| {
            let count = effect(&mut *conn, &key).await?;
            let gpid = gpid_of(conn).await.expect("a number");
            lose_workers(&citus.pool, gpid).await.expect("killed");
            Ok::<_, Error>(count)
        })
        .await;
    assert!(matches!(&lost, Err(error) if error.is_transient()), "{lost:?}");
    // In a perform that fails: the undo succeeds without the worker, and the release meets it.
    let mut tx = citus.pool.begin().await?;
    let lost = calls().ensure_isolated(&mut tx, &key, "body", async |conn| {
        effect(&mut *conn, &key).await?;
        let gpid = gpid_of(conn).await.expect("a number");
        lose_workers(&citus.pool, gpid).await.expect("killed");
        Err::<Verdict<i64>, _>(Error::OutlivedRetention)
    });
    let lost = lost.await;
    assert!(matches!(&lost, Err(error) if error.is_transient()), "{lost:?}");
    tx.rollback().await?;
    // Before the COMMIT, which Citus ends with XX000.
    let mut tx = citus.pool.begin().await?;
    let _ = calls().ensure(&mut tx, &key, "body", async |conn| effect(conn, &key).await).await?;
    let gpid = gpid_of(&mut tx).await?;
    lose_workers(&citus.pool, gpid).await?;
    let lost = Error::from(tx.commit().await.expect_err("a lost worker"));
    assert!(lost.is_transient(), "{lost:?}");
    assert_eq!(once(&citus.pool, &key, "body").await?.into_inner(), 1);
    Ok(())
}

/// What `src/guide/any_language.md` promises.
#[tokio::test]
async fn the_sql_functions_refuse_a_distributed_table_and_leave_nothing() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    pg_idempotency::migrate_any_language(&citus.pool).await?;
    let key = key("another language");
    let ensure = "select idempotency.ensure(
        scope => $1, operation => $2, value => $3, fingerprint => idempotency.fingerprint('x')
    )";
    let refused = sqlx::query(ensure).bind(key.scope()).bind(key.operation()).bind(key.value());
    let error = refused.execute(&citus.pool).await.expect_err("refused");
    let error = error.as_database_error().expect("by the server").downcast_ref::<PgDatabaseError>();
    assert_eq!(error.code(), "0A000");
    assert!(error.hint().is_some_and(|hint| hint.contains("distributed")), "{error:?}");
    assert!(pg_idempotency::operator::show(&citus.pool, &key).await?.is_none());
    Ok(())
}
