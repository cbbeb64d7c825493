//! `resolve`, `release` and `forget`: an operator decides about one key.
//!
//! Each shows the record first, and demands its token when it acts: what was looked at is what changes.

use std::io::{BufRead as _, IsTerminal as _, Write as _, stderr, stdin};

use pg_idempotency::operator::{self, Shown};
use pg_idempotency::{DEFAULT_RETENTION, Error, Idempotency, Key, lease};
use serde_json::value::RawValue;
use sqlx::PgPool;

use crate::arguments::{KeyArguments, Resolve, ResponseArguments};
use crate::connection::Database;
use crate::failure::{Failure, of, of_connecting};
use crate::keys::{in_text, key};
use crate::{Ending, print};

const EXPIRED: &str = "its key is new again, and the next call performs anyway";

pub(crate) async fn resolve(database: &Database, arguments: Resolve) -> Result<Ending, Failure> {
    let Resolve { key: named, response, step, retention, reason, yes } = arguments;
    let key = key(named)?;
    let response = read(response)?;
    // What was typed wrong is said before anything is connected to.
    if let Some(given) = retention {
        Idempotency::new().with_retention(given)?;
    }
    let pool = database.pool().await?;
    let shown = look(&pool, &key).await?;
    unfinished(&shown)?;
    if let Some(step) = step {
        return resolve_step(&pool, &key, &shown, &step, &response, (&reason, yes)).await;
    }
    if let Some(step) = in_doubt(&shown) {
        return Err(Failure::StepInDoubt { step: step.to_owned() });
    }
    // To resolve must not shorten the protection that the service asked for, unless somebody means it.
    let retention = retention.unwrap_or_else(|| shown.retention_left.max(DEFAULT_RETENTION));
    let means = format!(
        "Resolving it means that it took effect: every repeat gets this response of {} bytes for {:.1} hours, and nothing \
         is performed. Resolve it?",
        response.get().len(),
        retention.as_secs_f64() / 3600.0
    );
    confirm(&shown, &means, yes)?;
    lease::resolve(&pool, &key, shown.token, &response, retention).await.map_err(of_settling)?;
    print(&format!("resolved: {key:?}, which was {}, because {reason}\n", shown.state))
}

/// Stores the result of the step in doubt, and releases the operation.
async fn resolve_step(
    pool: &PgPool,
    key: &Key,
    shown: &Shown,
    step: &str,
    result: &RawValue,
    (reason, yes): (&str, bool),
) -> Result<Ending, Failure> {
    let not_in_doubt = |why| Err(Failure::StepNotInDoubt { step: step.to_owned(), why });
    match shown.steps.iter().find(|stored| stored.name == step) {
        _ if shown.state == "expired" => {
            return Err(Failure::NotToBeSettled { state: shown.state.clone(), why: EXPIRED });
        }
        None => return not_in_doubt("the record has no step of this name"),
        Some(stored) if !stored.in_doubt => return not_in_doubt("its result is stored"),
        Some(_) => {}
    }
    let means = format!(
        "Resolving the step {step:?} means that it took effect: its result is these {} bytes, and the next call with this \
         key continues after it. Resolve it?",
        result.get().len()
    );
    confirm(shown, &means, yes)?;
    lease::resolve_step(pool, key, shown.token, step, &result.to_owned()).await.map_err(of_settling)?;
    print(&format!("resolved: the step {step:?} of {key:?}, which is released, because {reason}\n"))
}

