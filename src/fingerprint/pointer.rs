//! JSON pointers (RFC 6901), and a JSON text without the parts to which they point.
//!
//! The parts are cut out of the text. A parsed value would have lost digits of its numbers and repeated members, which
//! may be the difference between two requests.

use serde::de::IgnoredAny;

use super::invalid_body::InvalidBody;
use super::lexemes::Lexemes;

/// A pointer to a member of an object, or to an element of an array; never to the whole text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pointer {
    tokens: Vec<String>,
}

impl Pointer {
    /// `None` if the text is no pointer, or points to the whole text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let tokens = text.strip_prefix('/')?.split('/').map(unescaped);
        Some(Self { tokens: tokens.collect::<Option<_>>()? })
    }

    pub(crate) fn tokens(&self) -> &[String] {
        &self.tokens
    }
}

fn unescaped(token: &str) -> Option<String> {
    let valid = token.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
    valid.then(|| token.replace("~1", "/").replace("~0", "~"))
}

/// The text without the parts to which the pointers point. A part that is missing is no error. Elements are counted in
/// the original text, whatever else is cut out of it.
pub(crate) fn without<'p>(
    text: &[u8],
    pointers: impl IntoIterator<Item = &'p Pointer>,
) -> Result<Vec<u8>, InvalidBody> {
    // This checks the whole text, also the parts that are cut out. From here on brackets match, and strings and values
    // end.
    let IgnoredAny = serde_json::from_slice(text).map_err(InvalidBody::not_json)?;
    let paths: Vec<_> = pointers.into_iter().map(Pointer::tokens).collect();
    let mut kept = Vec::with_capacity(text.len());
    keep(&mut kept, &mut Lexemes::of(text), &paths)?;
    Ok(kept)
}

/// Keeps the value that comes next, without the parts at the ends of the paths. It recurses along the paths only, so a
/// deep text needs no deep stack.
fn keep(kept: &mut Vec<u8>, text: &mut Lexemes<'_>, paths: &[&[String]]) -> Result<(), InvalidBody> {
    let Some(opening @ (b'{' | b'[')) = text.peek().filter(|_| !paths.is_empty()) else {
        kept.extend_from_slice(text.next_value());
        return Ok(());
    };
    text.next();
    kept.push(opening);
    let start = kept.len();
    for index in 0_usize.. {
        if text.peek() == Some(b',') {
            text.next();
        }
        if matches!(text.peek(), None | Some(b'}' | b']')) {
            break;
        }
        let before = kept.len();
        if before > start {
            kept.push(b',');
        }
        let token = if opening == b'{' {
            let name = text.next_value();
            kept.extend_from_slice(name);
            kept.extend(text.next().unwrap_or_default());
            serde_json::from_slice(name).map_err(InvalidBody::not_json)?
        } else {
            index.to_string()
        };
        match beyond(paths, &token) {
            Some(paths) => keep(kept, text, &paths)?,
            None => {
                text.next_value();
                kept.truncate(before);
            }
        }
    }
    kept.extend(text.next().unwrap_or_default());
    Ok(())
}

/// The rest of the paths that lead through this name or index; `None` if one of them ends there.
fn beyond<'p>(paths: &[&'p [String]], token: &str) -> Option<Vec<&'p [String]>> {
    let below = paths.iter().filter_map(|path| path.split_first()).filter(|(first, _)| *first == token);
    below.map(|(_, rest)| (!rest.is_empty()).then_some(rest)).collect()
}

#[cfg(test)]
#[path = "../../tests/unit/fingerprint/pointer.rs"]
mod tests;
