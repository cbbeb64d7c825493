//! The functions of the schema that contain copies of the crate's statements.

use pg_idempotency::{Error, ensure_idempotent};
use sqlx::{Connection as _, PgPool};

use crate::support::{connect, key};

fn squeezed(sql: &str) -> String {
    sql.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Compares the functions with the statements that the crate prepares.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "the statements are other ones there")]
async fn the_functions_of_the_schema_contain_the_crates_own_statements(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    for (function, name) in
        [("try_claim", " /* pg_idempotency: claim */"), ("store_response", " /* pg_idempotency: complete */")]
    {
        conn.clear_cached_statements().await?;
        let mut tx = conn.begin().await?;
        let _ = ensure_idempotent(&mut tx, &key(function), "body", async |_| Ok::<_, Error>(1)).await?;
        tx.commit().await?;
        let prepared: String =
            sqlx::query_scalar("select statement from pg_prepared_statements where strpos(statement, $1) > 0")
                .bind(name)
                .fetch_one(&mut conn)
                .await?;
        // The functions judge the age of the transaction themselves, and the retention as of this moment.
        let prepared = squeezed(&prepared)
            .replace(name, "")
            .replace(", pg_catalog.clock_timestamp() - pg_catalog.now() as age", "")
            .replace("expires_at > pg_catalog.statement_timestamp()", "expires_at > pg_catalog.clock_timestamp()");
        let source: String = sqlx::query_scalar(
            "select prosrc from pg_proc where proname = $1 and pronamespace = 'idempotency'::regnamespace::oid",
        )
        .bind(function)
        .fetch_one(&mut conn)
        .await?;
        assert!(squeezed(&source).contains(prepared.trim()), "{function} is not the crate's:\n{source}\n{prepared}");
    }
    Ok(())
}
