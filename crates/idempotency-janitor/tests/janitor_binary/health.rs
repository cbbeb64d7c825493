//! `health`.

use std::process::Output;

use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool};

use crate::support::{Server, assert_fails, command, expired, granted_to, janitor_on, json, text};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn health_warns_of_what_breaks_the_promise(pool: PgPool) -> anyhow::Result<()> {
    let set = format!(
        "alter database {:?} set synchronous_commit = off",
        pool.connect_options().get_database().expect("a database")
    );
    sqlx::raw_sql(AssertSqlSafe(set)).execute(&pool).await?;
    assert!(text(&janitor_on(&pool, &["health"]).stdout).contains("synchronous_commit is off"));
    sqlx::raw_sql("alter table idempotency.record set unlogged").execute(&pool).await?;
    expired(&pool, 1).await?;
    let output = janitor_on(&pool, &["health", "--max-lag", "0s"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1));
    for part in ["unlogged", "due for"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    sqlx::raw_sql("drop schema idempotency cascade").execute(&pool).await?;
    assert_fails(&janitor_on(&pool, &["health"]), 1, "idempotency-janitor migrate");
    Ok(())
}

/// New sessions have what the postmaster has read by then.
async fn reload(server: &Server, conn: &mut PgConnection, standbys: &str) -> anyhow::Result<()> {
    sqlx::raw_sql("select pg_reload_conf()").execute(conn).await?;
    let started = std::time::Instant::now();
    loop {
        let mut new = PgConnection::connect(&server.url).await?;
        let seen: String = sqlx::query_scalar("show synchronous_standby_names").fetch_one(&mut new).await?;
        new.close().await?;
        if seen == standbys {
            return Ok(());
        }
        assert!(started.elapsed().as_secs() < 30, "it is read: {seen:?}");
    }
}

/// On a server of its own: what is set for a role holds in all databases of a server.
#[tokio::test]
async fn health_sees_what_is_set_for_other_roles() -> anyhow::Result<()> {
    let server = Server::start(None)?;
    let mut conn = PgConnection::connect(&server.url).await?;
    pg_idempotency::migrate(&PgPool::connect(&server.url).await?).await?;
    for prepare in [
        "create database other",
        "create role shop_app login",
        "create role grouped nologin",
        "create role watcher login",
        "grant usage on schema idempotency to watcher",
        "grant select on idempotency.record, idempotency._sqlx_migrations to watcher",
    ] {
        sqlx::raw_sql(prepare).execute(&mut conn).await?;
    }
    // As a role that may read the two tables and nothing else.
    let url = server.url.replace("postgres@", "watcher@");
    let health = |arguments: &[&str]| -> Output {
        command().arg("health").args(arguments).env("DATABASE_URL", &url).output().expect("the binary runs")
    };
    let assert_healthy = |why: &str| {
        let output = health(&[]);
        assert_eq!((output.status.code(), &*text(&output.stdout)), (Some(0), "healthy\n"), "{why}");
    };
    assert_healthy("as installed");
    let report = serde_json::json!({"healthy": true, "warnings": [], "protected": {}});
    assert_eq!(json(&health(&["--json"])), report);

    // A sweep that lags is another code than a promise that does not hold.
    let pool = PgPool::connect(&server.url).await?;
    expired(&pool, 1).await?;
    let output = health(&["--max-lag", "0s"]);
    assert_eq!((output.status.code(), &*text(&output.stderr)), (Some(3), ""), "{output:?}");
    assert!(text(&output.stdout).contains("due for"), "{output:?}");
    pg_idempotency::Janitor::new(pool).grace(std::time::Duration::ZERO).sweep_once(10).await?;
    assert_healthy("swept");

    for harmless in [
        "alter role grouped set synchronous_commit = off",
        "alter role shop_app in database other set synchronous_commit = off",
        "alter database other set synchronous_commit = off",
        "alter role shop_app set synchronous_commit = remote_write",
        "alter role shop_app set synchronous_commit = local",
    ] {
        sqlx::raw_sql(AssertSqlSafe(harmless)).execute(&mut conn).await?;
        assert_healthy(harmless);
    }
    sqlx::raw_sql("alter system set synchronous_standby_names = 'standby'").execute(&mut conn).await?;
    reload(&server, &mut conn, "standby").await?;
    let output = health(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("synchronous_commit is local for role \"shop_app\""), "{output:?}");
    sqlx::raw_sql("alter system reset synchronous_standby_names").execute(&mut conn).await?;
    reload(&server, &mut conn, "").await?;
    sqlx::raw_sql("alter role shop_app reset synchronous_commit").execute(&mut conn).await?;
    assert_healthy("reset");

    for (set, reset, whose, within) in [
        (
            "alter role shop_app set synchronous_commit = off",
            "alter role shop_app reset all",
            "\"shop_app\"",
            "all databases",
        ),
        (
            "alter role shop_app in database postgres set synchronous_commit = 'FALSE'",
            "alter role shop_app in database postgres reset all",
            "\"shop_app\"",
            "\"postgres\"",
        ),
        ("alter role all set synchronous_commit = no", "alter role all reset all", "all roles", "all databases"),
        (
            "alter database postgres set synchronous_commit = '0'",
            "alter database postgres reset all",
            "all roles",
            "\"postgres\"",
        ),
    ] {
        sqlx::raw_sql(set).execute(&mut conn).await?;
        let output = health(&["--json"]);
        assert_fails(&output, 1, "see above");
        let report = json(&output);
        let warnings = report["warnings"].as_array().expect("warnings");
        // The connection of `health` may have the setting, too.
        let said = |warning: &serde_json::Value| {
            let message = warning["message"].as_str().expect("a message");
            warning["name"] == "not_durable" && [whose, within, "is off"].iter().all(|part| message.contains(part))
        };
        assert!(warnings.iter().any(said), "{set}: {warnings:?}");
        assert_eq!(report["healthy"], false);
        sqlx::raw_sql(reset).execute(&mut conn).await?;
        assert_healthy(reset);
    }
    Ok(())
}

/// Whether this role's `health` names the other one, as the owner of something.
fn names(server: &Server, role: &str, owner: &str) -> bool {
    let url = server.url.replace("postgres@", &format!("{role}@"));
    let output = command().args(["health", "--json"]).env("DATABASE_URL", url).output().expect("the binary runs");
    let warnings = json(&output)["warnings"].as_array().expect("warnings").clone();
    let named = warnings.iter().find(|warning| warning["name"] == "untrusted_schema");
    assert_eq!(output.status.code(), Some(i32::from(!warnings.is_empty())), "{warnings:?}");
    assert_eq!(warnings.len(), usize::from(named.is_some()), "{warnings:?}");
    named.is_some_and(|warning| warning["message"].as_str().is_some_and(|said| said.contains(&format!("{owner:?}"))))
}

/// On a server of its own, because roles belong to all databases of a server.
#[tokio::test]
async fn health_and_migrate_notice_a_schema_that_somebody_else_has_created() -> anyhow::Result<()> {
    let server = Server::start(None)?;
    let mut conn = PgConnection::connect(&server.url).await?;
    for prepare in [
        "create role shop_deploy login",
        "create role shop_janitor login",
        "create role eve login",
        "grant create on database postgres to shop_deploy, eve",
        "grant shop_deploy to postgres",
    ] {
        sqlx::raw_sql(prepare).execute(&mut conn).await?;
    }
    let as_role = async |role: &str| PgConnection::connect(&server.url.replace("postgres@", &format!("{role}@"))).await;
    let grants = granted_to("shop_janitor").replace("@role", "shop_janitor");

    // As documented: a role of its own migrates, and the database's owner is a member of it.
    let deploy = PgPool::connect(&server.url.replace("postgres@", "shop_deploy@")).await?;
    pg_idempotency::migrate(&deploy).await?;
    sqlx::raw_sql(AssertSqlSafe(&*grants)).execute(&mut conn).await?;
    assert!(!names(&server, "shop_janitor", "shop_deploy"));
    assert!(!names(&server, "postgres", "shop_deploy"));

    sqlx::raw_sql("drop schema idempotency cascade").execute(&mut conn).await?;

    // Before anybody migrates, eve installs all of it.
    let mut eve = as_role("eve").await?;
    sqlx::raw_sql(AssertSqlSafe(pg_idempotency::schema_sql())).execute(&mut eve).await?;
    sqlx::raw_sql(AssertSqlSafe(&*grants)).execute(&mut eve).await?;
    // Up to PostgreSQL 15 a role may grant itself.
    let _ = sqlx::raw_sql("grant eve to postgres, shop_janitor").execute(&mut eve).await;
    assert!(names(&server, "shop_janitor", "eve"));
    assert!(names(&server, "postgres", "eve"));

    // No command runs what she has put there: a rollback does not undo that a sequence has advanced.
    sqlx::raw_sql(
        "create sequence idempotency.bites;
         create function idempotency.bite() returns boolean language plpgsql as
            'begin perform pg_catalog.nextval(''idempotency.bites''); return true; end';
         create or replace function idempotency.with_partitions(relation regclass) returns setof oid language plpgsql as
            'begin perform idempotency.bite(); end';
         create or replace function idempotency.protect(relation regclass, on_escape text default 'refuse')
            returns void language sql as 'select idempotency.bite()';
         create or replace function idempotency.unprotect(relation regclass)
            returns void language sql as 'select idempotency.bite()';
         alter table idempotency.record rename to kept;
         insert into idempotency.kept (mode, scope, operation, value, token, expires_at)
            values ('at_most_once', 's', 'o', 'v', 1, '2020-01-01');
         create view idempotency.record as select * from idempotency.kept where idempotency.bite();
         grant select, insert, update, delete on idempotency.record to public",
    )
    .execute(&mut eve)
    .await?;
    sqlx::raw_sql("create table orders (id int)").execute(&mut conn).await?;
    let decided = ["s", "o", "v", "--reason", "a test", "--seen", "nothing"];
    for arguments in [
        &["migrate"][..],
        &["protect", "orders"],
        &["unprotect", "orders"],
        &["health"],
        &["stats"],
        &["unsettled"],
        &["show", "s", "o", "v"],
        &["sweep"],
        &[&["resolve", "--response", "1"][..], &decided].concat(),
        &[&["release"][..], &decided].concat(),
        &[&["grant"][..], &decided].concat(),
        &[&["forget"][..], &decided].concat(),
    ] {
        let output = command().args(arguments).env("DATABASE_URL", &server.url).output().expect("the binary runs");
        let bites: i64 =
            sqlx::query_scalar("select count(*) from idempotency.bites where is_called").fetch_one(&mut eve).await?;
        assert_eq!((output.status.code(), bites), (Some(1), 0), "{arguments:?}: {output:?}");
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(said.contains("\"eve\" owns schema idempotency"), "{arguments:?}: {said}");
    }
    Ok(())
}
