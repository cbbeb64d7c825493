//! The settings of a database that change the form of what the server sends. What the tool prints stays the same.

use pg_idempotency::Key;
use sqlx::{AssertSqlSafe, PgPool};

use crate::support::{AT_MOST_ONCE, in_doubt, janitor_on, lapsed, text};

const SETTINGS: [&str; 9] = [
    "bytea_output = escape",
    "standard_conforming_strings = off",
    "DateStyle = 'German, YMD'",
    "IntervalStyle = postgres_verbose",
    "IntervalStyle = sql_standard",
    "IntervalStyle = iso_8601",
    "TimeZone = 'Australia/Lord_Howe'",
    "TimeZone = '<+1234>-12:34'",
    "extra_float_digits = -15",
];

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn no_form_of_the_server_changes_what_is_printed(pool: PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql("create table orders (id int)").execute(&pool).await?;
    lapsed(&pool, &Key::new("user:1", "POST /texts", "at most once")?, AT_MOST_ONCE).await?;
    in_doubt(&pool, &Key::new("user:1", "POST /texts", "in steps")?).await?;
    let database: String = sqlx::query_scalar("select quote_ident(current_database())").fetch_one(&pool).await?;
    let commands: [&[&str]; 6] = [
        &["migrate"],
        &["protect", "orders"],
        &["unsettled", "--json"],
        &["show", "user:1", "POST /texts", "at most once", "--json"],
        &["show", "user:1", "POST /texts", "in steps", "--json"],
        &["health", "--json"],
    ];
    let said = || {
        commands.map(|command| {
            let output = janitor_on(&pool, command);
            (command, output.status.code(), text(&output.stdout), text(&output.stderr))
        })
    };
    let usual = said();
    for setting in SETTINGS {
        let set = format!("alter database {database} set {setting}");
        sqlx::raw_sql(AssertSqlSafe(set)).execute(&pool).await?;
        for (found, usual) in said().iter().zip(&usual) {
            assert_eq!(found, usual, "under {setting}");
        }
        sqlx::raw_sql(AssertSqlSafe(format!("alter database {database} reset all"))).execute(&pool).await?;
    }
    Ok(())
}
