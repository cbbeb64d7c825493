//! `stats`: the content of the table.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use pg_idempotency::operator::{self, Stats};
use serde_json::json;

use crate::connection::{ANSWER, Database, ask};
use crate::failure::Failure;
use crate::process::{Ending, json_line, print};
use crate::time::{moment, span};

pub(crate) async fn stats(database: &Database, json: bool) -> Result<Ending, Failure> {
    let stats = ask(ANSWER, operator::stats(&database.pool().await?)).await?;
    print(&if json { as_json(&stats) } else { as_text(&stats) })
}

fn as_json(stats: &Stats) -> String {
    let groups: Vec<_> = stats
        .groups
        .iter()
        .map(|group| {
            json!({
                "mode": group.mode.as_str(),
                "operation": group.operation,
                "state": group.state.to_string(),
                "records": group.records,
                "oldest": group.oldest.to_rfc3339(),
            })
        })
        .collect();
    let report = json!({
        "exact": stats.exact,
        "records": stats.records,
        "table_bytes": stats.table_bytes,
        "index_bytes": stats.index_bytes,
        "dead_rows": stats.dead_rows,
        "oldest_expired_seconds": stats.oldest_expired.map(|oldest| oldest.as_secs_f64()),
        "groups": groups,
    });
    json_line(&report)
}

fn as_text(stats: &Stats) -> String {
    let about = if stats.exact { "" } else { "~" };
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(["mode", "operation", "state", "records", "oldest claimed"]);
    for group in &stats.groups {
        table.add_row([
            group.mode.clone(),
            group.operation.clone(),
            group.state.to_string(),
            format!("{about}{}", group.records),
            moment(group.oldest),
        ]);
    }
    if let Some(column) = table.column_mut(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!(
        "{table}\n\n{about}{} records, table {}, indexes {}, {} dead rows\n{}\n",
        stats.records,
        size(stats.table_bytes),
        size(stats.index_bytes),
        stats.dead_rows,
        match stats.oldest_expired {
            Some(oldest) => format!("the oldest expired record has been due for {}", span(oldest)),
            None => "no expired record waits for its sweep".to_owned(),
        },
    )
}

pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut shown = (bytes as f64, "B");
    for unit in UNITS {
        if shown.0 >= 1024.0 {
            shown = (shown.0 / 1024.0, unit);
        }
    }
    if shown.1 == "B" { format!("{bytes} B") } else { format!("{:.2} {}", shown.0, shown.1) }
}
