//! Text of other people's, made harmless and readable. The templates escape HTML; this is about what a reader sees.

use std::time::Duration;

use chrono::{DateTime, Utc};
use pg_idempotency::operator::StoredResponse;

/// Text in which every character can be seen: marks that change the direction of writing, zero-width characters and
/// control characters are escaped, so that no text looks like another.
pub(super) fn visible(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut seen, character| {
        match character {
            '"' | '\'' => seen.push(character),
            _ => seen.extend(character.escape_debug()),
        }
        seen
    })
}

/// The value of a key, as `Debug` of [`pg_idempotency::Key`] shortens it: it gives access to the response.
pub(super) fn shortened(value: &str) -> String {
    let shown = if value.len() >= 16 { value.floor_char_boundary(4) } else { 0 };
    format!("{}… ({} bytes)", visible(&value[..shown]), value.len())
}

/// The body as text if its type says that it is text, and as hexadecimal digits otherwise.
pub(super) fn body(response: &StoredResponse) -> Option<String> {
    /// Enough to recognise a file by.
    const BYTES: usize = 512;
    let body = response.body.as_deref()?;
    let kind = response.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("content-type"));
    // Outside HTTP it is JSON.
    let kind = kind.map_or_else(|| "json".to_owned(), |(_, kind)| kind.to_ascii_lowercase());
    Some(if ["json", "text/", "xml", "urlencoded"].iter().any(|textual| kind.contains(textual)) {
        lines(&String::from_utf8_lossy(body))
    } else {
        body.iter().take(BYTES).map(|byte| format!("{byte:02x}")).collect()
    })
}

/// As [`visible`], with the line breaks, tabs and backslashes of a body.
pub(super) fn lines(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut seen, character| {
        match character {
            '"' | '\'' | '\\' | '\n' | '\t' => seen.push(character),
            _ => seen.extend(character.escape_debug()),
        }
        seen
    })
}

pub(super) fn time(at: DateTime<Utc>) -> String {
    at.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// How long ago, by this machine's clock.
pub(super) fn age(at: DateTime<Utc>) -> String {
    span((Utc::now() - at).to_std().unwrap_or_default())
}

/// In the largest unit that fits.
pub(super) fn span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// With a space between thousands.
pub(super) fn count(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(|group| String::from_utf8_lossy(group).into_owned());
    groups.collect::<Vec<_>>().join("\u{202f}")
}
