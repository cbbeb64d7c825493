//! Edits of a statement, found in its text: each takes away one condition, lock, order or assignment.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::statement;

/// One edit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edit {
    /// What the statement loses. No other edit of the statement has the same name.
    pub(crate) name: String,
    /// The edited statement.
    pub(crate) sql: String,
}

/// The statements that were sent, and the functions that they called, by name. A name may have more than one text.
pub(crate) type Sql = BTreeMap<String, BTreeSet<String>>;

/// One edit of one statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mutant {
    pub(crate) statement: String,
    pub(crate) edit: String,
}

impl Mutant {
    /// The edited text of this statement, if it has what the edit takes away.
    pub(crate) fn apply(&self, name: &str, sql: &str) -> Option<String> {
        if name != self.statement {
            return None;
        }
        of(sql).into_iter().find(|edit| edit.name == self.edit).map(|edit| edit.sql)
    }
}

/// The edits of the statements that pass a wire.
#[derive(Clone, Debug, Default)]
pub(crate) struct Edits {
    /// Each try of an advisory lock first stops at a gate.
    pub(crate) inside: bool,
    pub(crate) mutant: Option<Mutant>,
}

impl Edits {
    pub(crate) fn apply(&self, sql: &str) -> String {
        let edited = self.mutant.as_ref().and_then(|mutant| mutant.apply(statement::name(sql), sql));
        // The time of a pause is a choice, too.
        let sql = edited.as_deref().unwrap_or(sql).replace("pg_sleep(0.01)", "pg_sleep(0)");
        if !self.inside {
            return sql;
        }
        let sql = sql.replace("pg_catalog.pg_try_advisory_xact_lock(", "interleave.stop_and_try(");
        // A copy, whose tries stop, too.
        sql.replace("idempotency.lock_in_order(", "interleave.lock_in_order(")
    }
}

/// The words, literals and signs of a statement, as places in its text.
struct Tokens<'s> {
    sql: &'s str,
    places: Vec<Range<usize>>,
}

/// What ends an operand on its level, besides a closing parenthesis.
const ENDS: &str = " order limit for returning from group then else when end where union set on left join ; , loop as \
     using select ";

/// Every edit of this statement.
pub(crate) fn of(sql: &str) -> Vec<Edit> {
    let tokens = Tokens::of(sql);
    let mut edits: Vec<Edit> = Vec::new();
    let mut add = |name: String, taken: Range<usize>, new: &str| {
        let same = edits.iter().filter(|other| other.name.split(" #").next() == Some(&name)).count();
        let name = if same == 0 { name } else { format!("{name} #{}", same + 1) };
        let taken = tokens.place(&taken);
        edits.push(Edit { name, sql: format!("{}{new}{}", &sql[..taken.start], &sql[taken.end..]) });
    };
    for at in 0..tokens.places.len() {
        let (word, next) = (tokens.word(at), tokens.word(at + 1));
        let plain =
            |what: &str, taken: &Range<usize>| format!("{what} {}", statement::plain(&sql[tokens.place(taken)]));
        match word {
            "on" if next == "conflict" => {
                let taken = at..tokens.closing(at + 2) + 3;
                add(plain("without", &taken), taken, "");
            }
            // Conditions that `and` joins are dropped as true, and those that `or` joins as false. A case whose
            // condition is dropped is never chosen.
            "(" | "where" | "on" | "when" | "if" | "elsif" => {
                let conditions = tokens.operands(at + 1, &["and", "or"]);
                let is_or = conditions.iter().any(|one| tokens.word(one.end) == "or");
                let is_case = matches!(word, "when" | "if" | "elsif");
                for one in conditions.iter().filter(|_| word != "(" || conditions.len() > 1) {
                    // The handler of an error is not a condition, and a join needs one.
                    if !matches!(tokens.word(one.start), "sqlstate" | "lock_not_available" | "true") {
                        add(plain("drops", one), one.clone(), if is_or || is_case { "false" } else { "true" });
                    }
                }
            }
            "set" => {
                let assignments = tokens.operands(at + 1, &[","]);
                for one in assignments.iter().filter(|_| assignments.len() > 1) {
                    // With a comma, so that the others remain a list.
                    let is_last = tokens.word(one.end) != ",";
                    let taken = if is_last { one.start - 1..one.end } else { one.start..one.end + 1 };
                    add(format!("does not set {}", tokens.word(one.start)), taken, "");
                }
            }
            "least" | "greatest" if next == "(" => {
                let taken = at..tokens.closing(at + 1) + 1;
                for (which, value) in ["first", "second"].into_iter().zip(tokens.operands(at + 2, &[","])) {
                    add(plain(&format!("takes the {which} of"), &taken), taken.clone(), &sql[tokens.place(&value)]);
                }
            }
            "order" if next == "by" => {
                let columns = tokens.operands(at + 2, &[","]);
                let taken = at..columns.last().map_or(at + 2, |last| last.end);
                add(plain("without", &taken), taken, "");
            }
            "for" if next == "update" => {
                let taken = at..tokens.operands(at + 1, &[])[0].end;
                add(plain("does not lock", &taken), taken, "");
            }
            "skip" if next == "locked" => add("waits instead of skip locked".to_owned(), at..at + 2, ""),
            "pg_catalog.pg_try_advisory_xact_lock" | "pg_try_advisory_xact_lock" => {
                let taken = at..tokens.closing(at + 1) + 1;
                let key = &sql[tokens.place(&(at + 1..taken.end))];
                add(plain("does not take", &taken), taken.clone(), "true");
                let waits = format!("(pg_catalog.pg_advisory_xact_lock{key} is not null)");
                add(plain("waits instead of", &taken), taken, &waits);
            }
            // Of the messages that begin and end a transaction.
            "1" if next == "/" => add("without the check".to_owned(), at..tokens.closing(at + 2) + 1, "1"),
            "isolation" if next == "level" => {
                add("at the session's level".to_owned(), at..at + 4, "");
                add("with one snapshot".to_owned(), at + 2..at + 4, "repeatable read");
            }
            "'exempt '" | "'step '" => {
                add(format!("does not set '{}'", word.trim_matches(['\'', ' '])), at..at + 1, "''");
            }
            "and" if next == "chain" => add("without and chain".to_owned(), at..at + 2, ""),
            // The end of an attempt whose work has begun. The sums with a time renew a lease.
            "lease_until"
                if [next, tokens.word(at + 2), tokens.word(at + 5)] == ["=", "pg_catalog.statement_timestamp", ","] =>
            {
                add("releases in place of lapsing".to_owned(), at + 2..at + 5, "'-infinity'");
            }
            "perform" | "raise" => {
                let end = (at..tokens.places.len()).find(|&at| tokens.word(at) == ";").unwrap_or(at);
                let taken = at..end + 1;
                add(plain("without", &taken), taken, "null;");
            }
            _ => {}
        }
    }
    edits
}

