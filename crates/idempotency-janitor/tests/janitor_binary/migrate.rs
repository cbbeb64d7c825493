//! `migrate`.

use pg_idempotency::schema_sql;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::support::{assert_fails, janitor, janitor_on, text};

#[sqlx::test(migrations = false)]
async fn migrate_creates_the_table_and_sweep_says_when_it_is_missing(_: PgPoolOptions, options: PgConnectOptions) {
    assert_fails(&janitor_on(&options, &["sweep"]), 1, "idempotency-janitor migrate");
    for _ in 0..2 {
        let output = janitor_on(&options, &["migrate"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    assert_eq!(janitor_on(&options, &["sweep"]).status.code(), Some(0));
}

#[test]
fn migrate_prints_its_sql_without_a_database() {
    let output = janitor(&["migrate", "--print"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), schema_sql());
}
