//! `migrations/partitions.sql`: what it keeps of the table, what it refuses to lose, and where hash partitions change how
//! a statement works. `plans.rs` and `squatted.rs` have a case with partitions, too.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions};
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::operator::{self, Warning};
use pg_idempotency::testing::expire;
use pg_idempotency::{Error, Key};
use rig::fixture::Fixture;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE};
use rig::role::with_role;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

use crate::support::{connect, create_effects, effects, janitor, key, once, options, pool_of, records};

const PARTITIONS: &str = include_str!("../../migrations/partitions.sql");

/// On the table, or on a column of it.
async fn has(conn: &mut PgConnection, role: &str, table: &str, privilege: &str) -> anyhow::Result<bool> {
    let sql = "select has_table_privilege($1::text, $2::text, $3::text) or has_any_column_privilege($1::text, $2::text, $3::text)";
    Ok(sqlx::query_scalar(sql).bind(role).bind(table).bind(privilege).fetch_one(conn).await?)
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
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
            ("create index own on idempotency.record (last_error)", "an index of your own"),
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

/// Scopes of every partition.
fn scopes() -> Vec<String> {
    (0..20).map(|n| format!("tenant {n}")).collect()
}

fn key_of(scope: &str, value: &str) -> Key {
    Key::new(scope, "operation", value).expect("a valid key")
}

/// Marks of 3000 scopes, of which a third is expired.
async fn fill(pool: &PgPool) -> sqlx::Result<()> {
    let fill = "insert into idempotency.record (mode, scope, operation, value, token, completed_at, expires_at)
        select 'mark', 'tenant ' || n::text, 'o', 'k', n, now(), now() + case when n % 3 = 0 then interval '-1 min' else interval '1 h' end
        from generate_series(1, 3000) as n";
    pool.execute(fill).await.map(drop)
}

/// A claim is an `on conflict` of one partition, and a batch of marks one of several. A take-over locks a row of a
/// partition. An operator reads the name of the table, and not of the partition.
#[sqlx::test(migrator = "rig::strict::PARTITIONED_MIGRATOR")]
async fn calls_find_and_take_over_the_records_of_every_partition(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let (scopes, window) = (scopes(), Duration::from_secs(3600));
    let partitions = "select count(distinct tableoid) from idempotency.record";
    for scope in &scopes {
        let called = key_of(scope, "call");
        for replayed in [false, true] {
            assert_eq!(once(&pool, &called, "body").await?.is_replayed(), replayed, "{scope}");
        }
        expire(&pool, &called).await?;
        assert!(!once(&pool, &called, "body").await?.is_replayed(), "{scope}");
        let leased = key_of(scope, "lease");
        Fixture::lapsed(&leased, "body", AT_LEAST_ONCE)?.write(&pool).await?;
        let lease = match LeaseOptions::new(AT_LEAST_ONCE).acquire::<i64, _>(&pool, &leased, "body").await? {
            Acquired::Owner(lease) => lease,
            Acquired::Replayed(_) => panic!("{scope}: lapsed"),
        };
        assert_eq!(lease.attempt(), 2, "{scope}");
        lease.complete(&1_i64).await?;
        let doubt = key_of(scope, "doubt");
        Fixture::lapsed(&doubt, "body", AT_MOST_ONCE)?.write(&pool).await?;
        let shown = operator::show(&pool, &doubt).await?.expect("a record");
        shown.resolve(&pool, &7_i64, window).await?;
    }
    assert_eq!(sqlx::query_scalar::<_, i64>(partitions).fetch_one(&pool).await?, 4);
    assert_eq!(effects(&pool).await, 2 * i64::try_from(scopes.len())?);
    let batch: Vec<Key> = scopes.iter().map(|scope| key_of(scope, "mark")).collect();
    let mut tx = pool.begin().await?;
    let marking = MarkOptions::new(window);
    assert_eq!(marking.mark_many(&mut tx, &batch).await?, vec![Marked::First; batch.len()]);
    assert_eq!(marking.mark_many(&mut tx, &batch).await?, vec![Marked::Duplicate; batch.len()]);
    tx.commit().await?;
    Ok(())
}

/// A `ctid` is unique in one leaf only: without the leaf, a sweep would delete live rows of other leaves too.
#[sqlx::test(migrator = "rig::strict::PARTITIONED_MIGRATOR")]
async fn the_table_is_swept_leaf_by_leaf(pool: PgPool) -> anyhow::Result<()> {
    fill(&pool).await?;
    let janitor = janitor(&pool).batch_size(NonZeroU32::new(50).expect("fifty")).pause(Duration::ZERO);
    let swept = janitor.sweep_once(120).await?;
    assert_eq!((swept.rows(), swept.limited), (120, true));
    let swept = janitor.sweep_once(u64::MAX).await?;
    assert_eq!(swept.rows(), 880);
    assert_eq!(records(&pool).await, 2000);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::PARTITIONED_MIGRATOR")]
async fn a_leaf_that_cannot_be_swept_hides_no_other(pool: PgPool) -> anyhow::Result<()> {
    fill(&pool).await?;
    pool.execute(
        "create function public.kept() returns trigger language plpgsql as 'begin raise ''kept''; end';
         create trigger kept before delete on idempotency.record_0 execute function public.kept()",
    )
    .await?;
    let kept: i64 = sqlx::query_scalar("select count(*) from idempotency.record_0 where expires_at < now()")
        .fetch_one(&pool)
        .await?;
    let error = janitor(&pool).pause(Duration::ZERO).sweep_once(u64::MAX).await.expect_err("a leaf refuses");
    assert!(matches!(&error, Error::Database(error) if error.to_string().contains("kept")), "{error:?}");
    assert!(kept > 0);
    assert_eq!(records(&pool).await, 2000 + kept);
    Ok(())
}

/// The table itself has no pages.
#[sqlx::test(migrator = "rig::strict::PARTITIONED_MIGRATOR")]
async fn the_sizes_are_those_of_all_leaves(pool: PgPool) -> anyhow::Result<()> {
    fill(&pool).await?;
    pool.execute("analyze idempotency.record").await?;
    let leaf: i64 = sqlx::query_scalar("select pg_table_size('idempotency.record_0')").fetch_one(&pool).await?;
    let stats = operator::stats(&pool).await?;
    assert_eq!((stats.records, stats.exact), (3000, true));
    assert!(stats.table_bytes > 2 * u64::try_from(leaf)? && stats.index_bytes > 0, "{stats:?}");
    Ok(())
}

/// A sweep names the leaf, so the policies of the leaf apply.
#[sqlx::test(migrator = "rig::strict::PARTITIONED_MIGRATOR")]
async fn health_names_a_leaf_whose_policies_could_hide_records(pool: PgPool) -> anyhow::Result<()> {
    let granted = "grant usage on schema idempotency to @role;
        grant select, update, delete on all tables in schema idempotency to @role;
        alter table idempotency.record_1 enable row level security";
    with_role(&pool, granted, async |role| {
        let of_role = pool_of(1, &options(&pool).username(role)).await;
        let warnings = operator::health(&of_role, Duration::from_secs(3600)).await?;
        assert_eq!(warnings, [Warning::RowSecurity { tables: "idempotency.record_1".to_owned() }]);
        janitor(&of_role).sweep_once(10).await.expect_err("the server refuses");
        of_role.close().await;
        anyhow::Ok(())
    })
    .await
}
