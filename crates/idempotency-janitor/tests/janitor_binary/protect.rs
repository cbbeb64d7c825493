//! `protect` and `unprotect`, and what `health` says about the tables.

use sqlx::PgPool;

use crate::support::{assert_fails, janitor_on, json, text};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn tables_are_protected_listed_and_unprotected(pool: PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql("create table orders (id int); create table payments (id int); create view seen as table orders")
        .execute(&pool)
        .await?;
    let done = janitor_on(&pool, &["protect", "orders", "payments", "--warn"]);
    let said = "orders: a write outside an idempotent operation gives a warning\n\
                payments: a write outside an idempotent operation gives a warning\n";
    assert_eq!((done.status.code(), &*text(&done.stdout)), (Some(0), said), "{done:?}");
    sqlx::raw_sql("insert into orders values (1)").execute(&pool).await?;
    let done = janitor_on(&pool, &["protect", "orders"]);
    assert_eq!(&*text(&done.stdout), "orders: a write outside an idempotent operation is refused\n", "{done:?}");
    sqlx::raw_sql("insert into orders values (1)").execute(&pool).await.expect_err("refused");

    let health = janitor_on(&pool, &["health"]);
    assert!(text(&health.stdout).contains("protected: public.orders\nprotected, with warnings: public.payments\n"));
    let protected = serde_json::json!({"public.orders": "refuse", "public.payments": "warn"});
    assert_eq!(json(&janitor_on(&pool, &["health", "--json"]))["protected"], protected);
    sqlx::raw_sql("alter table orders disable trigger user").execute(&pool).await?;
    let health = janitor_on(&pool, &["health"]);
    assert!(text(&health.stdout).contains("the trigger that protects public.orders is disabled"), "{health:?}");

    assert_fails(&janitor_on(&pool, &["protect", "seen"]), 1, "public.seen cannot be protected: it is a view");
    assert_fails(&janitor_on(&pool, &["unprotect", "nowhere"]), 1, "there is no table \"nowhere\"");
    assert_eq!(janitor_on(&pool, &["protect"]).status.code(), Some(2));
    let done = janitor_on(&pool, &["unprotect", "orders", "payments"]);
    assert_eq!(&*text(&done.stdout), "orders: not protected\npayments: not protected\n", "{done:?}");
    assert!(!text(&janitor_on(&pool, &["health"]).stdout).contains("protect"));
    Ok(())
}
