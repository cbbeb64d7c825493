//! The record as a Citus local table, on the cluster whose coordinator `CITUS_DATABASE_URL` names, beside a distributed
//! business table. Without the variable, each test reports that it is skipped. `script/citus` starts a cluster.

#[path = "../source/prepared.rs"]
mod prepared;
#[path = "../source/mod.rs"]
mod source;

use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::operator::{self, Warning, show};
use pg_idempotency::{Error, Idempotency, Janitor, Key, OnDuplicate, Outcome, migrate_any_language, testing};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};
use tokio::sync::{Mutex, MutexGuard};

/// The tests share one database, and create the schema anew.
static TURN: Mutex<()> = Mutex::const_new(());

struct Citus {
    pool: PgPool,
    _turn: MutexGuard<'static, ()>,
}

/// `None` without a cluster.
async fn citus() -> anyhow::Result<Option<Citus>> {
    let Ok(url) = std::env::var("CITUS_DATABASE_URL") else {
        eprintln!("skipped: the tests on Citus need CITUS_DATABASE_URL");
        return Ok(None);
    };
    let turn = TURN.lock().await;
    let pool = PgPoolOptions::new().max_connections(4).connect_with(url.parse::<PgConnectOptions>()?).await?;
    pool.execute(sqlx::raw_sql(
        "set client_min_messages = warning; drop schema if exists idempotency cascade; drop table if exists effect",
    ))
    .await?;
    migrate_any_language(&pool).await?;
    pool.execute(sqlx::raw_sql(
        "create table effect (scope text not null, note text not null);
        select create_distributed_table('effect', 'scope')",
    ))
    .await?;
    Ok(Some(Citus { pool, _turn: turn }))
}

/// With the record in the metadata, as the guide says.
async fn citus_local() -> anyhow::Result<Option<Citus>> {
    let Some(citus) = citus().await? else { return Ok(None) };
    citus.pool.execute("select citus_add_local_table_to_metadata('idempotency.record')").await?;
    Ok(Some(citus))
}

fn key(scope: &str, value: &str) -> Key {
    Key::new(scope, "operation", value).expect("a valid key")
}

async fn leave_effect(conn: &mut PgConnection, scope: &str, note: &str) -> Result<String, Error> {
    sqlx::query("insert into effect (scope, note) values ($1, $2)").bind(scope).bind(note).execute(conn).await?;
    Ok(note.to_owned())
}

async fn effects(pool: &PgPool) -> anyhow::Result<i64> {
    Ok(sqlx::query_scalar("select count(*) from effect").persistent(false).fetch_one(pool).await?)
}

async fn warnings(pool: &PgPool) -> Result<Vec<&'static str>, Error> {
    let warnings = operator::health(pool, Duration::from_secs(3600)).await?;
    Ok(warnings.iter().map(Warning::name).collect())
}

/// Citus refuses some forms of a statement when it plans them, and others only when it executes a kept plan, from the
/// sixth execution on.
#[tokio::test]
async fn citus_executes_each_statement_eight_times() -> anyhow::Result<()> {
    let Some(Citus { pool, _turn }) = citus_local().await? else { return Ok(()) };
    pool.execute(
        "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, lease_until, expires_at)
        values ('at_least_once', 'tenant', 'operation', '15000', idempotency.fingerprint('body'), 1, '-infinity',
            now() + interval '1 day')",
    )
    .await?;
    let mut conn = pool.acquire().await?;
    let (mut refused, mut executed) = (Vec::new(), 0);
    for statement in source::statements() {
        // The text of a sweep has a placeholder for the table. The test of the sweep executes it.
        if !statement.sql.contains("idempotency.record") || statement.sql.contains("{leaf}") {
            continue;
        }
        let result: sqlx::Result<()> = async {
            let execute = statement.prepare(&mut conn).await?;
            for _ in 0..8 {
                let mut tx = conn.begin().await?;
                tx.execute(AssertSqlSafe(execute.clone())).await?;
                tx.rollback().await?;
            }
            conn.execute("deallocate planned").await.map(drop)
        }
        .await;
        executed += 1;
        if let Err(error) = result {
            refused.push(format!("{}: {error}", statement.name));
            conn.execute("deallocate all").await?;
        }
    }
    assert!(executed > 40, "{executed}");
    assert!(refused.is_empty(), "{} of {executed}: {refused:#?}", refused.len());
    Ok(())
}