impl<'s> Tokens<'s> {
    fn of(sql: &'s str) -> Self {
        let bytes = sql.as_bytes();
        let mut places = Vec::new();
        let mut at = 0;
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'$');
        let until = |at: usize, end: u8| bytes[at..].iter().position(|&byte| byte == end).unwrap_or(bytes.len() - at);
        while at < bytes.len() {
            let start = at;
            match bytes[at] {
                b'-' if bytes.get(at + 1) == Some(&b'-') => {
                    at += until(at, b'\n');
                    continue;
                }
                b'/' if bytes.get(at + 1) == Some(&b'*') => {
                    at += sql[at..].find("*/").map_or(bytes.len() - at, |end| end + 2);
                    continue;
                }
                b'\'' => at += 2 + until(at + 1, b'\''),
                byte if is_word(byte) => at += bytes[at..].iter().take_while(|&&byte| is_word(byte)).count(),
                _ => at += 1,
            }
            if !bytes[start].is_ascii_whitespace() {
                places.push(start..at);
            }
        }
        Self { sql, places }
    }

    /// The token at this place, or nothing behind the end.
    fn word(&self, at: usize) -> &'s str {
        self.places.get(at).map_or("", |place| &self.sql[place.clone()])
    }

    /// The place of these tokens in the text.
    fn place(&self, tokens: &Range<usize>) -> Range<usize> {
        self.places[tokens.start].start..self.places[tokens.end - 1].end
    }

    /// The place of the parenthesis that closes this one.
    fn closing(&self, open: usize) -> usize {
        let mut depth = 0;
        let closes = |&at: &usize| {
            depth += i32::from(self.word(at) == "(") - i32::from(self.word(at) == ")");
            depth == 0
        };
        (open..self.places.len()).find(closes).unwrap_or(self.places.len() - 1)
    }

    /// The operands from this token on, between these separators.
    fn operands(&self, from: usize, separators: &[&str]) -> Vec<Range<usize>> {
        let mut operands = Vec::new();
        let (mut first, mut at, mut between) = (from, from, false);
        // The branches of a CASE belong to its operand.
        let mut cases = 0;
        while at < self.places.len() {
            match self.word(at) {
                "case" => cases += 1,
                "end" if cases > 0 => cases -= 1,
                _ if cases > 0 => {}
                "(" => at = self.closing(at),
                ")" => break,
                "between" => between = true,
                "and" if between => between = false,
                word if separators.contains(&word) => {
                    operands.push(first..at);
                    first = at + 1;
                }
                "from" if self.word(at - 1) == "distinct" => {}
                word if ENDS.contains(&format!(" {word} ")) => break,
                _ => {}
            }
            at += 1;
        }
        operands.push(first..at);
        operands.retain(|operand| !operand.is_empty());
        operands
    }
}

#[cfg(test)]
mod tests {
    use super::of;

    #[test]
    fn each_condition_lock_and_assignment_of_a_statement_is_taken_away_in_turn() {
        let sql = "update /* name */ t set a = case when b then 1 end, c = f(1, 2) -- where d
            where key = $1 and (d is null or e between 1 and 2) and f is distinct from g
                and id in (select id from t where h order by id for update skip locked) returning a";
        let edits = of(sql);
        let names: Vec<&str> = edits.iter().map(|edit| &*edit.name).collect();
        assert_eq!(
            names,
            [
                "does not set a",
                "does not set c",
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
            ]
        );
        assert!(edits[0].sql.starts_with("update /* name */ t set  c = f(1, 2) -- where d"));
        assert!(edits[1].sql.starts_with("update /* name */ t set a = case when b then 1 end -- where d"));
    }
}
