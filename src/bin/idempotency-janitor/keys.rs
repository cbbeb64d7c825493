//! `show` and `forget`: one key.

use std::io::{BufRead as _, IsTerminal as _, Write as _, stderr, stdin};

use pg_idempotency::operator::{self, Shown};
use pg_idempotency::{Error, Key};
use serde_json::json;

use crate::arguments::KeyArguments;
use crate::connection::Database;
use crate::failure::{Failure, of};
use crate::{Ending, print};

fn key(arguments: KeyArguments) -> Result<Key, Failure> {
    Ok(Key::new(arguments.scope, arguments.operation, arguments.value)?)
}

pub(crate) async fn show(database: &Database, arguments: KeyArguments, as_json: bool) -> Result<Ending, Failure> {
    let key = key(arguments)?;
    let shown = operator::show(&mut database.connect().await?, &key).await.map_err(of)?;
    let shown = shown.ok_or(Failure::NoRecord)?;
    print(&if as_json { in_json(&shown) } else { in_text(&shown) })
}

fn in_json(shown: &Shown) -> String {
    let report = json!({
        "mode": shown.mode.as_str(),
        "state": shown.state,
        "token": shown.token,
        "attempt": shown.attempt,
        "claimed_at": shown.claimed_at.to_rfc3339(),
        "completed_at": shown.completed_at.map(|at| at.to_rfc3339()),
        "expires_at": shown.expires_at.to_rfc3339(),
        "lease_seconds_left": shown.lease_left.map(|left| left.as_secs_f64()),
        "response_bytes": shown.response_bytes,
        "last_error": shown.last_error,
    });
    format!("{report}\n")
}

fn in_text(shown: &Shown) -> String {
    let mut lines = vec![
        ("mode", shown.mode.to_string()),
        ("state", shown.state.clone()),
        ("attempt", shown.attempt.to_string()),
        ("token", shown.token.to_string()),
        ("claimed at", shown.claimed_at.to_rfc3339()),
        ("expires at", shown.expires_at.to_rfc3339()),
    ];
    lines.extend(shown.completed_at.map(|at| ("completed at", at.to_rfc3339())));
    lines.extend(shown.lease_left.map(|left| ("lease left", format!("{} s", left.as_secs()))));
    lines.extend(shown.response_bytes.map(|bytes| ("response", format!("{bytes} bytes"))));
    lines.extend(shown.last_error.clone().map(|error| ("last error", error)));
    lines.into_iter().map(|(name, value)| format!("{name:<13} {value}\n")).collect()
}

pub(crate) async fn forget(
    database: &Database,
    arguments: KeyArguments,
    reason: &str,
    yes: bool,
) -> Result<Ending, Failure> {
    let key = key(arguments)?;
    let mut conn = database.connect().await?;
    let shown = operator::show(&mut conn, &key).await.map_err(of)?.ok_or(Failure::NoRecord)?;
    if let Some(left) = shown.lease_left {
        return Err(Failure::Leased { seconds: left.as_secs_f64() });
    }
    if !yes && !confirmed(&shown)? {
        return Err(Failure::NotConfirmed);
    }
    match operator::forget(&mut conn, &key, shown.token).await {
        Ok(()) => print(&format!("forgotten: {key:?}, which was {}, because {reason}\n", shown.state)),
        Err(Error::LeaseLost) => Err(Failure::Changed),
        Err(error) => Err(of(error)),
    }
}

/// Asks on a terminal; anywhere else the answer is no.
fn confirmed(shown: &Shown) -> Result<bool, Failure> {
    if !stdin().is_terminal() {
        return Ok(false);
    }
    let question = format!(
        "{}\nForgetting it means that the next call with this key is performed again. Forget it? [y/N] ",
        in_text(shown)
    );
    stderr().write_all(question.as_bytes()).map_err(Failure::Output)?;
    let mut answer = String::new();
    stdin().lock().read_line(&mut answer).map_err(Failure::Output)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
