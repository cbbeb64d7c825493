//! Edits of a statement, found in its text: each drops one condition, lock, order or assignment.

use std::ops::Range;

use crate::statement;

/// One edit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edit {
    /// What the statement loses. No other edit of the statement has the same name.
    pub(crate) name: String,
    range: Range<usize>,
    new: String,
}

impl Edit {
    pub(crate) fn apply(&self, sql: &str) -> String {
        format!("{}{}{}", &sql[..self.range.start], self.new, &sql[self.range.end..])
    }
}

/// A word, a literal or a sign of a statement.
#[derive(Clone, Copy, Debug)]
struct Token<'s> {
    text: &'s str,
    start: usize,
    end: usize,
}

/// What ends a condition on its level, besides a closing parenthesis.
const ENDS: [&str; 22] = [
    "order",
    "limit",
    "for",
    "returning",
    "from",
    "group",
    "then",
    "else",
    "when",
    "end",
    "where",
    "union",
    "set",
    "on",
    "left",
    "join",
    ";",
    ",",
    "loop",
    "as",
    "using",
    "select",
];

/// Every edit of this statement.
pub(crate) fn of(sql: &str) -> Vec<Edit> {
    let tokens = tokens(sql);
    let mut found = Vec::new();
    conditions(&tokens, &mut found);
    locks(sql, &tokens, &mut found);
    assignments(&tokens, &mut found);
    let mut edits: Vec<Edit> = Vec::new();
    for (what, range, new) in found {
        let plain = format!("{what} {}", statement::plain(&sql[range.clone()]));
        // An assignment is named by its column.
        let plain = match plain.split_once(" =").filter(|_| what == UNSET) {
            Some((column, _)) => column.replace(", ", ""),
            None => plain,
        };
        let same = edits.iter().filter(|other| other.name.split(" #").next() == Some(&plain)).count();
        let name = if same == 0 { plain } else { format!("{plain} #{}", same + 1) };
        edits.push(Edit { name, range, new });
    }
    edits
}

const UNSET: &str = "does not set";

