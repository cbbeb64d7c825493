//! The traces of the schedules, in the words of `model/Steps.tla`: which actor sent which statement, what the server
//! answered, and what was committed then. `script/model` asks the specification whether it allows them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::words::letter;

/// Scenarios whose schedules are not traces of the specification: a part of their names, and the reason.
const OUTSIDE: &[(&str, &str)] = &[
    ("select-first", "a replay without a claim and a look"),
    ("sql-", "a function of the schema has several statements"),
    ("repeatable-read", "a snapshot is older than its statement"),
    ("batch-", "several keys"),
    ("twice", "a call that sees the row of its own transaction"),
    ("without-key", "a request without a key"),
    ("unbegun", "attempts are not counted, and so the release of a claim that never began is no action"),
    ("lease-kills", "as unbegun"),
    ("lease-once-drops", "as unbegun"),
    ("reconcile", "a reconciler settles as an operator does, and its notes are not in the record"),
    ("lapsed-operators", "two operators"),
    ("expired-wakes", "the owner that renews its lease is not an actor of the scenario"),
    ("lapsed-wakes", "as expired-wakes"),
];

/// What the server has answered to a statement, and the parameters of the statement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Heard {
    parameters: Vec<Vec<u8>>,
    pub(crate) row: Vec<Vec<u8>>,
    pub(crate) tag: String,
}

impl Heard {
    pub(crate) fn of<'b>(parameters: impl Iterator<Item = &'b [u8]>) -> Self {
        Self { parameters: parameters.map(<[u8]>::to_vec).collect(), ..Self::default() }
    }

    /// Whether the statement has changed or returned a row.
    fn has_rows(&self) -> bool {
        !self.tag.ends_with(" 0")
    }

    /// A column of type boolean. `None` if it is null.
    fn flag(&self, column: usize) -> Option<bool> {
        self.row.get(column).and_then(|value| value.first()).map(|&byte| byte == 1)
    }
}

/// A statement and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    actor: usize,
    message: String,
    answer: String,
    /// The mode and the fingerprint of a claim.
    asks: Option<(String, String)>,
}

impl Event {
    pub(crate) fn actor(&self) -> usize {
        self.actor
    }

    /// Whether its statement has taken over the record of another call.
    pub(crate) fn takes_over(&self) -> bool {
        self.message == "take over" && self.answer == "won"
    }

    pub(crate) fn of(actor: usize, message: &str, heard: Heard) -> Self {
        // A COMMIT of a transaction that has failed rolls it back.
        let message = if message == "commit" && heard.tag == "ROLLBACK" { "rollback" } else { message };
        // The specification has one statement that reads the record.
        let (message, replayed) = match message {
            "response" if heard.has_rows() => ("look", true),
            _ => (message, false),
        };
        let either = |yes: &'static str, no: &'static str| if heard.has_rows() { yes } else { no };
        let answer = match message {
            "claim" => either("won", "nothing"),
            "look" if replayed => "replayed",
            "look" => match heard.flag(3) {
                None => "found",
                Some(true) => "free",
                Some(false) => "held",
            },
            "take over" => match (heard.flag(0), heard.flag(1), heard.flag(2)) {
                (None, ..) => "changed",
                (Some(false), ..) => "held",
                (_, Some(false), _) => "locked",
                (.., Some(true)) => "won",
                _ => "kept",
            },
            "await" => match heard.row.first().map(Vec::as_slice) {
                Some(b"claim") => "claim",
                Some(b"look") => "look",
                _ => "timeout",
            },
            "sweep" => {
                let swept = heard.row.iter().take(4).any(|count| count.iter().any(|&byte| byte != 0));
                if swept { "swept" } else { "nothing" }
            }
            "commit" => "heard",
            "rollback" => "",
            "read" => either("row", "nothing"),
            _ => either("stored", "nothing"),
        };
        let text = |at: usize| heard.parameters.get(at).cloned().unwrap_or_default();
        let asks = (message == "claim").then(|| {
            let fingerprint = text(4).iter().map(|byte| format!("{byte:02x}")).collect();
            (String::from_utf8_lossy(&text(7)).into_owned(), fingerprint)
        });
        Self { actor, message: message.to_owned(), answer: answer.to_owned(), asks }
    }
}

/// A committed record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen(Vec<String>);

