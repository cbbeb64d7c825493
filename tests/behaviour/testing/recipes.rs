//! `#[sqlx::test]` in a service: with this crate's table alone, beside an application's own migrations, and with
//! records from `.sql` files. `src/guide/testing.md` shows these tests; `shop/` is the application.

use pg_idempotency::lease::{Lease, Leasing, Policy, ensure_leased};
use pg_idempotency::mark::{Marked, mark};
use pg_idempotency::testing::{assert_completed, assert_performed_once, race};
use pg_idempotency::{Error, Idempotency, Key, Outcome, schema_sql};
use serde_json::{Value, json};
use sqlx::PgPool;
use std::num::NonZeroU32;
use std::time::Duration;

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

/// sqlx applies fixtures after the migrations and before the test, so the schema is the first fixture.
/// `idempotency-janitor migrate --print` wrote it.
#[sqlx::test(
    migrations = "tests/behaviour/testing/shop/migrations",
    fixtures(path = "shop/fixtures", scripts("idempotency")),
    fixtures(path = "../../../src/testing/fixtures", scripts("completed"))
)]
async fn beside_them_with_records_from_files(pool: PgPool) -> anyhow::Result<()> {
    let outcome = place_order(&pool, &key("completed"), &json!({"what": "tea"})).await?;
    assert_eq!(outcome, Outcome::Replayed(17));
    assert_eq!(orders(&pool).await?, 0);
    // A service that migrates at its start finds the schema up to date.
    pg_idempotency::migrate(&pool).await?;
    assert_eq!(include_str!("shop/fixtures/idempotency.sql"), schema_sql());
    Ok(())
}

#[sqlx::test(
    migrator = "crate::strict::MIGRATOR",
    fixtures(
        path = "../../../src/testing/fixtures",
        scripts("completed", "expired", "indeterminate", "lapsed", "leased", "marked", "released", "steps")
    )
)]
async fn each_file_gets_the_answer_that_it_announces(pool: PgPool) -> anyhow::Result<()> {
    assert_completed(&pool, &key("completed")).await;
    let body = json!({"what": "tea"});
    for (value, expected) in
        [("completed", "Ok(Replayed(17))"), ("expired", "Ok(Performed(1))"), ("indeterminate", "Indeterminate")]
    {
        let answer = Idempotency::new().run(&pool, &key(value), &body, async |_| Ok::<i64, Error>(1)).await;
        assert!(format!("{answer:?}").contains(expected), "{value}: {answer:?}");
    }
    let lease = Duration::from_secs(40);
    let (least, most) = (Policy::AtLeastOnce { lease }, Policy::AtMostOnce { lease });
    for (value, policy, expected) in [
        ("lapsed at least once", least, "Ok(Performed(2))"),
        ("lapsed at most once", most, "Indeterminate"),
        ("leased", most, "InFlight"),
        ("released", least, "Ok(Performed(2))"),
    ] {
        let attempt = async |lease: &pg_idempotency::lease::Lease| Ok::<_, Error>(lease.attempt());
        let answer = ensure_leased(&pool, &key(value), &body, policy, attempt).await;
        assert!(format!("{answer:?}").contains(expected), "{value}: {answer:?}");
    }
    let in_steps = Leasing::new(Policy::InSteps { lease })?.with_max_attempts(NonZeroU32::MAX);
    let in_doubt = in_steps.acquire::<u32, _>(&pool, &key("lapsed in a step"), &body).await;
    assert!(matches!(&in_doubt, Err(Error::Indeterminate { steps, .. }) if *steps == ["text"]), "{in_doubt:?}");
    let resumed = in_steps.resume_one(&pool, "POST /orders", async |lease: &Lease, order: Value| {
        let receipt =
            lease.step_at_most_once("charge", async |_| -> Result<String, Error> { panic!("charged") }).await?;
        Ok::<_, Error>(format!("{order} {receipt} {}", lease.attempt()))
    });
    assert_eq!(resumed.await?.expect("its request is stored").result?, r#"{"what":"tea"} r-1 2"#);
    let mut tx = pool.begin().await?;
    let marked = mark(&mut tx, &Key::new("user:1", "order.created", "marked")?, Duration::from_secs(60)).await?;
    assert_eq!(marked, Marked::Duplicate);
    Ok(())
}
