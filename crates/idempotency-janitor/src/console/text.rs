//! Makes foreign text harmless and readable. The templates escape HTML. This module escapes characters that a reader
//! cannot see.

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::settle::beginning;
pub(super) use crate::time::span;

/// Escapes control characters, zero-width characters and marks that change the direction of writing, so that two
/// different texts do not look the same.
pub(super) fn visible(text: &str) -> String {
    escaped(text, &['"', '\''])
}

/// Escapes a text like [`visible`], but keeps line breaks, tabs and backslashes, because a body needs them.
pub(super) fn lines(text: &str) -> String {
    escaped(text, &['"', '\'', '\\', '\n', '\t'])
}

fn escaped(text: &str, plain: &[char]) -> String {
    let mut seen = String::with_capacity(text.len());
    for character in text.chars() {
        if plain.contains(&character) { seen.push(character) } else { seen.extend(character.escape_debug()) }
    }
    seen
}

/// Shortens a value, because the whole value gives access to the response.
pub(super) fn shortened(value: &str) -> String {
    shortened_after(value, "")
}

/// Shortens a value that a person has found by its beginning `known`. This beginning is kept.
pub(super) fn shortened_after(value: &str, known: &str) -> String {
    let begins =
        if value.starts_with(known) && known.len() > beginning(value).len() { known } else { beginning(value) };
    format!("{}… ({} bytes)", visible(begins), value.len())
}

pub(super) fn time(at: DateTime<Utc>) -> String {
    at.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// The time since `at`, by this machine's clock.
pub(super) fn age(at: DateTime<Utc>) -> Duration {
    (Utc::now() - at).to_std().unwrap_or_default()
}

/// A number with a narrow space between groups of three digits.
pub(super) fn count(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    groups.collect::<Vec<_>>().join("\u{202f}")
}
