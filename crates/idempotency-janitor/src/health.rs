//! `health`: shows settings that break a promise, and the protected tables.

use std::collections::BTreeMap;
use std::time::Duration;

use pg_idempotency::OnEscape;
use pg_idempotency::operator::{self, Warning};
use serde_json::json;

use crate::connection::{ANSWER, Database, ask};
use crate::failure::{Failure, printable};
use crate::process::{Ending, json_line, print};

/// Prints a line for each warning. A sweep that lags has its own exit code, because only a broken promise has to wake a
/// person.
pub(crate) async fn health(database: &Database, max_lag: Duration, as_json: bool) -> Result<Ending, Failure> {
    let pool = database.pool().await?;
    let warnings = ask(ANSWER, operator::health(&pool, max_lag)).await?;
    // These two kinds of warnings mean that the schema or one of its tables could not be read. `operator::health` then
    // returns warnings of this kind only, so the first warning shows whether this is the case.
    let is_unread = matches!(warnings.first(), Some(Warning::UntrustedSchema { .. } | Warning::RowSecurity { .. }));
    let protected = match is_unread {
        true => Protected::new(),
        false => ask(ANSWER, operator::protected(&pool)).await?,
    };
    print(&if as_json { in_json(&warnings, &protected) } else { in_text(&warnings, &protected) })?;
    match &warnings[..] {
        [] => Ok(Ending::Done),
        [Warning::SweepLags { .. }] => Ok(Ending::WorkLeft),
        _ => Err(Failure::Unhealthy),
    }
}

type Protected = BTreeMap<String, OnEscape>;

fn in_json(warnings: &[Warning], protected: &Protected) -> String {
    let warnings: Vec<_> =
        warnings.iter().map(|warning| json!({"name": warning.name(), "message": warning.to_string()})).collect();
    let protected: BTreeMap<_, _> =
        protected.iter().map(|(table, on_escape)| (table, if warns(on_escape) { "warn" } else { "refuse" })).collect();
    json_line(&json!({"healthy": warnings.is_empty(), "warnings": warnings, "protected": protected}))
}

fn in_text(warnings: &[Warning], protected: &Protected) -> String {
    let mut text = match warnings {
        [] => "healthy\n".to_owned(),
        _ => warnings.iter().map(|warning| format!("warning: {}\n", printable(&warning.to_string()))).collect(),
    };
    for (table, on_escape) in protected {
        text += &format!("protected{}: {}\n", if warns(on_escape) { ", with warnings" } else { "" }, printable(table));
    }
    text
}

fn warns(on_escape: &OnEscape) -> bool {
    matches!(on_escape, OnEscape::Warn)
}
