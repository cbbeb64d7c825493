//! `health`: what keeps a promise from holding.

use std::time::Duration;

use pg_idempotency::operator::{self, Warning};
use serde_json::json;

use crate::connection::Database;
use crate::failure::{Failure, of};
use crate::{Ending, print};

/// Exit code 1 with a line for each warning: what an alert needs.
pub(crate) async fn health(
    database: &Database,
    max_lag: Duration,
    deep: bool,
    as_json: bool,
) -> Result<Ending, Failure> {
    let pool = database.pool().await?;
    let mut warnings = operator::health(&pool, max_lag).await.map_err(of)?;
    if deep {
        warnings.extend(operator::deep_health(&pool).await.map_err(of)?);
    }
    let compression = operator::response_compression(&pool).await.map_err(of)?;
    print(&if as_json { in_json(&warnings, &compression) } else { in_text(&warnings, &compression) })?;
    if warnings.is_empty() { Ok(Ending::Done) } else { Err(Failure::Unhealthy) }
}

fn in_json(warnings: &[Warning], compression: &str) -> String {
    let warnings: Vec<_> =
        warnings.iter().map(|warning| json!({"name": warning.name(), "message": warning.to_string()})).collect();
    format!("{}\n", json!({"healthy": warnings.is_empty(), "warnings": warnings, "response_compression": compression}))
}

fn in_text(warnings: &[Warning], compression: &str) -> String {
    let verdict: String = match warnings {
        [] => "healthy\n".to_owned(),
        _ => warnings.iter().map(|warning| format!("warning: {warning}\n")).collect(),
    };
    format!("{verdict}responses are compressed by {compression}\n")
}
