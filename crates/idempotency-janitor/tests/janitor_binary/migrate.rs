//! `migrate`.

use std::io::Write as _;
use std::process::Command;

use pg_idempotency::{any_language_sql, schema_sql};
use rig::role::with_role;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Executor as _, PgPool};

use crate::support::{Server, assert_fails, command, janitor, janitor_as, janitor_on, text};

#[sqlx::test(migrations = false)]
async fn migrate_creates_the_table_and_sweep_says_when_it_is_missing(pool: PgPool) {
    assert_fails(&janitor_on(&pool, &["sweep"]), 1, "idempotency-janitor migrate");
    for _ in 0..2 {
        let output = janitor_on(&pool, &["migrate"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    assert_eq!(janitor_on(&pool, &["sweep"]).status.code(), Some(0));
}

/// The rights of a janitor's role would not help it.
#[sqlx::test(migrations = false)]
async fn a_role_that_may_not_migrate_is_told_what_it_needs(pool: PgPool) {
    with_role(&pool, "", async |role| {
        assert_fails(&janitor_as(&pool, role, &["migrate"]), 1, "create on the database");
    })
    .await;
}

/// On a server of its own, because a role belongs to all databases of a server. The `search_path` is the default one.
#[tokio::test]
async fn a_role_with_the_name_of_the_schema_is_refused_and_later_warned_of() -> anyhow::Result<()> {
    let server = Server::start(None)?;
    let admin = PgPool::connect(&server.url).await?;
    admin.execute("create role idempotency superuser login").await?;
    let of_role = server.url.replace("postgres@", "idempotency@");
    let run = |url: &str, command_line: &str| command().arg(command_line).env("DATABASE_URL", url).output();
    assert_fails(&run(&of_role, "migrate")?, 1, "nothing was created; rename the role");
    assert_eq!(run(&server.url, "migrate")?.status.code(), Some(0), "by another role");
    let health = run(&of_role, "health")?;
    assert_eq!(health.status.code(), Some(1));
    assert!(text(&health.stdout).contains("the search_path of this role contains the schema"), "{health:?}");
    admin.execute("alter role idempotency set search_path = public").await?;
    assert_eq!(text(&run(&of_role, "health")?.stdout), "healthy\n", "as advised");
    admin.execute("drop schema idempotency cascade").await?;
    assert_eq!(run(&of_role, "migrate")?.status.code(), Some(0), "as advised");
    Ok(())
}

#[test]
fn migrate_prints_its_sql_without_a_database() {
    let output = janitor(&["migrate", "--print"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), schema_sql());
    let output = janitor(&["migrate", "--print", "--any-language"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), format!("{}\n{}", schema_sql(), any_language_sql()));
}

/// The schema of a database, and the applied migrations. `None` where there is no `pg_dump` for this server.
fn dump(pool: &PgPool) -> Option<String> {
    // Without the parameters of sqlx.
    let options = pool.connect_options();
    let mut url = options.to_url_lossy();
    let socket = options.get_socket().map(|socket| format!("host={}", socket.display()));
    url.set_query(socket.as_deref());
    let url = url.to_string();
    let arguments = ["--schema=idempotency", "--inserts", "--no-owner", &url];
    let output = Command::new("pg_dump").args(arguments).env_remove("PGOPTIONS").output().ok()?;
    let error = text(&output.stderr);
    if error.contains("server version mismatch") {
        return None;
    }
    assert!(output.status.success(), "{error}");
    let printed = text(&output.stdout);
    // A key against injection that is new in each dump, and the time of the installation.
    let lines = printed.lines().filter(|line| !line.starts_with(r"\restrict") && !line.starts_with(r"\unrestrict"));
    let quoted = |line: &str| line.split('\'').enumerate().filter(|(at, _)| *at != 3).map(|(_, part)| part).collect();
    Some(lines.map(|line| if line.starts_with("INSERT") { quoted(line) } else { line.to_owned() + "\n" }).collect())
}

/// For Flyway, Alembic, Prisma, sqitch: the printed SQL is a migration of theirs.
#[sqlx::test(migrations = false)]
async fn the_printed_sql_makes_the_database_that_migrate_makes(pool: PgPool) {
    let mut conn = pool.acquire().await.expect("a connection");
    for arguments in [&["migrate"][..], &["migrate", "--any-language"]] {
        assert_eq!(janitor_on(&pool, arguments).status.code(), Some(0));
        let Some(migrated) = dump(&pool) else {
            writeln!(std::io::stderr(), "skipped: there is no pg_dump for this server").expect("stderr");
            return;
        };
        assert_eq!(migrated.contains("CREATE FUNCTION idempotency.ensure("), arguments.len() == 2, "{migrated}");
        conn.execute("drop schema idempotency cascade").await.expect("dropped");
        let printed = text(&janitor(&[arguments, &["--print"]].concat()).stdout);
        conn.execute(AssertSqlSafe(printed)).await.expect("it is SQL");
        assert_eq!(dump(&pool).expect("as before"), migrated);
        assert_eq!(janitor_on(&pool, arguments).status.code(), Some(0), "it finds the migration applied");
        assert_eq!(dump(&pool).expect("as before"), migrated);
        conn.execute("drop schema idempotency cascade").await.expect("dropped");
    }
    let printed = text(&janitor(&["migrate", "--print"]).stdout);
    // It does not install into a schema that another role may own.
    conn.execute("create schema idempotency").await.expect("made");
    let error = conn.execute(AssertSqlSafe(printed)).await.expect_err("the schema exists");
    assert_eq!(error.as_database_error().and_then(|error| error.code()).as_deref(), Some("42P06"));
}
