//! The shape of a statement, which is the same in each execution, and the text of a statement in a report.

/// The text without its values and its superfluous white space. The same statement with another key has the same shape.
pub(crate) fn shape(sql: &str) -> String {
    let mut shape = String::with_capacity(sql.len());
    let mut characters = sql.trim().trim_end_matches(';').chars().peekable();
    while let Some(character) = characters.next() {
        let in_word = shape.ends_with(|last: char| last.is_alphanumeric() || matches!(last, '_' | '$' | '.'));
        match character {
            '\'' => {
                // A doubled quote counts as the end of one string and the beginning of the next string. Both strings
                // become a single `?`.
                while characters.next().is_some_and(|next| next != '\'') {}
                if !shape.ends_with('?') {
                    shape.push('?');
                }
            }
            digit if digit.is_ascii_digit() && !in_word => {
                while characters.next_if(|next| next.is_ascii_alphanumeric() || *next == '.').is_some() {}
                shape.push('?');
            }
            space if space.is_whitespace() => {
                if !shape.ends_with(' ') {
                    shape.push(' ');
                }
            }
            other => shape.push(other),
        }
    }
    shape
}

/// The text in one line, with at most `longest` characters.
pub(crate) fn shorten(text: &str, longest: usize) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if words.chars().count() <= longest {
        return words;
    }
    words.chars().take(longest - 1).chain(['…']).collect()
}

/// Whether the statement is a ping, which pools send before they lend a connection.
pub(crate) fn pings(shape: &str) -> bool {
    matches!(shape, "" | ";" | "prepare: ") || shape.eq_ignore_ascii_case("select ?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_has_no_values() {
        let with = |key| shape(&format!("insert into  payment2\n values ('{key}', 100.5, $1, 'it''s');"));
        assert_eq!(with("a"), "insert into payment2 values (?, ?, $1, ?)");
        assert_eq!(with("a"), with("1f'' 2"));
    }

    #[test]
    fn a_long_text_is_shortened_to_one_line() {
        assert_eq!(shorten("select\n  1", 20), "select 1");
        assert_eq!(shorten("select 123456", 8), "select …");
    }

    #[test]
    fn a_ping_executes_nothing_of_the_request() {
        assert!(pings(&shape("")) && pings(&shape("SELECT 1")) && !pings(&shape("select 1 from payments")));
    }
}