#[tokio::test]
async fn a_call_commits_together_with_a_distributed_table() -> anyhow::Result<()> {
    let Some(Citus { pool, _turn }) = citus_local().await? else { return Ok(()) };
    let call = async |key: &Key, body: &str| {
        Idempotency::new().run(&pool, key, body, async |conn| leave_effect(conn, key.scope(), body).await).await
    };
    // Kept plans, too: a session keeps a plan from the sixth execution on.
    for n in 0..8 {
        let key = key(&format!("tenant {n}"), "a");
        assert_eq!(call(&key, "body").await?, Outcome::Performed("body".to_owned()));
        assert_eq!(call(&key, "body").await?, Outcome::Replayed("body".to_owned()));
        assert!(matches!(call(&key, "other").await, Err(Error::KeyReused { .. })));
        testing::expire(&pool, &key).await?;
        assert_eq!(call(&key, "other").await?, Outcome::Performed("other".to_owned()), "taken over");
    }
    assert_eq!(effects(&pool).await?, 16);
    // An error of `perform` undoes both.
    let other = key("tenant", "b");
    let failed = Idempotency::new().run(&pool, &other, "body", async |conn| {
        leave_effect(conn, "tenant", "undone").await?;
        Err::<String, _>(Error::Database(sqlx::Error::RowNotFound))
    });
    assert!(failed.await.is_err());
    assert_eq!((effects(&pool).await?, show(&pool, &other).await?.is_none()), (16, true));
    Ok(())
}

#[tokio::test]
async fn a_duplicate_sees_the_open_transaction_of_the_first_call_and_waits_for_it() -> anyhow::Result<()> {
    let Some(Citus { pool, _turn }) = citus_local().await? else { return Ok(()) };
    let (one, rejecting) = (key("tenant", "a"), Idempotency::new().on_duplicate(OnDuplicate::Reject));
    let outcome = Idempotency::new().run(&pool, &one, "body", async |conn| {
        let duplicate = rejecting.run(&pool, &one, "body", async |_| Ok::<_, Error>(String::new())).await;
        assert!(matches!(duplicate, Err(Error::InFlight { .. })), "{duplicate:?}");
        leave_effect(conn, "tenant", "a").await
    });
    assert_eq!(outcome.await?, Outcome::Performed("a".to_owned()));
    let mut open = pool.begin().await?;
    let first = Idempotency::new();
    let other = key("tenant", "b");
    let claimed = first.ensure(&mut open, &other, "body", async |conn| leave_effect(conn, "tenant", "b").await).await?;
    assert_eq!(claimed, Outcome::Performed("b".to_owned()));
    let waiting = tokio::spawn({
        let pool = pool.clone();
        async move {
            Idempotency::new().run(&pool, &key("tenant", "b"), "body", async |_| Ok::<_, Error>(String::new())).await
        }
    });
    let waits =
        "select count(*) from pg_stat_activity where query like '%pg_idempotency: await%' and wait_event_type = 'Lock'";
    while sqlx::query_scalar::<_, i64>(waits).fetch_one(&pool).await? == 0 {}
    pg_idempotency::commit(open).await?;
    assert_eq!(waiting.await??, Outcome::Replayed("b".to_owned()));
    assert_eq!(effects(&pool).await?, 2);
    Ok(())
}

#[tokio::test]
async fn marks_leases_steps_operators_and_the_sweep_work() -> anyhow::Result<()> {
    let Some(Citus { pool, _turn }) = citus_local().await? else { return Ok(()) };
    let marking = MarkOptions::new(Duration::from_secs(300));
    let keys: Vec<_> = (0..3).map(|n| key("tenant", &format!("mark {n}"))).collect();
    for round in 0..8 {
        let mut tx = pool.begin().await?;
        leave_effect(&mut tx, "tenant", "marked").await?;
        assert_eq!(marking.mark_many(&mut tx, &keys).await?, [Marked::First; 3], "{round}");
        assert_eq!(marking.mark_many(&mut tx, &keys).await?, [Marked::Duplicate; 3], "{round}");
        tx.commit().await?;
        for key in &keys {
            testing::expire(&pool, key).await?;
        }
    }

    let leasing = LeaseOptions::new(Policy::InSteps { lease: Duration::from_secs(30) });
    let one = key("tenant", "lease");
    let Acquired::Owner(owner) = leasing.acquire::<String, _>(&pool, &one, "body").await? else {
        anyhow::bail!("the key is new")
    };
    owner.release("a try").await?;
    let outcome = leasing.run(&pool, &one, "body", async |lease| {
        let note = lease.step("note", async |conn| leave_effect(conn, "tenant", "stepped").await).await?;
        Ok::<_, Error>(note)
    });
    assert_eq!(outcome.await?, Outcome::Performed("stepped".to_owned()));
    assert_eq!(effects(&pool).await?, 9);

    let shown = show(&pool, &one).await?.expect("a record");
    assert!(shown.completed_at.is_some());
    assert!(shown.forget(&pool).await.is_ok());
    let swept = Janitor::new(pool.clone()).grace(Duration::ZERO).sweep_once(100).await?;
    assert_eq!(swept.rows(), 3, "the marks");
    Ok(())
}

