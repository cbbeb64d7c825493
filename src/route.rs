//! The template of a route as a part of a key, and the operation of a loop that searches for keys. The names of the
//! parameters are removed from the template, because no client sees these names.

use crate::key::checked_recorded;
use crate::{Error, KeyPart, Misuse};

/// Returns the template with `{}` for each `{name}` and `{*}` for each `{*name}`. Axum's escaped braces, `{{` and `}}`,
/// remain. A text without names remains unchanged.
pub(crate) fn without_names(template: &str) -> String {
    let mut kept = String::with_capacity(template.len());
    let mut rest = template.chars().peekable();
    let mut in_name = false;
    while let Some(character) = rest.next() {
        match character {
            '{' | '}' if rest.next_if_eq(&character).is_some() => {
                if !in_name {
                    kept.extend([character, character]);
                }
            }
            '{' => {
                in_name = true;
                kept.push('{');
                kept.extend(rest.next_if_eq(&'*'));
            }
            '}' => {
                in_name = false;
                kept.push('}');
            }
            _ if in_name => {}
            _ => kept.push(character),
        }
    }
    kept
}

/// Whether the text contains the name of a parameter. A route of axum may contain names of parameters, but an operation
/// that the layer takes from a route contains no such names.
pub(crate) fn has_names(operation: &str) -> bool {
    without_names(operation) != operation
}

/// Refuses an operation that no key can have. A search for this operation would find nothing, and a reader of the log
/// would not learn why.
pub(crate) fn check_operation(operation: &str) -> Result<(), Error> {
    let checked = checked_recorded(KeyPart::Operation, operation.to_owned());
    checked.map(drop).map_err(|error| Misuse::options(&error.to_string()))
}

#[cfg(test)]
#[path = "../tests/unit/route.rs"]
mod tests;
