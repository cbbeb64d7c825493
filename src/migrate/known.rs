//! The functions that the crate creates. Its migrations contain those of each earlier release, too. Of the functions
//! for callers in other languages, only those of this release are known.

use std::sync::LazyLock;

use sha2::{Digest as _, Sha256};

use super::{FUNCTIONS, MIGRATIONS};
use crate::record::Known;

/// Another file that creates functions belongs here, too: a test compares all of them.
pub(super) static KNOWN: LazyLock<Known> = LazyLock::new(|| {
    let migrations = MIGRATIONS.iter().flat_map(|migration| functions(migration.sql.as_str()));
    let number = FUNCTIONS.split_once("as 'select ").and_then(|(_, rest)| rest.split_once("';"));
    Known {
        digests: migrations
            .chain(functions(FUNCTIONS))
            .map(|function| digest(function).expect("a name, a language and a body"))
            .collect(),
        any_language: functions(FUNCTIONS).filter_map(|function| name(function).map(str::to_owned)).collect(),
        number: number.and_then(|(number, _)| number.parse().ok()).expect("the number of the file"),
    }
});

/// From the name of each function on.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    let created = text.split("\ncreate ").skip(1);
    created.filter_map(|text| text.strip_prefix("or replace ").unwrap_or(text).strip_prefix("function idempotency."))
}

fn name(function: &str) -> Option<&str> {
    Some(function.split_once('(')?.0)
}

/// Of a text that begins with the name of the function.
fn digest(function: &str) -> Option<String> {
    let (head, quoted) = function.split_once(" as ")?;
    let name = name(head)?;
    let language = head.split_once("language ")?.1.split_whitespace().next()?;
    let definer = head.contains("security definer");
    let settings =
        head.split_once(" set search_path = ").map_or(String::new(), |(_, path)| format!("search_path={path}"));
    let quote = if quoted.starts_with("$$") { "$$" } else { "'" };
    let (body, _) = quoted.strip_prefix(quote)?.split_once(quote)?;
    let digest = Sha256::digest(format!("{name}\n{language}\n{definer}\n{settings}\n{}", body.replace('\r', "")));
    Some(hex::encode(digest))
}

#[cfg(test)]
#[path = "../../tests/unit/migrate/known.rs"]
mod tests;