type Found = (&'static str, Range<usize>, String);

/// Conditions that are joined by `and` are dropped as true, and those that are joined by `or` as false. A case whose
/// condition is dropped is never chosen.
fn conditions(tokens: &[Token<'_>], found: &mut Vec<Found>) {
    let mut at = 0;
    while at < tokens.len() {
        let token = tokens[at];
        let is_group = token.text == "(";
        let is_case = matches!(token.text, "when" | "if" | "elsif");
        let is_conflict = tokens.get(at + 1).is_some_and(|next| next.text == "conflict");
        if is_group || is_case || token.text == "where" || token.text == "on" && !is_conflict {
            let (operands, is_or) = chain(tokens, at + 1);
            if !is_group || operands.len() > 1 {
                for (first, last) in operands {
                    // The handler of an error is no condition, and a join needs one.
                    if matches!(tokens[first].text, "sqlstate" | "lock_not_available" | "true") {
                        continue;
                    }
                    let value = if is_or || is_case { "false" } else { "true" };
                    found.push(("drops", tokens[first].start..tokens[last].end, value.to_owned()));
                }
            }
        }
        at += 1;
    }
}

/// The operands of a chain of `and` or `or` from this token on, as places of their first and last tokens, and whether it
/// is one of `or`.
fn chain(tokens: &[Token<'_>], from: usize) -> (Vec<(usize, usize)>, bool) {
    let mut operands = Vec::new();
    let (mut first, mut at, mut is_or, mut between) = (from, from, false, false);
    // The branches of a CASE belong to its operand.
    let mut cases = 0;
    while at < tokens.len() {
        let after_distinct = at > 0 && tokens[at - 1].text == "distinct";
        match tokens[at].text {
            "case" => cases += 1,
            "end" if cases > 0 => cases -= 1,
            _ if cases > 0 => {}
            "(" => {
                at = closing(tokens, at);
            }
            ")" => break,
            "between" => between = true,
            "and" if between => between = false,
            word @ ("and" | "or") => {
                is_or |= word == "or";
                if at > first {
                    operands.push((first, at - 1));
                }
                first = at + 1;
            }
            "from" if after_distinct => {}
            word if ENDS.contains(&word) => break,
            _ => {}
        }
        at += 1;
    }
    let end = at.min(tokens.len());
    if end > first {
        operands.push((first, end - 1));
    }
    (operands, is_or)
}

/// The place of the parenthesis that closes this one.
fn closing(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.text {
            "(" => depth += 1,
            ")" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    tokens.len() - 1
}

/// Locks, the answer to a conflict, orders, and the smaller or greater of two values.
fn locks(sql: &str, tokens: &[Token<'_>], found: &mut Vec<Found>) {
    let word = |at: usize| tokens.get(at).map_or("", |token| token.text);
    for at in 0..tokens.len() {
        let token = tokens[at];
        let until = |last: usize| token.start..tokens[last].end;
        match token.text {
            "for" if word(at + 1) == "update" => {
                let last =
                    (at + 1..tokens.len()).take_while(|&at| word(at) != ")" && word(at) != ";").last().unwrap_or(at);
                found.push(("does not lock", until(last), String::new()));
            }
            "skip" if word(at + 1) == "locked" => found.push(("waits instead of", until(at + 1), String::new())),
            "on" if word(at + 1) == "conflict" => {
                found.push(("without", until(closing(tokens, at + 2) + 2), String::new()));
            }
            "pg_catalog.pg_try_advisory_xact_lock" | "pg_try_advisory_xact_lock" => {
                let last = closing(tokens, at + 1);
                let argument = &sql[tokens[at + 1].start..tokens[last].end];
                found.push(("does not take", until(last), "true".to_owned()));
                let waits = format!("(pg_catalog.pg_advisory_xact_lock{argument} is not null)");
                found.push(("waits instead of", until(last), waits));
            }
            "perform" | "raise" => {
                let last = (at..tokens.len()).find(|&at| word(at) == ";").unwrap_or(at);
                found.push(("without", until(last), "null;".to_owned()));
            }
            "least" | "greatest" if word(at + 1) == "(" => {
                let last = closing(tokens, at + 1);
                let mut depth = 0;
                let comma = (at + 1..last).find(|&at| {
                    depth += i32::from(word(at) == "(") - i32::from(word(at) == ")");
                    depth == 1 && word(at) == ","
                });
                let Some(comma) = comma else { continue };
                let first = sql[tokens[at + 2].start..tokens[comma - 1].end].to_owned();
                let second = sql[tokens[comma + 1].start..tokens[last - 1].end].to_owned();
                found.push(("takes the first of", until(last), first));
                found.push(("takes the second of", until(last), second));
            }
            "order" if word(at + 1) == "by" => {
                let mut depth = 0;
                let last = (at..tokens.len()).take_while(|&at| {
                    depth += i32::from(word(at) == "(") - i32::from(word(at) == ")");
                    depth >= 0 && !matches!(word(at), "limit" | "for" | "on" | ";" | "returning")
                });
                found.push(("without", until(last.last().unwrap_or(at)), String::new()));
            }
            _ => {}
        }
    }
}

/// Assignments of an update. The range of each includes a comma, so that the others remain a list.
fn assignments(tokens: &[Token<'_>], found: &mut Vec<Found>) {
    for set in (0..tokens.len()).filter(|&at| tokens[at].text == "set") {
        let mut commas = Vec::new();
        let mut at = set + 1;
        while at < tokens.len() && !matches!(tokens[at].text, "where" | "from" | "returning" | ";") {
            match tokens[at].text {
                "(" => at = closing(tokens, at),
                "case" => at += tokens[at..].iter().position(|token| token.text == "end").unwrap_or(0),
                "," => commas.push(at),
                _ => {}
            }
            at += 1;
        }
        let Some(&last) = commas.last() else { continue };
        let mut first = set + 1;
        for comma in commas {
            found.push((UNSET, tokens[first].start..tokens[comma].end, String::new()));
            first = comma + 1;
        }
        // The last one, of which the comma is before it.
        let end = tokens[at - 1].end;
        found.push((UNSET, tokens[last].start..end, String::new()));
    }
}

fn tokens(sql: &str) -> Vec<Token<'_>> {
    let bytes = sql.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'$');
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            byte if byte.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'-' if bytes.get(at + 1) == Some(&b'-') => {
                at += bytes[at..].iter().position(|&byte| byte == b'\n').unwrap_or(bytes.len() - at);
                continue;
            }
            b'\'' => at += 2 + bytes[at + 1..].iter().position(|&byte| byte == b'\'').unwrap_or(0),
            byte if is_word(byte) => at += bytes[at..].iter().take_while(|&&byte| is_word(byte)).count(),
            _ => at += 1,
        }
        tokens.push(Token { text: &sql[start..at], start, end: at });
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::of;

    #[test]
    fn each_condition_lock_and_assignment_of_a_statement_is_dropped_in_turn() {
        let sql = "update t set a = case when b then 1 end, c = f(1, 2) -- where d
            where key = $1 and (d is null or e between 1 and 2) and f is distinct from g
                and id in (select id from t where h order by id for update skip locked) returning a";
        let edits = of(sql);
        let names: Vec<&str> = edits.iter().map(|edit| &*edit.name).collect();
        assert_eq!(
            names,
            [
                "drops b",
                "drops key = $1",
                "drops (d is null or e between 1 and 2)",
                "drops f is distinct from g",
                "drops id in (select id from t where h order by id for update skip locked)",
                "drops d is null",
                "drops e between 1 and 2",
                "drops h",
                "without order by id",
                "does not lock for update skip locked",
                "waits instead of skip locked",
                "does not set a",
                "does not set c",
            ]
        );
        assert!(edits[11].apply(sql).starts_with("update t set  c = f(1, 2) -- where d"));
        assert!(edits[12].apply(sql).starts_with("update t set a = case when b then 1 end -- where d"));
    }
}
