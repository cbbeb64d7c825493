//! `protect` and `unprotect`: the tables that may be written only inside idempotent operations.

use pg_idempotency::OnEscape;

use crate::connection::{Database, LONG_ANSWER, ask};
use crate::failure::{Failure, of_protecting};
use crate::process::{Ending, print};

/// Protects one table after the other, each in its own transaction. So no table stays locked during the wait for the
/// next table.
pub(crate) async fn protect(database: &Database, tables: &[String], warn: bool) -> Result<Ending, Failure> {
    let pool = database.pool().await?;
    let (on_escape, then) = match warn {
        true => (OnEscape::Warn, "gives a warning"),
        false => (OnEscape::Refuse, "is refused"),
    };
    for table in tables {
        ask(LONG_ANSWER, pg_idempotency::protect(&pool, table, on_escape)).await.map_err(of_protecting)?;
        print(&format!("{table}: a write outside an idempotent operation {then}\n"))?;
    }
    Ok(Ending::Done)
}

pub(crate) async fn unprotect(database: &Database, tables: &[String]) -> Result<Ending, Failure> {
    let pool = database.pool().await?;
    for table in tables {
        ask(LONG_ANSWER, pg_idempotency::unprotect(&pool, table)).await.map_err(of_protecting)?;
        print(&format!("{table}: not protected\n"))?;
    }
    Ok(Ending::Done)
}
