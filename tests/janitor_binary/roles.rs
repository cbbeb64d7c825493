//! Least rights.

use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::support::{assert_fails, expired, janitor_on, text};

/// The least that a janitor's role needs, and the clear word where it lacks it.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn a_role_without_rights_is_told_so(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    expired(&pool, 3).await?;
    let mut conn = pool.acquire().await?;
    let role =
        format!("janitor_{}", sqlx::query_scalar::<_, i32>("select pg_backend_pid()").fetch_one(&mut *conn).await?);
    let create = format!("create role {role} login; grant usage on schema idempotency to {role}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut *conn).await?;
    let as_role = options.clone().username(&role);
    let refused = janitor_on(&as_role, &["sweep"]);
    let grant = format!("grant select, delete, update (last_error) on idempotency.record to {role}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(grant)).execute(&mut *conn).await?;
    let swept = janitor_on(&as_role, &["sweep"]);
    let drop = format!("drop owned by {role}; drop role {role}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(drop)).execute(&mut *conn).await?;
    assert_fails(&refused, 1, "refused the role");
    assert_eq!(swept.status.code(), Some(0), "{}", text(&swept.stderr));
    assert!(text(&swept.stdout).starts_with("3 records deleted"), "{}", text(&swept.stdout));
    Ok(())
}
