//! The rules of `migrations/strict.sql`.

use sqlx::PgPool;

const STRICT: &str = include_str!("../../../migrations/strict.sql");

/// So an operator finds out on a restored backup whether people or a bug have spoilt a record.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "Citus takes no ALTER TABLE with so many constraints")]
async fn strict_sql_names_a_rule_that_a_record_breaks(pool: PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql(
        "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at)
         values ('newer', 'tenant', 'operation', 'a', 'ff', 1, now() + interval '1 h')",
    )
    .execute(&pool)
    .await?;
    let error = sqlx::raw_sql(STRICT).execute(&pool).await.expect_err("the mode is unknown");
    let error = error.as_database_error().expect("an error of the server");
    assert_eq!((error.code().as_deref(), error.constraint()), (Some("23514"), Some("known_mode")));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "Citus takes no ALTER TABLE with so many constraints")]
async fn strict_sql_can_be_applied_twice(pool: PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql(STRICT).execute(&pool).await?;
    Ok(())
}
