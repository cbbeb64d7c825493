//! `protect` and `unprotect`: the tables that may be written only inside idempotent operations.

use pg_idempotency::OnEscape;
use serde_json::json;

use crate::connection::{Database, LONG_ANSWER, ask};
use crate::failure::{Failure, of_protecting};
use crate::process::{Ending, json_line, print};

/// Protects one table after the other, each in its own transaction. So no table stays locked during the wait for the
/// next table. The line about a table is printed at once, because the protection of a later table may fail.
pub(crate) async fn protect(
    database: &Database,
    tables: &[String],
    warn: bool,
    as_json: bool,
) -> Result<Ending, Failure> {
    let pool = database.pool().await?;
    let (on_escape, protection, then) = match warn {
        true => (OnEscape::Warn, "warn", "a write outside an idempotent operation gives a warning"),
        false => (OnEscape::Refuse, "refuse", "a write outside an idempotent operation is refused"),
    };
    for table in tables {
        ask(LONG_ANSWER, pg_idempotency::protect(&pool, table, on_escape)).await.map_err(of_protecting)?;
        print(&line(table, protection, then, as_json))?;
    }
    Ok(Ending::Done)
}

pub(crate) async fn unprotect(database: &Database, tables: &[String], as_json: bool) -> Result<Ending, Failure> {
    let pool = database.pool().await?;
    for table in tables {
        ask(LONG_ANSWER, pg_idempotency::unprotect(&pool, table)).await.map_err(of_protecting)?;
        print(&line(table, "none", "not protected", as_json))?;
    }
    Ok(Ending::Done)
}

fn line(table: &str, protection: &str, then: &str, as_json: bool) -> String {
    if as_json { json_line(&json!({"table": table, "protection": protection})) } else { format!("{table}: {then}\n") }
}
