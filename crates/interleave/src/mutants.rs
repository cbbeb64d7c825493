//! Edits of the crate's own SQL, found automatically: each drops one condition, lock or order of one statement.
//! `mutants.txt` beside this crate has the scenario that finds each of them, or the reason why none does.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::statement;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/mutants.txt");
const HEAD: &str = "\
# Each line is an edit of the crate's SQL, and the scenario that finds it, or the reason why none does. Written by
# script/interleave --mutants --record, which keeps the reasons.
";
const FOUND: &str = "found by ";
/// The reason of a survivor for which nobody has written one.
pub(crate) const NO_REASON: &str = "survives: no reason is written";

/// The fate of each edit, by its label.
#[derive(Debug, Default)]
pub(crate) struct Fates(BTreeMap<String, String>);

impl Fates {
    pub(crate) fn read() -> Self {
        let text = std::fs::read_to_string(PATH).unwrap_or_default();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self(
            lines.filter_map(|line| line.split_once(" => ")).map(|(label, fate)| (label.into(), fate.into())).collect(),
        )
    }

    pub(crate) fn get(&self, label: &str) -> Option<&str> {
        self.0.get(label).map(String::as_str)
    }

    /// The scenario that finds this edit.
    pub(crate) fn finder(&self, label: &str) -> Option<&str> {
        self.get(label)?.strip_prefix(FOUND)
    }

    pub(crate) fn write(fates: &BTreeMap<String, Option<String>>) -> anyhow::Result<()> {
        let before = Self::read();
        let mut text = HEAD.to_owned();
        let mut statement = "";
        for (label, finder) in fates {
            let of = label.split(": ").next().unwrap_or_default();
            if of != statement {
                statement = of;
                writeln!(text)?;
            }
            match finder {
                Some(scenario) => writeln!(text, "{label} => {FOUND}{scenario}")?,
                None => {
                    let reason = before.get(label).filter(|fate| !fate.starts_with(FOUND)).unwrap_or(NO_REASON);
                    writeln!(text, "{label} => {reason}")?;
                }
            }
        }
        Ok(std::fs::write(PATH, text)?)
    }

    /// The labels that are listed, and are none of these.
    pub(crate) fn stale<'f>(&'f self, of: &'f BTreeMap<String, Option<String>>) -> impl Iterator<Item = &'f str> {
        self.0.keys().map(String::as_str).filter(|label| !of.contains_key(*label))
    }
}

/// One edit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mutant {
    /// The statement, and what it lost.
    pub(crate) label: String,
    pub(crate) original: String,
    pub(crate) edited: String,
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
pub(crate) fn of(name: &str, sql: &str) -> Vec<Mutant> {
    let tokens = tokens(sql);
    let mut edits = Vec::new();
    conditions(&tokens, &mut edits);
    locks(sql, &tokens, &mut edits);
    let mut mutants: Vec<Mutant> = Vec::new();
    for (what, range, new) in edits {
        let edited = format!("{}{new}{}", &sql[..range.start], &sql[range.end..]);
        let label = format!("{name}: {what} {}", statement::plain(&sql[range]));
        let same = mutants.iter().filter(|other| other.label.split(" #").next() == Some(&label)).count();
        let label = if same == 0 { label } else { format!("{label} #{}", same + 1) };
        mutants.push(Mutant { label, original: sql.to_owned(), edited });
    }
    mutants
}

type Edit = (&'static str, std::ops::Range<usize>, String);

/// Conditions that are joined by `and` are dropped as true, and those that are joined by `or` as false. A case whose
/// condition is dropped is never chosen.
fn conditions(tokens: &[Token<'_>], edits: &mut Vec<Edit>) {
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
                    // The handler of an error is no condition.
                    if matches!(tokens[first].text, "sqlstate" | "lock_not_available") {
                        continue;
                    }
                    let value = if is_or || is_case { "false" } else { "true" };
                    edits.push(("drops", tokens[first].start..tokens[last].end, value.to_owned()));
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
fn locks(sql: &str, tokens: &[Token<'_>], edits: &mut Vec<Edit>) {
    let word = |at: usize| tokens.get(at).map_or("", |token| token.text);
    for at in 0..tokens.len() {
        let token = tokens[at];
        let until = |last: usize| token.start..tokens[last].end;
        match token.text {
            "for" if word(at + 1) == "update" => {
                let last =
                    (at + 1..tokens.len()).take_while(|&at| word(at) != ")" && word(at) != ";").last().unwrap_or(at);
                edits.push(("does not lock", until(last), String::new()));
            }
            "skip" if word(at + 1) == "locked" => edits.push(("waits instead of", until(at + 1), String::new())),
            "on" if word(at + 1) == "conflict" => {
                edits.push(("without", until(closing(tokens, at + 2) + 2), String::new()));
            }
            "pg_catalog.pg_try_advisory_xact_lock" | "pg_try_advisory_xact_lock" => {
                let last = closing(tokens, at + 1);
                let argument = &sql[tokens[at + 1].start..tokens[last].end];
                edits.push(("does not take", until(last), "true".to_owned()));
                let waits = format!("(pg_catalog.pg_advisory_xact_lock{argument} is not null)");
                edits.push(("waits instead of", until(last), waits));
            }
            "perform" | "raise" => {
                let last = (at..tokens.len()).find(|&at| word(at) == ";").unwrap_or(at);
                edits.push(("without", until(last), "null;".to_owned()));
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
                edits.push(("takes the first of", until(last), first));
                edits.push(("takes the second of", until(last), second));
            }
            "order" if word(at + 1) == "by" => {
                let mut depth = 0;
                let last = (at..tokens.len()).take_while(|&at| {
                    depth += i32::from(word(at) == "(") - i32::from(word(at) == ")");
                    depth >= 0 && !matches!(word(at), "limit" | "for" | "on" | ";" | "returning")
                });
                edits.push(("without", until(last.last().unwrap_or(at)), String::new()));
            }
            _ => {}
        }
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
    fn each_condition_and_each_lock_of_a_statement_is_dropped_in_turn() {
        let sql = "update t set a = case when b then 1 end -- where c
            where key = $1 and (d is null or e between 1 and 2) and f is distinct from g
                and id in (select id from t where h order by id for update skip locked) returning a";
        let labels: Vec<String> = of("update", sql).into_iter().map(|mutant| mutant.label).collect();
        assert_eq!(
            labels,
            [
                "update: drops b",
                "update: drops key = $1",
                "update: drops (d is null or e between 1 and 2)",
                "update: drops f is distinct from g",
                "update: drops id in (select id from t where h order by id for update skip locked)",
                "update: drops d is null",
                "update: drops e between 1 and 2",
                "update: drops h",
                "update: without order by id",
                "update: does not lock for update skip locked",
                "update: waits instead of skip locked",
            ]
        );
    }
}
