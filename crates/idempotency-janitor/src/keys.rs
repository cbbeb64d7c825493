//! `show` and `unsettled`: which keys there are to settle, and what is known of one.

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use pg_idempotency::operator::{self, Shown, ShownStep, StoredResponse};
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

pub(crate) async fn show(
    database: &Database,
    arguments: KeyArguments,
    with_response: bool,
    step: Option<String>,
    as_json: bool,
) -> Result<Ending, Failure> {
    let key = key(arguments)?;
    let pool = database.pool().await?;
    let shown = look(&pool, &key).await?;
    let asked = step.and_then(|step| shown.step_downstream_key(&step).map(|key| (step, key)));
    let response = match with_response {
        true => operator::response(&pool, &key, shown.token, u32::MAX).await.map_err(of)?,
        false => None,
    };
    if as_json {
        return print(&in_json(&shown, asked, response.as_ref()));
    }
    let asked = asked.map(|(step, key)| format!("{:<14} {} downstream key {key}\n", "step", as_argument(&step)));
    let response = response.as_ref().map(response_in_text);
    print(&(in_text(&shown) + &asked.unwrap_or_default() + &response.unwrap_or_default()))
}

fn in_json(shown: &Shown, asked: Option<(String, String)>, response: Option<&StoredResponse>) -> String {
    let mut report = json!({
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
        "last_error": shown.last_error,
        "resumable": shown.resumable,
        "steps": shown.steps.iter().map(step_in_json).collect::<Vec<_>>(),
        "asked_step": asked.map(|(name, key)| json!({"name": name, "downstream_key": key})),
    });
    if let Some(response) = response {
        report["response"] = json!({
            "status": response.status,
            "headers": response.headers,
            // JSON has no bytes: null, too, for a body that is no text.
            "body": response.body.as_deref().and_then(|body| str::from_utf8(body).ok()),
        });
    }
    format!("{report}\n")
}

fn response_in_text(response: &StoredResponse) -> String {
    let mut lines: Vec<_> = response.status.iter().map(|status| ("status", status.to_string())).collect();
    lines.extend(response.headers.iter().map(|(name, value)| ("header", printable(&format!("{name}: {value}")))));
    lines.extend(response.body.as_deref().map(|body| ("body", printable(&String::from_utf8_lossy(body)))));
    lines.into_iter().map(|(name, value)| format!("{name:<14} {value}\n")).collect()
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
    let each = if shown.mode == Mode::InSteps { "; each step has its own: show --step NAME" } else { "" };
    lines.extend(shown.downstream_key.as_ref().map(|key| ("downstream key", format!("{key}{each}"))));
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
    print(&if options.json { list_in_json(&found, more_left) } else { list_in_text(&found, more_left) })
}

fn list_in_json(found: &[operator::Unsettled], more_left: bool) -> String {
    let records: Vec<_> = found
        .iter()
        .map(|record| {
            json!({
                "mode": record.mode.as_str(),
                "state": record.state.as_str(),
                "scope": record.scope,
                "operation": record.operation,
                "value": record.value,
                "token": record.token.to_string(),
                "attempt": record.attempt,
                "claimed_at": record.claimed_at.to_rfc3339(),
                "expires_at": record.expires_at.to_rfc3339(),
                "last_error": record.last_error,
                "steps": record.steps.iter().map(|step| json!({
                    "name": step,
                    "downstream_key": record.step_downstream_key(step),
                })).collect::<Vec<_>>(),
                "downstream_key": record.downstream_key,
            })
        })
        .collect();
    format!("{}\n", json!({"records": records, "more_left": more_left}))
}

fn list_in_text(found: &[operator::Unsettled], more_left: bool) -> String {
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
            [&record.scope, &record.operation, &record.value].map(|part| as_argument(part)).join(" "),
            record.mode.to_string(),
            record.state.to_string(),
            record.steps.iter().map(|step| as_argument(step)).collect::<Vec<_>>().join(" "),
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
