//! `show` prints the record of one key, and `unsettled` lists the keys that have to be settled.

use std::num::NonZeroU32;

use pg_idempotency::Mode;
use pg_idempotency::operator::{self, Shown, ShownProbes, ShownRequest, ShownStep};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::arguments::{KeyArguments, Unsettled};
use crate::connection::{Database, LONG_ANSWER, ask, look};
use crate::failure::{Failure, printable};
use crate::process::{Ending, json_line, print, progress};
use crate::time::{moment, span};

pub(crate) async fn show(
    database: &Database,
    arguments: KeyArguments,
    step: Option<String>,
    as_json: bool,
) -> Result<Ending, Failure> {
    let key = arguments.key()?;
    let shown = look(&database.pool().await?, &key).await?;
    let asked = match &step {
        Some(step) => Some((step, shown.downstream_key_of_step(step).ok_or(Failure::NoSteps { mode: shown.mode })?)),
        None => None,
    };
    print(&match (as_json, asked) {
        (true, None) => json_line(&in_json(&shown)),
        (true, Some((step, key))) => {
            let mut record = in_json(&shown);
            record["asked_step"] = json!({"name": step, "downstream_key": key});
            json_line(&record)
        }
        (false, None) => in_text(&shown),
        (false, Some((step, key))) => {
            format!("{}{:<14} {key}, of the step {}\n", in_text(&shown), "downstream key", as_argument(step))
        }
    })
}

