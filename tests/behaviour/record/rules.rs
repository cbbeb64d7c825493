//! The rules of `migrations/strict.sql`, and the search for records that break them.

use std::collections::BTreeMap;

use pg_idempotency::operator::{Warning, deep_health};
use sqlx::{AssertSqlSafe, PgPool, Row as _};

/// Rows in every combination of good and bad values. PostgreSQL's own form of each CHECK decides which of them break
/// it.
#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn deep_health_counts_what_strict_sql_would_refuse(pool: PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql(
        "insert into idempotency.record
            (mode, scope, operation, value, fingerprint, token, attempt, lease_until, completed_at, expires_at, response_body,
            steps, request)
         select
            mode, repeat('s', length), n::text, repeat('k', length) || row_number() over (),
            repeat('f', fingerprint)::bytea, 1, attempt, lease::timestamptz, completed::timestamptz, now(), response::bytea,
            steps::jsonb, steps::bytea
         from (values ('transaction'), ('at_least_once'), ('in_steps'), ('at_most_once'), ('mark'), ('newer')) as m (mode)
         cross join (values (null), ('{}')) as s (steps)
         cross join (values (null), (1), (33), (256)) as f (fingerprint)
         cross join (values (0), (1)) as a (attempt)
         cross join (values (null), ('-infinity'), ('now')) as l (lease)
         cross join (values (null), ('now')) as c (completed)
         cross join (values (null), ('x')) as r (response)
         cross join (values (0), (1), (256)) as k (length)
         cross join generate_series(1, 3) as n;
         create table strict_record (like idempotency.record)",
    )
    .execute(&pool)
    .await?;
    let strict = include_str!("../../../migrations/strict.sql").replace("idempotency.record", "strict_record");
    sqlx::raw_sql(AssertSqlSafe(strict)).execute(&pool).await?;
    let checks = sqlx::query(
        "select conname::text as name, pg_get_expr(conbin, conrelid) as expression
         from pg_constraint where conrelid = 'strict_record'::regclass and contype = 'c'",
    );
    let mut expected = BTreeMap::new();
    for check in checks.fetch_all(&pool).await? {
        let (name, expression): (String, String) = (check.try_get("name")?, check.try_get("expression")?);
        let broken = format!("select count(*) from idempotency.record where ({expression}) is false");
        let records: i64 = sqlx::query_scalar(AssertSqlSafe(broken)).fetch_one(&pool).await?;
        assert!(records > 0, "no row breaks {name}");
        expected.insert(name, records.unsigned_abs());
    }
    assert_eq!(expected.len(), 12);
    let warnings = deep_health(&pool).await?;
    let found: BTreeMap<_, _> = warnings
        .into_iter()
        .map(|warning| match warning {
            Warning::BrokenRule { rule, records, .. } => (rule, records),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(found, expected);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "Citus takes no ALTER TABLE with so many constraints")]
async fn strict_sql_can_be_applied_twice(pool: PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql(include_str!("../../../migrations/strict.sql")).execute(&pool).await?;
    Ok(())
}