impl Seen {
    pub(crate) fn of(columns: Vec<String>) -> Option<Self> {
        (columns.len() == 8).then_some(Self(columns))
    }

    /// Why no call may take this record over, if there is a reason.
    pub(crate) fn is_kept(&self) -> Option<&'static str> {
        let [_, done, expired, lease, _, _, _, send] = &*self.0 else { return None };
        match (&**lease, expired.starts_with('t')) {
            ("live", _) => Some("a live lease"),
            (_, false) if done.starts_with('t') => Some("a response"),
            (_, false) if send == "begun" => Some("a step in doubt"),
            _ => None,
        }
    }

    fn in_tla(&self, bodies: &mut Numbers) -> String {
        let [mode, done, expired, lease, body, response, pay, send] = &*self.0 else { return "None".to_owned() };
        let flag = |text: &str| if text.starts_with('t') { "TRUE" } else { "FALSE" };
        // The response of a call is the letter of its actor. Operations in steps have others.
        let by = match response.trim_matches('"') {
            letter if letter.len() == 1 => format!("\"{letter}\""),
            _ => "None".to_owned(),
        };
        let pay = if pay.starts_with('t') { "done" } else { "new" };
        format!(
            "[mode |-> \"{mode}\", done |-> {}, expired |-> {}, lease |-> \"{lease}\", body |-> {}, by |-> {by}, \
            steps |-> [pay |-> \"{pay}\", send |-> \"{send}\"]]",
            flag(done),
            flag(expired),
            bodies.of(body)
        )
    }
}

/// Numbers for fingerprints, as they occur.
#[derive(Default)]
struct Numbers(Vec<String>);

impl Numbers {
    fn of(&mut self, text: &str) -> usize {
        let at = self.0.iter().position(|known| known == text);
        1 + at.unwrap_or_else(|| {
            self.0.push(text.to_owned());
            self.0.len() - 1
        })
    }
}

/// From one state in which all actors rest to the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) events: Vec<Event>,
    pub(crate) killed: Option<usize>,
    /// What the calls have returned so far.
    pub(crate) told: Vec<Option<String>>,
    pub(crate) seen: Option<Seen>,
    pub(crate) holders: BTreeSet<usize>,
}

/// The schedules of a scenario. Schedules with the same beginning share it.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Each step, and the steps that follow in some schedule. The first one is the start.
    nodes: Vec<(Step, Vec<usize>)>,
}

impl Tree {
    pub(crate) fn add<'s>(&mut self, steps: impl Iterator<Item = &'s Step>) {
        let mut at: Option<usize> = None;
        for step in steps {
            let siblings = at
                .map_or(0..self.nodes.len().min(1), |_| 0..0)
                .chain(at.map_or(&[][..], |at| &self.nodes[at].1).iter().copied());
            let known = siblings.into_iter().find(|&node| self.nodes[node].0 == *step);
            let next = known.unwrap_or(self.nodes.len());
            if known.is_none() {
                self.nodes.push((step.clone(), Vec::new()));
                if let Some(at) = at {
                    self.nodes[at].1.push(next);
                }
            }
            at = Some(next);
        }
    }
}

pub(crate) fn is_outside(scenario: &str) -> bool {
    OUTSIDE.iter().any(|(part, _)| scenario.contains(part))
}

/// The module with the traces of these scenarios.
#[derive(Default)]
pub(crate) struct Module {
    /// For each node: its fields, and the nodes that follow.
    nodes: Vec<(String, Vec<usize>)>,
    roots: Vec<(usize, String)>,
    scenarios: Vec<String>,
}

