//! Three ways to install, which know of each other, from any number of processes.

use std::time::Duration;

use pg_idempotency::operator::{Warning, health};
use pg_idempotency::{
    Error, Idempotency, Incompatible, MIGRATOR, SetupError, migrate, migrate_any_language, schema_sql,
};
use rig::database::backend;
use rig::role::with_role;
use sqlx::{Executor as _, PgPool};

use crate::support::{connect, create_open_effects, once, options, pool_of};

async fn works(pool: &PgPool) {
    create_open_effects(pool).await;
    let _ = once(pool, &crate::support::key("a"), "body").await.expect("performed");
}

/// Any role can take its lock, and a session may hold it for ever.
#[sqlx::test(migrations = false)]
async fn a_migration_does_not_wait_for_ever(pool: PgPool) -> anyhow::Result<()> {
    let mut other = pool.begin().await?;
    sqlx::query("select pg_advisory_xact_lock($1)").bind(i64::from_be_bytes(*b"pgidempo")).execute(&mut *other).await?;
    let impatient = pool_of(1, &options(&pool).options([("lock_timeout", "300ms")])).await;
    let error = migrate(&impatient).await.expect_err("the lock is taken");
    assert!(matches!(error, SetupError::Locked { .. }) && error.is_transient(), "{error:?}");
    let said = error.to_string();
    let query = said.split('`').nth(1).expect("a query").to_owned();
    let found: (i32, String) =
        sqlx::query_as(sqlx::AssertSqlSafe(query.replace(", application_name, state", ""))).fetch_one(&pool).await?;
    assert_eq!(found, (backend(&mut other).await?, "postgres".to_owned()), "{said}");
    other.rollback().await?;
    migrate(&impatient).await?;
    works(&pool).await;
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn sixteen_installers_at_once_all_succeed(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(16, &pool.connect_options()).await;
    for round in 0..10 {
        let installers: Vec<_> = (0..16)
            .map(|_| {
                let pool = pool.clone();
                tokio::spawn(async move { migrate(&pool).await })
            })
            .collect();
        for installer in installers {
            installer.await?.unwrap_or_else(|error| panic!("round {round}: {error:?}"));
        }
        pool.execute("drop schema idempotency cascade").await?;
    }
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn every_way_of_installing_finds_the_others(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    for first in ["migrate", "MIGRATOR", "schema_sql"] {
        for second in ["migrate", "MIGRATOR"] {
            for way in [first, second] {
                match way {
                    "migrate" => migrate(&pool).await?,
                    "MIGRATOR" => MIGRATOR.run(&mut conn).await?,
                    _ => conn.execute(sqlx::AssertSqlSafe(schema_sql())).await.map(|_| ())?,
                }
            }
            let versions: Vec<i64> =
                sqlx::query_scalar("select version from idempotency._sqlx_migrations").fetch_all(&mut conn).await?;
            assert_eq!(versions, [1], "{first}, {second}");
            conn.execute("drop schema idempotency cascade").await?;
        }
    }
    Ok(())
}

/// src/guide/migrations.md: sqlx runs a file in a transaction, so BEGIN and COMMIT are removed from it. The role is no
/// superuser.
#[sqlx::test(migrations = false)]
async fn the_printed_sql_is_a_migration_of_the_application(pool: PgPool) -> anyhow::Result<()> {
    use sqlx::SqlSafeStr as _;
    use sqlx::migrate::{Migration, MigrationType, Migrator};
    let kept: Vec<_> =
        schema_sql().lines().filter(|line| !["begin;", "commit;"].contains(line)).map(str::to_owned).collect();
    let sql = sqlx::AssertSqlSafe(kept.join("\n")).into_sql_str();
    let own = Migration::new(1, "pg idempotency".into(), MigrationType::Simple, sql, false);

    with_role(&pool, &may_create(&pool).await?, async |role| {
        let as_role = pool_of(1, &options(&pool).options([("role", role)])).await;
        for _ in 0..2 {
            Migrator::with_migrations(vec![own.clone()]).run(&as_role).await?;
            migrate(&as_role).await?;
            MIGRATOR.run(&as_role).await?;
        }
        works(&pool).await;
        as_role.close().await;
        anyhow::Ok(())
    })
    .await
}

/// Rights of a role that owns what it installs.
async fn may_create(pool: &PgPool) -> anyhow::Result<String> {
    let database: String = sqlx::query_scalar("select current_database()").fetch_one(pool).await?;
    Ok(format!("grant create on database \"{database}\" to @role; grant create on schema public to @role"))
}

/// A service under the least privileges migrates at every start, and nothing happens, not even a refusal. Its calls
/// work.
#[sqlx::test(migrations = false)]
async fn a_current_schema_needs_no_right_to_create_one(pool: PgPool) -> anyhow::Result<()> {
    migrate(&pool).await?;
    let least = "grant usage on schema idempotency to @role;
        grant select, insert, update on idempotency.record to @role;
        grant select on idempotency._sqlx_migrations to @role";
    with_role(&pool, least, async |role| {
        let as_role = pool_of(1, &options(&pool).options([("role", role)])).await;
        migrate(&as_role).await?;
        let (calls, key) = (Idempotency::new(), crate::support::key("a"));
        assert!(!calls.run(&as_role, &key, "body", async |_| Ok::<_, Error>(1)).await?.is_replayed());
        migrate_any_language(&pool).await?;
        migrate_any_language(&as_role).await?;
        anyhow::Ok(())
    })
    .await
}

#[sqlx::test(migrations = false)]
async fn a_migration_that_was_edited_is_an_error(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    migrate(&pool).await?;
    conn.execute("update idempotency._sqlx_migrations set checksum = ''").await?;
    let error = migrate(&pool).await.expect_err("another checksum");
    assert!(matches!(error, SetupError::Other(Error::Incompatible(Incompatible::Schema { .. }))), "{error:?}");
    Ok(())
}

/// During a roll-out an old process starts on the schema that the new release has migrated.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_older_release_starts_on_a_newer_schema(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    conn.execute(
        "alter table idempotency.record add column note text;
         insert into idempotency._sqlx_migrations (version, description, success, checksum, execution_time)
         values (2, 'add note', true, '\\x02', 0)",
    )
    .await?;
    migrate(&pool).await?;
    MIGRATOR.run(&mut conn).await?;
    health(&pool, Duration::from_secs(3600)).await?;
    works(&pool).await;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_schema_bars_impossible_records_by_name(pool: PgPool) -> anyhow::Result<()> {
    let base = "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at";
    for (columns, values, check) in [
        ("", "'nonsense', 's', 'o', 'k', '\\x0100', 1, now()", "known_mode"),
        ("", "'transaction', '', 'o', 'k', '\\x0100', 1, now()", "key_length"),
        ("", "'transaction', 's', 'o', repeat('é', 128), '\\x0100', 1, now()", "key_length"),
        ("", "'transaction', 's', 'o', 'k', null, 1, now()", "fingerprint_unless_mark"),
        ("", "'transaction', 's', 'o', 'k', '', 1, now()", "fingerprint_is_versioned"),
        (", attempt", "'transaction', 's', 'o', 'k', '\\x0100', 1, now(), 0", "attempts_count_from_one"),
        ("", "'mark', 's', 'o', 'k', null, 1, now()", "mark_is_complete"),
        (", lease_until", "'transaction', 's', 'o', 'k', '\\x0100', 1, now(), now()", "deadline_only_for_leases"),
        ("", "'at_most_once', 's', 'o', 'k', '\\x0100', 1, now()", "unfinished_lease_has_a_deadline"),
        (", response_body", "'transaction', 's', 'o', 'k', '\\x0100', 1, now(), ''", "response_only_when_completed"),
        (
            ", completed_at, lease_until",
            "'at_most_once', 's', 'o', 'k', '\\x0100', 1, now(), now(), now()",
            "completed_has_no_lease",
        ),
    ] {
        let error =
            pool.execute(sqlx::AssertSqlSafe(format!("{base}{columns}) values ({values})"))).await.expect_err("barred");
        let constraint = error.as_database_error().and_then(|error| error.constraint());
        assert_eq!(constraint, Some(check), "{values}");
    }
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn a_table_that_was_dropped_is_not_taken_for_current(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    migrate(&pool).await?;
    conn.execute("drop table idempotency.record").await?;
    let error = migrate(&pool).await.expect_err("it is gone");
    assert!(
        matches!(&error, SetupError::Other(Error::Incompatible(Incompatible::Schema { problem, .. })) if problem.contains("not there")),
        "{error:?}"
    );
    Ok(())
}

/// In the order of the printed SQL: the table of the applied migrations, and the row of the migration.
#[sqlx::test(migrations = false)]
async fn a_copy_of_the_schema_without_its_data_is_told_what_to_run(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    let printed = schema_sql();
    let from = |start: &str| {
        let statement = printed.split_once(start).and_then(|(_, rest)| rest.split_once(';')).expect("printed").0;
        format!("{start}{statement};")
    };
    let told = [from("create table if not exists idempotency._sqlx_migrations"), from("insert into idempotency._sqlx")];
    for lost in ["delete from idempotency._sqlx_migrations", "drop table idempotency._sqlx_migrations"] {
        migrate(&pool).await?;
        conn.execute(lost).await?;
        let error = migrate(&pool).await.expect_err("the table is there");
        assert!(
            matches!(&error, SetupError::Other(Error::Incompatible(Incompatible::Schema { problem, .. })) if problem.contains("--print")),
            "{error:?}"
        );
        conn.execute(sqlx::AssertSqlSafe(told.concat())).await?;
        migrate(&pool).await?;
        MIGRATOR.run(&mut conn).await?;
        health(&pool, Duration::from_secs(3600)).await?;
    }
    works(&pool).await;
    Ok(())
}

/// The first start creates the schema, so the path finds it only then.
#[sqlx::test(migrations = false)]
async fn a_schema_that_would_be_in_the_search_path_is_not_created(pool: PgPool) -> anyhow::Result<()> {
    let in_path = pool_of(1, &options(&pool).options([("search_path", "idempotency, public")])).await;
    for with_functions in [false, true] {
        let refused = if with_functions { migrate_any_language(&in_path).await } else { migrate(&in_path).await };
        assert!(
            matches!(&refused, Err(SetupError::Other(Error::Incompatible(Incompatible::Schema { problem, .. })))
                if problem.contains("nothing was created") && problem.contains("set search_path")),
            "{refused:?}"
        );
        let created = "select count(*) from pg_namespace where nspname = 'idempotency'";
        assert_eq!(sqlx::query_scalar::<_, i64>(created).fetch_one(&pool).await?, 0);
    }
    migrate(&pool).await?;
    migrate(&in_path).await?;
    for (of, warns) in [(&pool, false), (&in_path, true)] {
        let warnings = health(of, Duration::from_secs(3600)).await?;
        assert_eq!(warnings.contains(&Warning::InSearchPath), warns, "{warnings:?}");
    }
    Ok(())
}

/// The page drops the schema next.
#[sqlx::test(migrations = false)]
async fn the_uninstallation_lists_the_tables_that_are_not_the_crates(pool: PgPool) -> anyhow::Result<()> {
    let page = include_str!("../../src/guide/production.md");
    let uninstall = page.split_once("## Uninstall").expect("a part of the page").1;
    let list = uninstall.split_once("```sql\n").and_then(|(_, sql)| sql.split_once(';')).expect("a statement").0;
    assert!(list.starts_with("select "), "{list}");
    let listed = async || sqlx::query_scalar::<_, String>(sqlx::AssertSqlSafe(list)).fetch_all(&pool).await;
    migrate_any_language(&pool).await?;
    assert_eq!(listed().await?, [""; 0]);
    pool.execute(include_str!("../../migrations/partitions.sql")).await?;
    assert_eq!(listed().await?, [""; 0], "sixteen partitions");
    pool.execute(
        "create table idempotency.orders (id serial); create view idempotency.open_orders as select 1;
         create table idempotency.parts (id int) partition by hash (id);
         create table idempotency.parts_0 partition of idempotency.parts for values with (modulus 1, remainder 0)",
    )
    .await?;
    assert_eq!(listed().await?, ["open_orders", "orders", "orders_id_seq", "parts", "parts_0"]);
    Ok(())
}

/// A stranger's schema: they could replace the functions that every call executes.
#[sqlx::test(migrations = false)]
async fn nothing_installs_into_the_schema_of_a_stranger(pool: PgPool) -> anyhow::Result<()> {
    let squat = format!("{}; set role @role; create schema idempotency; reset role", may_create(&pool).await?);
    with_role(&pool, &squat, async |_| {
        let refused = connect(&pool).await.execute(sqlx::AssertSqlSafe(schema_sql())).await;
        let refused = refused.expect_err("the schema exists");
        assert_eq!(refused.as_database_error().and_then(|error| error.code()).as_deref(), Some("42P06"), "{refused:?}");
        let migrated = migrate(&pool).await;
        assert!(
            matches!(migrated, Err(SetupError::Other(Error::Incompatible(Incompatible::Schema { .. })))),
            "{migrated:?}"
        );
        let objects = "select count(*) from pg_class where relnamespace = 'idempotency'::regnamespace::oid";
        assert_eq!(sqlx::query_scalar::<_, i64>(objects).fetch_one(&pool).await?, 0);
        anyhow::Ok(())
    })
    .await
}