fn in_json(shown: &Shown) -> serde_json::Value {
    json!({
        "scope": shown.key.scope(),
        "operation": shown.key.operation(),
        "value": shown.key.value(),
        "mode": shown.mode.to_string(),
        "state": shown.state.to_string(),
        // The token is a string, because many readers of JSON round numbers beyond 2^53.
        "token": shown.token.to_string(),
        "seen": seen(shown),
        "attempt": shown.attempt,
        "granted_attempt": shown.granted_attempt,
        "claimed_at": shown.claimed_at.to_rfc3339(),
        "completed_at": shown.completed_at.map(|at| at.to_rfc3339()),
        "expires_at": shown.expires_at.to_rfc3339(),
        "lease_seconds_left": shown.lease_left.map(|left| left.as_secs_f64()),
        "response_bytes": shown.response_bytes,
        "downstream_key": shown.downstream_key,
        "last_error": shown.last_error,
        "resumable": shown.resumable,
        "request": shown.request.as_ref().map(|request| json!({
            "method": request.method, "target": request.target, "headers": request.headers,
        })),
        "steps": shown.steps.iter().map(step_in_json).collect::<Vec<_>>(),
        "probes": shown.probes.iter().map(probes_in_json).collect::<Vec<_>>(),
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

fn probes_in_json(probes: &ShownProbes) -> serde_json::Value {
    json!({
        "step": probes.step,
        "probes": probes.probes,
        "no_trace": probes.no_trace,
        "finding": probes.finding,
        "error": probes.error,
        "at": probes.at.map(|at| at.to_rfc3339()),
        "next": probes.next.map(|at| at.to_rfc3339()),
        "given_up": probes.next.is_none(),
    })
}

/// The findings of a reconciler in words, such as *4 probes, 2 without a trace, the last one failed at …: no route;
/// left to a person*.
pub(crate) fn probes_in_words(probes: &ShownProbes) -> String {
    let last = probes.at.map(|at| format!(" at {}", moment(at))).unwrap_or_default();
    let said = probes.finding.map(|finding| format!(", the last one {}{last}", finding.as_str().replace('_', " ")));
    let error = probes.error.as_deref().map(|error| format!(": {}", printable(error)));
    let next = match probes.next {
        Some(at) => format!("; the next one is due at {}", moment(at)),
        None => "; left to a person".to_owned(),
    };
    let plural = if probes.probes == 1 { "" } else { "s" };
    let counts = format!("{} probe{plural}, {} without a trace", probes.probes, probes.no_trace);
    format!("{counts}{}{}{next}", said.unwrap_or_default(), error.unwrap_or_default())
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
        ("seen", seen(shown)),
        ("claimed at", moment(shown.claimed_at)),
        ("expires at", moment(shown.expires_at)),
    ];
    lines.extend(shown.completed_at.map(|at| ("completed at", moment(at))));
    lines.extend(shown.lease_left.map(|left| ("lease left", span(left))));
    let lapsed = shown.lease_until.filter(|_| shown.lease_left.is_none());
    lines.extend(lapsed.map(|at| ("lease lapsed", moment(at))));
    lines.extend(shown.response_bytes.map(|bytes| ("response", format!("{bytes} bytes"))));
    lines.extend(shown.granted_attempt.map(|attempt| ("permitted", format!("attempt {attempt}, by an operator"))));
    lines.extend(shown.downstream_key.as_ref().map(|key| ("downstream key", key.clone())));
    lines.extend((shown.mode == Mode::InSteps).then(|| {
        (
            "downstream key",
            "each step has its own; `show --step NAME` prints that of a step which is not listed".to_owned(),
        )
    }));
    lines.extend(shown.last_error.as_deref().map(|error| ("last error", printable(error))));
    lines.extend(shown.resumable.then(|| ("request", "stored: a resumer may finish the operation".to_owned())));
    lines.extend(shown.request.iter().flat_map(request_in_text));
    let lines = lines.into_iter().map(|(name, value)| format!("{name:<14} {value}\n"));
    let probes = shown.probes.iter().map(|probes| {
        let step = probes.step.as_deref().map(|step| format!("{}: ", as_argument(step))).unwrap_or_default();
        format!("{:<14} {step}{}\n", "reconciler", probes_in_words(probes))
    });
    lines.chain(shown.steps.iter().map(step_in_text)).chain(probes).collect()
}

/// Shows the request without its body, which is confidential. The other parts come from a client, so they are escaped.
fn request_in_text(request: &ShownRequest) -> Vec<(&'static str, String)> {
    let mut lines = vec![("", printable(&format!("{} {}", request.method, request.target)))];
    lines.extend(request.headers.iter().map(|(name, value)| ("", printable(&format!("{name}: {value}")))));
    lines
}

fn step_in_text(step: &ShownStep) -> String {
    format!(
        "{:<14} {} {}, attempt {}{}{}, downstream key {}\n",
        "step",
        as_argument(&step.name),
        step_state(step),
        step.attempt,
        step.at.map(|at| format!(", {}", moment(at))).unwrap_or_default(),
        step.result_bytes.map(|bytes| format!(", {bytes} bytes")).unwrap_or_default(),
        step.downstream_key,
    )
}

pub(crate) async fn unsettled(database: &Database, options: Unsettled) -> Result<Ending, Failure> {
    let limit = options.limit.get();
    // The query requests one key more than the limit, to find out whether there are more keys.
    let (most, abandoned_for) = (options.max_attempts, options.abandoned_for);
    let pool = database.pool().await?;
    let bar = progress("searching");
    let mut found = ask(LONG_ANSWER, operator::unsettled(&pool, limit.saturating_add(1), most, abandoned_for)).await?;
    drop(bar);
    let more_left = found.len() > limit as usize;
    found.truncate(limit as usize);
    print(&if options.output.json {
        list_in_json(&found, more_left, most)
    } else {
        list_in_text(&found, more_left, most)
    })?;
    Ok(if found.is_empty() { Ending::Done } else { Ending::WorkLeft })
}

fn list_in_json(found: &[Shown], more_left: bool, most: Option<NonZeroU32>) -> String {
    let record = |shown| {
        let mut record = in_json(shown);
        record["exhausted"] = json!(most.map(|most| shown.is_exhausted(most)));
        record
    };
    let records: Vec<_> = found.iter().map(record).collect();
    json_line(&json!({"records": records, "more_left": more_left}))
}

fn list_in_text(found: &[Shown], more_left: bool, most: Option<NonZeroU32>) -> String {
    if found.is_empty() {
        return "nothing is unsettled\n".to_owned();
    }
    let records: String = found.iter().map(|record| record_in_text(record, most)).collect();
    let first = found.iter().min_by_key(|record| record.expires_at).map(|record| {
        let expires_at = moment(record.expires_at);
        // A key that is not listed may expire earlier.
        let of_these = if more_left { "of these, " } else { "" };
        format!(
            "{of_these}the first to expire is {}, at {expires_at}: then its key is new, and a repeat performs\n",
            as_arguments(record)
        )
    });
    let more = if more_left { "there are more: settle these, or raise --limit\n" } else { "" };
    format!("{records}\n{}{more}", first.unwrap_or_default())
}

/// Prints the key on a line of its own, so that a narrow terminal does not break the key. The facts are indented, so
/// that `grep` finds the keys.
fn record_in_text(record: &Shown, most: Option<NonZeroU32>) -> String {
    let mut facts = vec![
        format!("{}, {}, attempt {}, token {}", waits_as(record, most), record.mode, record.attempt, record.token),
        format!("claimed {}", moment(record.claimed_at)),
        format!("expires {}", moment(record.expires_at)),
    ];
    let in_doubt = names_in_doubt(record).iter().map(|step| as_argument(step)).collect::<Vec<_>>().join(" ");
    facts.extend((!in_doubt.is_empty()).then(|| format!("steps in doubt: {in_doubt}")));
    facts.extend(record.last_error.as_deref().map(|error| format!("last error: {}", printable(error))));
    facts.extend(record.probes.iter().map(|probes| format!("reconciler: {}", probes_in_words(probes))));
    let facts: String = facts.iter().map(|fact| format!("  {fact}\n")).collect();
    format!("{}\n{facts}", as_arguments(record))
}

/// Returns the key in the form of shell arguments, for the commands that settle the key.
pub(crate) fn as_arguments(record: &Shown) -> String {
    [record.key.scope(), record.key.operation(), record.key.value()].map(as_argument).join(" ")
}

/// The reason why the key waits: its state, and *exhausted* if its attempts have reached the service's limit.
pub(crate) fn waits_as(record: &Shown, most: Option<NonZeroU32>) -> String {
    let exhausted = most.is_some_and(|most| record.is_exhausted(most));
    format!("{}{}", record.state, if exhausted { ", exhausted" } else { "" })
}

/// Quotes a part of a key as one argument of a shell, because the line is made to be copied, and the part is foreign
/// text.
fn as_argument(part: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "_-./:@%+=,".contains(character);
    if part.chars().all(plain) {
        part.to_owned()
    } else if printable(part) == part {
        format!("'{}'", part.replace('\'', r"'\''"))
    } else {
        // Bash and zsh read the form `$'…'` as the same bytes in every locale, and a terminal shows every character of
        // this form.
        let escaped = part.chars().fold(String::new(), |mut escaped, character| {
            match character {
                '\'' | '\\' => escaped.extend(['\\', character]),
                seen if printable(seen.encode_utf8(&mut [0; 4])).chars().eq([seen]) => escaped.push(seen),
                unseen => {
                    escaped.extend(unseen.encode_utf8(&mut [0; 4]).bytes().map(|byte| format!("\\x{byte:02x}")));
                }
            }
            escaped
        });
        format!("$'{escaped}'")
    }
}

/// The state and the version of a record, as one short word. A decision that gives the word back is refused if the
/// record has changed since. The version alone does not show that a lease has lapsed.
pub(crate) fn seen(shown: &Shown) -> String {
    let digest = Sha256::digest(format!("{} {}", shown.state, shown.version()));
    digest[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The names of all steps in doubt.
pub(crate) fn names_in_doubt(shown: &Shown) -> Vec<String> {
    let mut names: Vec<_> = shown.steps.iter().filter(|step| step.in_doubt).map(|step| step.name.clone()).collect();
    names.sort_unstable();
    names
}