pub(crate) async fn release(
    database: &Database,
    arguments: KeyArguments,
    reason: &str,
    yes: bool,
) -> Result<Ending, Failure> {
    let key = key(arguments)?;
    let pool = database.pool().await?;
    let shown = look(&pool, &key).await?;
    unfinished(&shown)?;
    let free = match shown.state.as_str() {
        "expired" => Some(EXPIRED),
        "released" => Some("the next call performs anyway; where that is refused as exhausted, resolve or forget it"),
        _ => None,
    };
    if let Some(why) = free {
        return Err(Failure::NotToBeSettled { state: shown.state, why });
    }
    let means = match in_doubt(&shown) {
        Some(step) => format!(
            "Releasing it means that the step {step:?} took no effect: the next call with this key performs it. Steps that \
             are finished stay. Release it?"
        ),
        None if shown.steps.is_empty() => {
            "Releasing it means that it took no effect: the next call with this key performs it. Release it?".to_owned()
        }
        None => {
            "Releasing it means that the next call with this key performs it, except for the steps that are finished. \
                 Release it?"
                .to_owned()
        }
    };
    confirm(&shown, &means, yes)?;
    lease::release(&pool, &key, shown.token, reason).await.map_err(of_settling)?;
    print(&format!("released: {key:?}, which was {}, because {reason}\n", shown.state))
}

pub(crate) async fn forget(
    database: &Database,
    arguments: KeyArguments,
    reason: &str,
    yes: bool,
) -> Result<Ending, Failure> {
    let key = key(arguments)?;
    let pool = database.pool().await?;
    let shown = look(&pool, &key).await?;
    let steps = if shown.steps.is_empty() { "" } else { ", with all of its steps" };
    let means = format!("Forgetting it means that the next call with this key is performed again{steps}. Forget it?");
    confirm(&shown, &means, yes)?;
    let mut conn = pool.acquire().await.map_err(of_connecting)?;
    operator::forget(&mut conn, &key, shown.token).await.map_err(of_settling)?;
    print(&format!("forgotten: {key:?}, which was {}, because {reason}\n", shown.state))
}

/// The record, unless its owner may be at work.
async fn look(pool: &PgPool, key: &Key) -> Result<Shown, Failure> {
    let mut conn = pool.acquire().await.map_err(of_connecting)?;
    let shown = operator::show(&mut conn, key).await.map_err(of)?.ok_or(Failure::NoRecord)?;
    match shown.lease_left {
        Some(left) => Err(Failure::Leased { seconds: left.as_secs_f64() }),
        None => Ok(shown),
    }
}

/// The step that may have taken effect and has no result.
fn in_doubt(shown: &Shown) -> Option<&str> {
    shown.steps.iter().find(|step| step.in_doubt).map(|step| step.name.as_str())
}

fn unfinished(shown: &Shown) -> Result<(), Failure> {
    if shown.completed_at.is_none() {
        return Ok(());
    }
    Err(Failure::NotToBeSettled {
        state: shown.state.clone(),
        why: "what is done is not settled; to have it performed again, forget it",
    })
}

/// The response as it was given, to the byte: a parsed number would lose digits, and a parsed object its order.
fn read(response: ResponseArguments) -> Result<Box<RawValue>, Failure> {
    let text = match (response.response, response.response_file) {
        (_, Some(path)) => std::fs::read_to_string(&path).map_err(|source| Failure::ResponseFile { path, source })?,
        (text, None) => text.unwrap_or_default(),
    };
    serde_json::from_str(&text).map_err(|source| Failure::NotJson {
        line: source.line(),
        column: source.column(),
        source,
    })
}

/// Asks on a terminal; anywhere else the answer is no.
fn confirm(shown: &Shown, means: &str, yes: bool) -> Result<(), Failure> {
    if yes {
        return Ok(());
    }
    if !stdin().is_terminal() {
        return Err(Failure::NotConfirmed);
    }
    let question = format!("{}\n{means} [y/N] ", in_text(shown));
    stderr().write_all(question.as_bytes()).map_err(Failure::Output)?;
    let mut answer = String::new();
    stdin().lock().read_line(&mut answer).map_err(Failure::Output)?;
    if matches!(answer.trim(), "y" | "Y" | "yes") { Ok(()) } else { Err(Failure::NotConfirmed) }
}

/// The record was there with this token a moment ago.
fn of_settling(error: Error) -> Failure {
    match error {
        Error::LeaseLost => Failure::Changed,
        error => of(error),
    }
}