#[tokio::test]
async fn the_sql_functions_work() -> anyhow::Result<()> {
    let Some(Citus { pool, _turn }) = citus_local().await? else { return Ok(()) };
    let mut conn = pool.acquire().await?;
    let ensure =
        "select outcome, token from idempotency.ensure('tenant', 'operation', $1, idempotency.fingerprint('body'))";
    for n in 0..8 {
        for (state, outcome) in [("new", "claimed"), ("stored", "replayed"), ("expired", "claimed")] {
            let value = format!("sql {n}");
            if state == "expired" {
                testing::expire(&pool, &key("tenant", &value)).await?;
            }
            let mut tx = conn.begin().await?;
            let (found, token): (String, Option<i64>) = sqlx::query_as(ensure).bind(&value).fetch_one(&mut *tx).await?;
            assert_eq!(found, outcome, "{state}");
            if let Some(token) = token {
                leave_effect(&mut tx, "tenant", state).await?;
                sqlx::query("select idempotency.complete('tenant', 'operation', $1, $2, body => 'answer')")
                    .bind(&value)
                    .bind(token)
                    .execute(&mut *tx)
                    .await?;
            }
            tx.commit().await?;
        }
    }
    assert_eq!(effects(&pool).await?, 16);
    Ok(())
}

#[tokio::test]
async fn a_table_whose_locks_would_be_on_a_worker_is_refused() -> anyhow::Result<()> {
    for how in [
        "select create_distributed_table('idempotency.record', 'scope', colocate_with => 'none')",
        "select create_distributed_table('idempotency.record', null, colocate_with => 'none')",
        "select create_reference_table('idempotency.record')",
        "select citus_schema_distribute('idempotency')",
    ] {
        let Some(Citus { pool, _turn }) = citus().await? else { return Ok(()) };
        pool.execute(how).await?;
        let refused = Idempotency::new().run(&pool, &key("tenant", "a"), "body", async |_| Ok::<_, Error>(1)).await;
        let error = format!("{:?}", refused.expect_err(how));
        assert!(error.contains("Citus distributes idempotency.record"), "{how}: {error}");
        assert_eq!(warnings(&pool).await?, ["distributed"], "{how}");
    }
    Ok(())
}

#[tokio::test]
async fn a_connection_to_a_worker_is_refused() -> anyhow::Result<()> {
    let Some(Citus { pool, _turn }) = citus_local().await? else { return Ok(()) };
    let (host, port): (String, i32) =
        sqlx::query_as("select node_name, node_port::int4 from citus_get_active_worker_nodes() limit 1")
            .fetch_one(&pool)
            .await?;
    let options = (*pool.connect_options()).clone().host(&host).port(u16::try_from(port)?);
    let worker = PgPoolOptions::new().max_connections(2).connect_with(options).await?;
    let refused = Idempotency::new().run(&worker, &key("tenant", "a"), "body", async |_| Ok::<_, Error>(1)).await;
    let error = format!("{:?}", refused.expect_err("refused"));
    assert!(error.contains("coordinator"), "{error}");
    Ok(())
}

#[tokio::test]
async fn health_tells_a_plain_table_from_one_in_the_metadata() -> anyhow::Result<()> {
    let Some(Citus { pool, _turn }) = citus().await? else { return Ok(()) };
    assert_eq!(warnings(&pool).await?, ["not_in_metadata"]);
    pool.execute("select citus_add_local_table_to_metadata('idempotency.record')").await?;
    assert_eq!(warnings(&pool).await?, [""; 0]);
    // The sizes are those of the shard, because the table itself is empty.
    let _ = Idempotency::new().run(&pool, &key("tenant", "a"), "body", async |_| Ok::<_, Error>(1)).await?;
    pool.execute("analyze idempotency.record").await?;
    let stats = operator::stats(&pool).await?;
    assert!(stats.table_bytes > 0, "{stats:?}");
    // Without distributed tables, a plain table keeps its promise.
    pool.execute("select undistribute_table('idempotency.record'); drop table effect").await?;
    assert_eq!(warnings(&pool).await?, [""; 0]);
    Ok(())
}
