//! `migrations/partitions.sql`: what it keeps of the table, and what it refuses to lose.

use rig::role::with_role;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

use crate::support::{connect, create_effects, key, once, records};

const PARTITIONS: &str = include_str!("../../migrations/partitions.sql");

/// On the table, or on a column of it.
async fn has(conn: &mut PgConnection, role: &str, table: &str, privilege: &str) -> anyhow::Result<bool> {
    let sql = "select has_table_privilege($1::text, $2::text, $3::text) or has_any_column_privilege($1::text, $2::text, $3::text)";
    Ok(sqlx::query_scalar(sql).bind(role).bind(table).bind(privilege).fetch_one(conn).await?)
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "Citus distributes the table")]
async fn records_rights_and_their_grant_options_are_kept(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let _ = once(&pool, &key("a"), "body").await?;
    let granted = "grant select on idempotency.record to @role with grant option;
        grant insert on idempotency.record to @role;
        grant update (last_error) on idempotency.record to @role with grant option;
        -- Only a new table would have these.
        alter default privileges grant all on tables to @role";
    with_role(&pool, granted, async |role| {
        let mut conn = connect(&pool).await;
        conn.execute(PARTITIONS).await?;
        for table in ["idempotency.record", "idempotency.record_0", "idempotency.record_15"] {
            for (right, granted) in [
                ("select with grant option", true),
                ("insert", true),
                ("insert with grant option", false),
                ("update with grant option", true),
                ("references", false),
            ] {
                assert_eq!(has(&mut conn, role, table, right).await?, granted, "{table}: {right}");
            }
        }
        assert_eq!(records(&pool).await, 1);
        assert!(once(&pool, &key("a"), "body").await?.is_replayed());
        anyhow::Ok(())
    })
    .await
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "Citus distributes the table")]
async fn whatever_the_table_would_lose_is_refused_by_name(pool: PgPool) -> anyhow::Result<()> {
    let noted = "create function public.noted() returns trigger language plpgsql as 'begin return new; end'";
    with_role(&pool, noted, async |role| {
        let mut conn = connect(&pool).await;
        for (attach, what) in [
            ("create policy p on idempotency.record using (true)", "policies"),
            ("alter table idempotency.record enable row level security", "row level security"),
            (
                "create trigger t before insert on idempotency.record for each row execute function public.noted()",
                "triggers",
            ),
            (
                "create table public.owner (name text collate \"C\" primary key);
             alter table idempotency.record add foreign key (scope) references public.owner",
                "a foreign key",
            ),
            ("create rule r as on delete to idempotency.record do also select 1", "rules"),
            ("create publication p for table idempotency.record", "a place in a publication"),
            ("alter table idempotency.record replica identity full", "a replica identity"),
            ("create index own on idempotency.record (trace)", "an index of your own"),
            ("alter index idempotency.record_expires_at set (fillfactor = 70)", "settings of an index"),
            ("alter table idempotency.record alter scope set statistics 500", "statistics targets"),
            (
                "alter table idempotency.record alter value set (n_distinct = -1)",
                "statistics targets or options of a column",
            ),
            ("alter table idempotency.record set (toast.autovacuum_enabled = false)", "settings of its toast table"),
            (&format!("alter table idempotency.record owner to {role}"), "another owner"),
        ] {
            let mut tx = conn.begin().await?;
            tx.execute(AssertSqlSafe(attach.to_owned())).await?;
            let error = tx.execute(PARTITIONS).await.expect_err(what).to_string();
            assert!(error.contains(&format!("has {what}")), "{error}");
            tx.rollback().await?;
        }
        conn.execute(PARTITIONS).await?;
        let error = conn.execute(PARTITIONS).await.expect_err("a second time").to_string();
        assert!(error.contains("partitioned already"), "{error}");
        anyhow::Ok(())
    })
    .await
}
