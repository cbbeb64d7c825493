//! A setting that does not fit the table never gives a wrong answer.

use std::time::Duration;

use pg_idempotency::dedup::{Dedup, Marked};
use pg_idempotency::lease::{Acquired, Leasing, Policy};
use pg_idempotency::testing::{self, Fixture};
use pg_idempotency::{Deployment, Error, Idempotency, InFlight, migrate};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};

use crate::{DISTRIBUTED, calls, citus, citus_alone, effect, effects, key, once, options};

const PLAIN: Deployment = Deployment::new().with_distributed(false);

fn plain() -> Idempotency {
    Idempotency::new().with_deployment(PLAIN)
}

#[tokio::test]
async fn a_plain_first_call_on_a_distributed_table_is_an_error_that_says_so() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    for way in [plain(), plain().with_select_first(true), plain().with_fewest_round_trips(true)] {
        let key = key("mismatch");
        let result = way.run(&citus.pool, &key, "body", async |conn| effect(conn, &key).await).await;
        assert!(matches!(result, Err(Error::WrongDeployment { .. })), "{way:?}: {result:?}");
        assert!(!result.expect_err("wrong").is_transient());
        testing::assert_no_trace(&citus.pool, &key).await;
        assert_eq!(effects(&mut *citus.pool.acquire().await?, &key).await?, 0);
    }
    Ok(())
}

#[tokio::test]
async fn a_plain_repeat_replays_or_fails() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    let key = key("mismatch");
    assert!(!once(&citus.pool, &key, "body").await?.is_replayed());
    for way in [plain(), plain().with_select_first(true), plain().with_in_flight(InFlight::Reject)?] {
        let result = way.run(&citus.pool, &key, "body", async |conn| effect(conn, &key).await).await;
        assert!(matches!(&result, Ok(replayed) if replayed.is_replayed()), "{result:?}");
        let reused = way.run(&citus.pool, &key, "other", async |conn| effect(conn, &key).await).await;
        assert!(matches!(reused, Err(Error::KeyReused { .. })), "{reused:?}");
    }
    testing::expire(&citus.pool, &key).await?;
    let result = plain().run(&citus.pool, &key, "body", async |conn| effect(conn, &key).await).await;
    let performed = match result {
        Ok(outcome) => i64::from(!outcome.is_replayed()),
        Err(Error::WrongDeployment { .. }) => 0,
        other => panic!("{other:?}"),
    };
    assert_eq!(effects(&mut *citus.pool.acquire().await?, &key).await?, 1 + performed);
    Ok(())
}

#[tokio::test]
async fn plain_leases_and_marks_are_right_or_fail() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    let policy = Policy::AtLeastOnce { lease: Duration::from_secs(40) };
    let leasing = Leasing::new(policy)?.with_deployment(PLAIN);
    let lapsed = key("mismatch");
    Fixture::lapsed(&lapsed, "body", policy)?.write(&citus.pool).await?;
    match leasing.acquire::<String, _>(&citus.pool, &lapsed, "body").await {
        Err(Error::WrongDeployment { .. }) => {}
        Ok(Acquired::Lease(lease)) => assert_eq!(lease.attempt(), 2),
        other => panic!("{other:?}"),
    }
    let dedup = Dedup::new(Duration::from_secs(3600))?.with_deployment(PLAIN);
    for count in [3, 200] {
        let keys: Vec<_> = (0..count).map(|_| key("mismatch")).collect();
        for expected in [Marked::First, Marked::Duplicate] {
            let mut tx = citus.pool.begin().await?;
            match dedup.mark_many(&mut tx, &keys).await {
                Err(Error::WrongDeployment { .. }) => {}
                Ok(marked) => assert!(marked.iter().all(|marked| *marked == expected), "{count}"),
                other => panic!("{other:?}"),
            }
            let _ = tx.commit().await;
        }
    }
    let key = key("mismatch");
    for expected in [Marked::First, Marked::Duplicate] {
        let mut tx = citus.pool.begin().await?;
        assert_eq!(dedup.mark(&mut tx, &key).await?, expected);
        tx.commit().await?;
    }
    Ok(())
}

/// On a server, or a database, without Citus.
#[tokio::test]
async fn the_distributed_statements_are_right_on_a_plain_table() -> anyhow::Result<()> {
    let Some(citus) = citus_alone().await else { return Ok(()) };
    let name = format!("plain_{}", std::process::id());
    let (create, drop) = (format!("create database {name}"), format!("drop database {name} with (force)"));
    let mut conn = citus.pool.acquire().await?;
    conn.execute("set citus.enable_create_database_propagation = off").await?;
    sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut *conn).await?;
    let pool = PgPool::connect_with(options().expect("a URL").database(&name)).await?;
    let checked = on_a_plain_table(&pool).await;
    pool.close().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(drop)).execute(&mut *conn).await?;
    conn.execute("reset citus.enable_create_database_propagation").await?;
    checked
}

async fn on_a_plain_table(pool: &PgPool) -> anyhow::Result<()> {
    pool.execute("drop extension if exists citus").await?;
    migrate(&mut *pool.acquire().await?).await?;
    pool.execute("create table citus_effect (scope text collate \"C\" not null, note text not null)").await?;
    for _ in 0..7 {
        let key = key("plain");
        let answers = testing::race(pool, 8, async |pool| {
            calls().run(pool, &key, "body", async |conn| effect(conn, &key).await).await
        })
        .await?;
        assert_eq!(testing::assert_performed_once(answers), 1);
        testing::expire(pool, &key).await?;
        assert_eq!(once(pool, &key, "body").await?.into_inner(), 2);
        let nested = calls()
            .run(pool, &self::key("nested"), "body", async |conn: &mut PgConnection| -> Result<i64, Error> {
                let key = self::key("twice");
                let mut tx = conn.begin().await?;
                let _ = calls().ensure(&mut tx, &key, "body", async |conn| effect(conn, &key).await).await?;
                let again = calls().ensure(&mut tx, &key, "body", async |conn| effect(conn, &key).await).await?;
                assert!(again.is_replayed());
                tx.commit().await?;
                Ok(1)
            })
            .await?;
        assert!(!nested.is_replayed());
    }
    let policy = Policy::AtLeastOnce { lease: Duration::from_secs(40) };
    let leasing = Leasing::new(policy)?.with_deployment(DISTRIBUTED);
    let lapsed = key("plain");
    Fixture::lapsed(&lapsed, "body", policy)?.write(pool).await?;
    let Acquired::Lease(lease) = leasing.acquire::<String, _>(pool, &lapsed, "body").await? else { panic!("replayed") };
    lease.complete(&"done".to_owned()).await?;
    let dedup = Dedup::new(Duration::from_secs(3600))?.with_deployment(DISTRIBUTED);
    for count in [3, 200] {
        let keys: Vec<_> = (0..count).map(|_| key("plain")).collect();
        for expected in [Marked::First, Marked::Duplicate] {
            let mut tx = pool.begin().await?;
            let marked = dedup.mark_many(&mut tx, &keys).await?;
            assert!(marked.iter().all(|marked| *marked == expected), "{count}");
            tx.commit().await?;
        }
        for key in &keys {
            testing::expire(pool, key).await?;
        }
        let mut tx = pool.begin().await?;
        assert!(dedup.mark_many(&mut tx, &keys).await?.iter().all(|marked| *marked == Marked::First), "{count}");
        tx.commit().await?;
    }
    Ok(())
}