impl Module {
    pub(crate) fn add(&mut self, name: &str, tree: &Tree) {
        if tree.nodes.is_empty() {
            return;
        }
        let mut bodies = Numbers::default();
        let mut terms = BTreeMap::new();
        let mut roles = BTreeMap::new();
        for event in tree.nodes.iter().flat_map(|(step, _)| &step.events) {
            if let Some((mode, body)) = &event.asks {
                terms.entry(event.actor).or_insert_with(|| (mode.clone(), bodies.of(body)));
            }
            match &*event.message {
                "sweep" => {
                    roles.insert(event.actor, "janitor");
                }
                "resolve" | "release unperformed" | "settle step" | "release step" | "forget" => {
                    roles.insert(event.actor, "Y");
                }
                "move time" => {
                    roles.insert(event.actor, "clock");
                }
                _ => {}
            }
        }
        let first = &tree.nodes[0].0;
        let record = first.seen.as_ref().map_or("None".to_owned(), |seen| seen.in_tla(&mut bodies));
        let calls = (0..first.told.len()).map(|at| {
            let (mode, body) = terms.get(&at).cloned().unwrap_or(("transaction".to_owned(), 1));
            format!("{} |-> [mode |-> \"{mode}\", body |-> {body}]", letter(at))
        });
        let root = format!("[record |-> {record}, asks |-> [{}]]", calls.collect::<Vec<_>>().join(", "));
        let mut at = vec![(0, None)];
        while let Some((node, before)) = at.pop() {
            let (step, next) = &tree.nodes[node];
            let mut last = before;
            let mut lines: Vec<(String, String, String)> = Vec::new();
            if let Some(killed) = step.killed {
                lines.push((letter(killed).to_string(), "kill".to_owned(), String::new()));
            }
            for (place, event) in step.events.iter().enumerate() {
                let actor = roles.get(&event.actor).map_or(letter(event.actor).to_string(), |&role| role.to_owned());
                let later = step.events[place + 1..].iter().any(|later| later.actor == event.actor);
                let answer = match &*event.answer {
                    "found" if !later => told(step, event.actor),
                    answer => answer.to_owned(),
                };
                lines.push((actor, event.message.clone(), answer));
            }
            if before.is_none() {
                lines.insert(0, (String::new(), "nothing".to_owned(), String::new()));
            }
            if lines.is_empty() {
                lines.push((String::new(), "nothing".to_owned(), String::new()));
            }
            let count = lines.len();
            for (place, (actor, message, answer)) in lines.into_iter().enumerate() {
                let seen = if place + 1 == count {
                    let record = step.seen.as_ref().map_or("None".to_owned(), |seen| seen.in_tla(&mut bodies));
                    let holders: Vec<String> = step.holders.iter().map(|&at| format!("\"{}\"", letter(at))).collect();
                    format!("[record |-> {record}, locks |-> {{{}}}]", holders.join(", "))
                } else {
                    "None".to_owned()
                };
                let line = format!("\"{actor}\", \"{message}\", \"{answer}\", {seen}");
                self.nodes.push((line, Vec::new()));
                let new = self.nodes.len();
                match last {
                    None => self.roots.push((new, root.clone())),
                    Some(last) => {
                        let last: usize = last;
                        self.nodes[last - 1].1.push(new)
                    }
                }
                last = Some(new);
            }
            if before.is_none() {
                self.scenarios.push(name.to_owned());
            }
            at.extend(next.iter().map(|&next| (next, last)));
        }
    }

    pub(crate) fn text(&self) -> String {
        let mut text =
            "---- MODULE Traces ----\n\\* Written by script/interleave --traces.\nEXTENDS Steps\n".to_owned();
        let roots: Vec<String> =
            self.roots.iter().map(|(node, root)| format!("[node |-> {node}, start |-> {root}]")).collect();
        let _ = writeln!(text, "Roots == {{{}}}\nNodes == <<", roots.join(",\n  "));
        let nodes: Vec<String> = self
            .nodes
            .iter()
            .map(|(node, next)| {
                let next: Vec<String> = next.iter().map(usize::to_string).collect();
                format!("  <<{node}, {{{}}}>>", next.join(", "))
            })
            .collect();
        let _ = writeln!(text, "{}\n>>\n====", nodes.join(",\n"));
        for (scenario, (node, _)) in self.scenarios.iter().zip(&self.roots) {
            let _ = writeln!(text, "{node} {scenario}");
        }
        text
    }
}

/// What a look has meant for the call: a row of the table of answers.
fn told(step: &Step, actor: usize) -> String {
    match step.told.get(actor).and_then(Option::as_deref) {
        Some(told) if told.starts_with("replayed") || told.starts_with("duplicate") => "replayed",
        Some(told) if told.starts_with("InFlight") => "InFlight",
        Some(told) if told.starts_with("KeyReused") => "KeyReused",
        Some(told) if told.starts_with("OtherMode") => "OtherMode",
        Some(told) if told.starts_with("Indeterminate") => "Indeterminate",
        // The next statement of the call shows it.
        _ => "found",
    }
    .to_owned()
}
