//! The template of a route as a part of a key: without the names of its parameters, which no client sees.

/// The template with `{}` for each `{name}` and `{*}` for each `{*name}`. `{{` and `}}` are axum's escaped braces, and
/// stay. A text without names stays as it is.
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

/// Whether the text names a parameter. A route of axum does. An operation that the layer takes from a route does not.
pub(crate) fn has_names(operation: &str) -> bool {
    without_names(operation) != operation
}

#[cfg(test)]
#[path = "../tests/unit/route.rs"]
mod tests;
