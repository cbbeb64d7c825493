//! `show` and `unsettled`: which keys there are to settle, and what is known of one.

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use pg_idempotency::operator::{self, Shown, ShownStep};
use pg_idempotency::{Key, Mode};
use serde_json::json;

use crate::arguments::{KeyArguments, Unsettled};
use crate::connection::Database;
use crate::failure::{Failure, of, printable};
use crate::settle::look;
use crate::{Ending, print};

pub(crate) fn key(arguments: KeyArguments) -> Result<Key, Failure> {
    Ok(Key::new(arguments.scope, arguments.operation, arguments.value)?)
}

pub(crate) async fn show(database: &Database, arguments: KeyArguments, as_json: bool) -> Result<Ending, Failure> {
    let key = key(arguments)?;
    let shown = look(&database.pool().await?, &key).await?;
    print(&if as_json { format!("{}\n", in_json(&shown)) } else { in_text(&shown) })
}

fn in_json(shown: &Shown) -> serde_json::Value {
    json!({
        "scope": shown.key.scope(),
        "operation": shown.key.operation(),
        "value": shown.key.value(),
        "mode": shown.mode.as_str(),
        "state": shown.state.as_str(),
        // A string: beyond 2^53 many readers of JSON round numbers.
        "token": shown.token.to_string(),
        "attempt": shown.attempt,
        "claimed_at": shown.claimed_at.to_rfc3339(),
        "completed_at": shown.completed_at.map(|at| at.to_rfc3339()),
        "expires_at": shown.expires_at.to_rfc3339(),
        "lease_seconds_left": shown.lease_left.map(|left| left.as_secs_f64()),
        "response_bytes": shown.response_bytes,
        "downstream_key": shown.downstream_key,
        "trace": shown.trace,
        "last_error": shown.last_error,
        "resumable": shown.resumable,
        "steps": shown.steps.iter().map(step_in_json).collect::<Vec<_>>(),
    })
}

fn step_in_json(step: &ShownStep) -> serde_json::Value {
    json!({
        "name": step.name,
        "state": step_state(step),
        "attempt": step.attempt,
        "at": step.at.map(|at| at.to_rfc3339()),
        "result_bytes": step.result_bytes,
        "downstream_key": step.downstream_key,
    })
}

fn step_state(step: &ShownStep) -> &'static str {
    if step.in_doubt { "in_doubt" } else { "finished" }
}

pub(crate) fn in_text(shown: &Shown) -> String {
    let mut lines = vec![
        ("mode", shown.mode.to_string()),
        ("state", shown.state.to_string()),
        ("attempt", shown.attempt.to_string()),
        ("token", shown.token.to_string()),
        ("claimed at", shown.claimed_at.to_rfc3339()),
        ("expires at", shown.expires_at.to_rfc3339()),
    ];
    lines.extend(shown.completed_at.map(|at| ("completed at", at.to_rfc3339())));
    lines.extend(shown.lease_left.map(|left| ("lease left", format!("{} s", left.as_secs()))));
    lines.extend(shown.response_bytes.map(|bytes| ("response", format!("{bytes} bytes"))));
    let each = if shown.mode == Mode::InSteps { "; each step has its own" } else { "" };
    lines.extend(shown.downstream_key.as_ref().map(|key| ("downstream key", format!("{key}{each}"))));
    lines.extend(shown.trace.as_deref().map(|trace| ("trace", printable(trace))));
    lines.extend(shown.last_error.as_deref().map(|error| ("last error", printable(error))));
    lines.extend(shown.resumable.then(|| ("request", "stored: a resumer may finish the operation".to_owned())));
    let lines = lines.into_iter().map(|(name, value)| format!("{name:<14} {value}\n"));
    lines.chain(shown.steps.iter().map(step_in_text)).collect()
}

fn step_in_text(step: &ShownStep) -> String {
    format!(
        "{:<14} {} {}, attempt {}{}{}, downstream key {}\n",
        "step",
        as_argument(&step.name),
        step_state(step),
        step.attempt,
        step.at.map(|at| format!(", {}", at.to_rfc3339())).unwrap_or_default(),
        step.result_bytes.map(|bytes| format!(", {bytes} bytes")).unwrap_or_default(),
        step.downstream_key,
    )
}

pub(crate) async fn unsettled(database: &Database, options: Unsettled) -> Result<Ending, Failure> {
    let limit = options.limit.get();
    // One more than asked for tells whether there are more.
    let mut found = operator::unsettled(&database.pool().await?, limit.saturating_add(1), options.max_attempts)
        .await
        .map_err(of)?;
    let more_left = found.len() > limit as usize;
    found.truncate(limit as usize);
    print(&if options.json { list_in_json(&found, more_left) } else { list_in_text(&found, more_left) })?;
    Ok(if found.is_empty() { Ending::Done } else { Ending::Limited })
}

fn list_in_json(found: &[Shown], more_left: bool) -> String {
    let records: Vec<_> = found.iter().map(in_json).collect();
    format!("{}\n", json!({"records": records, "more_left": more_left}))
}

fn list_in_text(found: &[Shown], more_left: bool) -> String {
    if found.is_empty() {
        return "nothing is unsettled\n".to_owned();
    }
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header([
        "scope operation value",
        "mode",
        "state",
        "steps in doubt",
        "attempt",
        "token",
        "claimed at",
        "expires at",
        "last error",
    ]);
    for record in found {
        table.add_row([
            [record.key.scope(), record.key.operation(), record.key.value()].map(as_argument).join(" "),
            record.mode.to_string(),
            record.state.to_string(),
            record.steps_in_doubt().iter().map(|step| as_argument(step)).collect::<Vec<_>>().join(" "),
            record.attempt.to_string(),
            record.token.to_string(),
            record.claimed_at.format("%Y-%m-%d %H:%M:%SZ").to_string(),
            record.expires_at.format("%Y-%m-%d %H:%M:%SZ").to_string(),
            record.last_error.as_deref().map(printable).unwrap_or_default(),
        ]);
    }
    let more = if more_left { "there are more: settle these, or raise --limit\n" } else { "" };
    format!("{table}\n{more}")
}

/// As a shell takes it for one argument, since that is what it is copied for; and a part of a key is a client's own
/// words.
fn as_argument(part: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "_-./:@%+=,".contains(character);
    if part.chars().all(plain) { part.to_owned() } else { format!("'{}'", printable(part).replace('\'', r"'\''")) }
}
