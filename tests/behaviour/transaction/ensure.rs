//! What the statements of a call need and bear: the table and its indexes.

use pg_idempotency::{Error, Idempotency, ensure_idempotent};
use sqlx::PgPool;

use crate::support::{create_effects, key, leave_effect, once, pool_of};

#[sqlx::test(migrations = false)]
async fn a_missing_table_says_what_to_run(pool: PgPool) {
    let error = once(&pool, &key("a"), "body").await.expect_err("no table");
    assert!(matches!(error, Error::SchemaMissing { .. }), "{error:?}");
    assert!(error.to_string().contains("pg_idempotency::migrate"), "{error}");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_missing_function_says_what_to_run(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    sqlx::raw_sql("alter function idempotency.await_key rename to gone").execute(&pool).await?;
    let mut owner = pool.begin().await?;
    let _ = ensure_idempotent(&mut owner, &key("a"), "body", async |_| Ok::<_, Error>(1)).await?;
    let error = once(&pool, &key("a"), "body").await.expect_err("a call that waits needs the function");
    assert!(matches!(error, Error::SchemaMissing { .. }), "{error:?}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_completion_is_a_heap_only_update(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for n in 0..100 {
        let _ = once(&pool, &key(&n.to_string()), "body").await?;
    }
    // Each backend reports its counts at its own pace, at the latest when it ends.
    pool.close().await;
    let pool = pool_of(1, &pool.connect_options()).await;
    crate::support::until(
        &pool,
        "select sum(n_tup_upd)::int8 = 100 from pg_stat_user_tables where schemaname = 'idempotency' and relname::text like 'record%'",
    )
    .await;
    let hot: i64 = sqlx::query_scalar(
        "select sum(n_tup_hot_upd)::int8 from pg_stat_user_tables
        where schemaname = 'idempotency' and relname::text like 'record%'",
    )
    .fetch_one(&pool)
    .await?;
    assert!(hot >= 80, "{hot} of 100 completions were heap-only updates");
    Ok(())
}

/// Without a conflict target, the violation of another unique index would be swallowed and taken for a lost claim.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_violation_of_another_unique_index_is_an_error(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    sqlx::query("create unique index on idempotency.record (scope, operation)").execute(&pool).await?;
    for options in [Idempotency::new(), crate::support::rejecting()] {
        sqlx::query("delete from idempotency.record").execute(&pool).await?;
        let _ = once(&pool, &key("a"), "body").await?;
        let error = options
            .run(&pool, &key("b"), "body", async |conn| leave_effect(conn, "b").await)
            .await
            .expect_err("the other index");
        let Error::Database(sqlx::Error::Database(cause)) = error else { panic!("{error:?}") };
        assert_eq!(cause.code().as_deref(), Some("23505"));
    }
    Ok(())
}
