//! `health`: what keeps a promise from holding.

use std::time::Duration;

use pg_idempotency::operator::{self, Warning};
use serde_json::json;

use crate::connection::Database;
use crate::failure::{Failure, of};
use crate::{Ending, print};

/// Exit code 1 with a line for each warning: what an alert needs.
pub(crate) async fn health(database: &Database, max_lag: Duration, as_json: bool) -> Result<Ending, Failure> {
    let pool = database.pool().await?;
    let warnings = operator::health(&pool, max_lag).await.map_err(of)?;
    print(&if as_json { in_json(&warnings) } else { in_text(&warnings) })?;
    if warnings.is_empty() { Ok(Ending::Done) } else { Err(Failure::Unhealthy) }
}

fn in_json(warnings: &[Warning]) -> String {
    let warnings: Vec<_> =
        warnings.iter().map(|warning| json!({"name": warning.name(), "message": warning.to_string()})).collect();
    format!("{}\n", json!({"healthy": warnings.is_empty(), "warnings": warnings}))
}

fn in_text(warnings: &[Warning]) -> String {
    match warnings {
        [] => "healthy\n".to_owned(),
        _ => warnings.iter().map(|warning| format!("warning: {warning}\n")).collect(),
    }
}
