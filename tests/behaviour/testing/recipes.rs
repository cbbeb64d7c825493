//! `#[sqlx::test]` in a service, beside the application's own migrations, as `src/guide/testing.md` shows it. `shop/` is
//! the application.

use pg_idempotency::testing::{assert_performed_once, race};
use pg_idempotency::{Error, Idempotency, Key, Outcome};
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

#[sqlx::test(migrations = "tests/behaviour/testing/shop/migrations")]
async fn this_crate_migrates_beside_the_application(pool: PgPool) -> anyhow::Result<()> {
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
