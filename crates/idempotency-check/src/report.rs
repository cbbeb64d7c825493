//! The report: values for a program, JSON for a file, and text for a person.

use std::collections::BTreeSet;
use std::fmt;

use clap::ValueEnum as _;
use comfy_table::{Table, presets};
use serde::Serialize;

use crate::client::Answer;
use crate::judge::{Interruption, Verdict};
use crate::proxy::shorten;

/// The longest part of an answer that is shown, in characters.
const BODY: usize = 200;

/// A story of more than `STORY` lines is shortened to its first `BEGIN` lines and its last lines.
const STORY: usize = 36;
const BEGIN: usize = 30;

/// The result of a check.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The service that was checked.
    pub service: Checked,
    /// The messages of an undisturbed request.
    pub messages: Vec<Numbered>,
    /// The tries with an interruption: each interruption of each message.
    pub tries: Vec<Try>,
    /// The tries without an interruption.
    pub undisturbed: Vec<Try>,
    /// The tries, out of `undisturbed` and `tries`, that have a verdict other than [`Verdict::OneEffect`].
    pub findings: Vec<Try>,
    /// Remarks for the reader of the report.
    pub notes: Vec<String>,
}

/// The service.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Checked {
    /// The URL of the request. The string is empty if a function sends the request.
    pub url: String,
    /// The method of the request.
    pub method: String,
    /// The command that starts the service.
    pub command: Vec<String>,
    /// Whether the check kills the service and starts it again.
    pub killed: bool,
}

/// A message of the undisturbed request.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Numbered {
    /// The number of the message, from 1.
    pub number: usize,
    /// The statements of the message, shortened.
    pub sql: String,
}

/// An answer, as the story of a try shows it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Told {
    /// The name of the request: `first`, `retry`, `duplicate`, `again`, `whole`, or the name of a variant.
    pub request: &'static str,
    /// The status of the answer, or `None` if no answer came.
    pub status: Option<u16>,
    /// The shortened body, or the reason why no answer came.
    pub body: String,
}

/// All requests with one key, either with an interruption of one message or without an interruption.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Try {
    /// The number of the interrupted message. `None` for a check without an interruption.
    pub message: Option<usize>,
    /// The interruption of the message.
    pub interruption: Option<Interruption>,
    /// The name of a check without an interruption, such as `two_at_once`.
    pub check: Option<&'static str>,
    /// Whether the message occurred.
    pub reached: bool,
    /// The verdict. `None` if the message did not occur, or if the check does not judge this request.
    pub verdict: Option<Verdict>,
    /// The idempotency key.
    pub key: String,
    /// A text that explains the verdict. Without a verdict, the text describes what happened.
    pub detail: String,
    /// The effect of an undisturbed request.
    pub expected: Vec<Vec<String>>,
    /// The effect of this try.
    pub effect: Vec<Vec<String>>,
    /// The answers that the clients got.
    pub answers: Vec<Told>,
    /// The events of the try, in their order.
    pub story: Vec<String>,
}

impl Try {
    /// The name of the try, such as `7:lost-after` or `two at once`.
    pub(crate) fn place(&self) -> String {
        match (self.message, self.interruption) {
            (Some(message), Some(interruption)) => format!("{message}:{}", interruption.name()),
            _ => self.check.unwrap_or_default().replace('_', " "),
        }
    }
}

impl Told {
    pub(crate) fn new(request: &'static str, answer: &Result<Answer, String>) -> Self {
        match answer {
            Ok(answer) => {
                let body = shorten(&String::from_utf8_lossy(&answer.body), BODY);
                Self { request, status: Some(answer.status), body }
            }
            Err(reason) => Self { request, status: None, body: reason.clone() },
        }
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body = shorten(&self.body, 100);
        match self.status {
            Some(status) => write!(f, "answer to the {} request: {status} {body}", self.request),
            None => write!(f, "no answer to the {} request: {body}", self.request),
        }
    }
}

impl Report {
    pub(crate) fn conclude(&mut self) {
        let is_wrong = |it: &&Try| it.verdict.is_some_and(|verdict| verdict != Verdict::OneEffect);
        self.findings = self.undisturbed.iter().chain(&self.tries).filter(is_wrong).cloned().collect();
        let missed = self.tries.iter().filter(|it| !it.reached).count();
        if missed > 0 {
            self.notes.push(format!(
                "{missed} tries did not reach their message, which is no finding: the messages change from run to run"
            ));
        }
    }

    /// A table with the number of tries for each interruption and each verdict.
    fn table(&self) -> Table {
        let used: BTreeSet<_> = self.tries.iter().filter_map(|it| it.verdict).collect();
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        let heads = used.iter().map(ToString::to_string);
        table.set_header(["interruption".to_owned(), "tried".to_owned()].into_iter().chain(heads));
        for &interruption in Interruption::value_variants() {
            let of = || self.tries.iter().filter(move |it| it.interruption == Some(interruption) && it.reached);
            if of().next().is_some() {
                let count = |verdict| of().filter(|it| it.verdict == Some(verdict)).count().to_string();
                let counts = used.iter().map(|&verdict| count(verdict));
                table.add_row([interruption.name(), of().count().to_string()].into_iter().chain(counts));
            }
        }
        table
    }
}

/// The report as a text for a person.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "The request sends {} messages to the database:\n", self.messages.len())?;
        for message in &self.messages {
            writeln!(f, "{:>4}  {}", message.number, message.sql)?;
        }
        if !self.tries.is_empty() {
            writeln!(f, "\n{}", self.table())?;
        }
        if !self.undisturbed.is_empty() {
            writeln!(f, "\nWithout an interruption:\n")?;
        }
        let lines = self.undisturbed.iter().map(|it| {
            let verdict = it.verdict.map(|verdict| verdict.to_string());
            let detail = [verdict.as_deref().unwrap_or(""), &it.detail];
            let detail: Vec<_> = detail.into_iter().filter(|part| !part.is_empty()).collect();
            format!("  {:<20} {}", it.place(), detail.join(": "))
        });
        let mut lines: Vec<_> = lines.collect();
        // Some checks run several times, and usually get the same line each time.
        lines.dedup();
        for line in lines {
            writeln!(f, "{line}")?;
        }
        for finding in &self.findings {
            let (place, verdict) = (finding.place(), finding.verdict.map(|verdict| verdict.to_string().to_uppercase()));
            writeln!(f, "\n{}, at {place}: {}\n", verdict.unwrap_or_default(), finding.detail)?;
            let left_out = finding.story.len().saturating_sub(STORY);
            for (at, line) in finding.story.iter().enumerate() {
                match at {
                    // The last lines of the story are kept, because they show the outcome of the try.
                    BEGIN if left_out > 0 => writeln!(f, "        … {} more lines; --report has them", left_out)?,
                    _ if at >= BEGIN && at < BEGIN + left_out => {}
                    _ => writeln!(f, "  {line}")?,
                }
            }
        }
        for note in &self.notes {
            writeln!(f, "\nNote: {note}.")?;
        }
        let tried = self.tries.iter().filter(|it| it.reached).count();
        write!(f, "\n{tried} interruptions tried, {} findings.", self.findings.len())
    }
}
