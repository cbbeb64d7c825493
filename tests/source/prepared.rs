//! Prepares a statement of the library with values of the types of its parameters.

use sqlx::{AssertSqlSafe, Executor as _, PgConnection};

use crate::source::Statement;

impl Statement {
    /// Prepares the statement under the name `planned`, and returns a command that executes it. The values are real ones,
    /// because the planner estimates with them: the key is that of a record with the number 15000.
    pub(crate) async fn prepare(&self, conn: &mut PgConnection) -> sqlx::Result<String> {
        conn.execute(AssertSqlSafe(format!("prepare planned as {}", self.sql))).await?;
        let parameters: Vec<String> = sqlx::query_scalar(
            "select unnest(parameter_types)::text from pg_prepared_statements where name = 'planned'",
        )
        .persistent(false)
        .fetch_all(conn)
        .await?;
        let values = parameters.iter().enumerate().map(|(n, parameter)| value_of(&self.sql, n + 1, parameter));
        let values = values.collect::<Vec<_>>().join(", ");
        Ok(if values.is_empty() { "execute planned".to_owned() } else { format!("execute planned ({values})") })
    }
}

/// A value for the parameter `$n` of a statement.
fn value_of(sql: &str, n: usize, parameter: &str) -> &'static str {
    let cast_again = |to: &str| sql.contains(&format!("${n}::text::{to}"));
    match (parameter, n) {
        ("text", 1) => "'tenant'",
        ("text", 2) => "'operation'",
        ("text", 3) => "'15000'",
        ("text", _) if cast_again("timestamp") => "'2020-01-01'",
        ("text", _) if cast_again("int4") => "'0'",
        ("text", _) if cast_again("jsonb") => "'{}'",
        ("text", _) => "'transaction'",
        ("text[]", 1) => "array['tenant', 'tenant']",
        ("text[]", 2) => "array['operation', 'operation']",
        ("text[]", 3) => "array['15000', '5000']",
        ("text[]", _) => "array['step']",
        ("bigint[]", _) => "array[1, 2]",
        ("bigint" | "integer", _) => "1",
        ("smallint", _) => "200",
        ("real", _) => "100",
        ("bytea", _) => "idempotency.fingerprint('body')",
        ("interval", _) => "interval '1 h'",
        ("timestamp with time zone", _) => "now()",
        ("boolean", _) => "true",
        (other, _) => panic!("${n} is of type {other}"),
    }
}
