//! `#[sqlx::test]` in a service: with this crate's table alone, and beside an application's own migrations; and the
//! states that a test makes itself.
//! `src/guide/testing.md` shows some of these tests; `shop/` is the application.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, Leasing, Policy};
use pg_idempotency::testing::{assert_performed_once, lapse, race};
use pg_idempotency::{Error, Idempotency, Key, Outcome, ensure_idempotent, operator};
use serde_json::{Value, json};
use sqlx::PgPool;

fn key(value: &str) -> Key {
    Key::new("user:1", "POST /orders", value).expect("a valid key")
}

/// The service under test: it knows the application's table, and this crate.
async fn place_order(pool: &PgPool, key: &Key, order: &Value) -> Result<Outcome<i64>, Error> {
    let what = order["what"].as_str().unwrap_or_default();
    Idempotency::new()
        .run(pool, key, order, async |conn| {
            Ok(sqlx::query_scalar("insert into orders (what) values ($1) returning id")
                .bind(what)
                .fetch_one(conn)
                .await?)
        })
        .await
}

async fn orders(pool: &PgPool) -> anyhow::Result<i64> {
    Ok(sqlx::query_scalar("select count(*) from orders").fetch_one(pool).await?)
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn this_crates_table_alone(pool: PgPool) -> anyhow::Result<()> {
    let outcome = Idempotency::new().run(&pool, &key("a"), "tea", async |_| Ok::<_, Error>(17)).await?;
    assert_eq!(outcome, Outcome::Performed(17));
    Ok(())
}

#[sqlx::test(migrations = "tests/behaviour/testing/shop/migrations")]
async fn beside_the_applications_own_migrations(pool: PgPool) -> anyhow::Result<()> {
    pg_idempotency::migrate(&pool).await?;

    let answers = race(&pool, 10, async |pool| place_order(pool, &key("a"), &json!({"what": "tea"})).await).await?;
    assert_performed_once(answers);
    assert_eq!(orders(&pool).await?, 1);
    // Each has its own list of applied migrations.
    for (list, migrations) in [("_sqlx_migrations", 1_i64), ("idempotency._sqlx_migrations", 1)] {
        let query = format!("select count(*) from {list}");
        let applied: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(&pool).await?;
        assert_eq!(applied, migrations, "{list}");
    }
    Ok(())
}

#[sqlx::test(migrations = "tests/behaviour/testing/shop/migrations")]
async fn an_open_transaction_is_a_call_in_flight(pool: PgPool) -> anyhow::Result<()> {
    pg_idempotency::migrate(&pool).await?;
    let (key, order) = (key("a"), json!({"what": "tea"}));
    let mut first = pool.begin().await?;
    let placed = ensure_idempotent(&mut first, &key, &order, async |_| Ok::<i64, Error>(17)).await?;
    assert_eq!(placed, Outcome::Performed(17));
    let (duplicate, committed) = tokio::join!(place_order(&pool, &key, &order), first.commit());
    committed?;
    assert_eq!(duplicate?, Outcome::Replayed(17));
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn a_connection_that_ends_itself_leaves_no_trace(pool: PgPool) -> anyhow::Result<()> {
    let killed = Idempotency::new()
        .run(&pool, &key("a"), "tea", async |conn| -> Result<(), Error> {
            sqlx::query("select pg_terminate_backend(pg_backend_pid())").execute(conn).await?;
            Ok(())
        })
        .await;
    assert!(matches!(killed, Err(Error::Database(_))), "{killed:?}");
    assert!(operator::show(&pool, &key("a")).await?.is_none());
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn a_lease_that_is_dropped_and_lapses_is_a_dead_worker(pool: PgPool) -> anyhow::Result<()> {
    let texts = Leasing::new(Policy::AtMostOnce { lease: Duration::from_secs(40) })?;
    let acquired = texts.acquire::<String, _>(&pool, &key("a"), "your car is here").await?;
    let Acquired::Owner(lease) = acquired else { anyhow::bail!("the key is new") };
    drop(lease);
    lapse(&pool, &key("a")).await?;
    let next = texts.acquire::<String, _>(&pool, &key("a"), "your car is here").await;
    assert!(matches!(next, Err(Error::Indeterminate { .. })), "{next:?}");
    Ok(())
}
