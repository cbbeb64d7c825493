//! The report: values for a program, JSON for a file, and text for a person.

use std::fmt;

use comfy_table::{Table, presets};
use serde::Serialize;

use crate::client::Answer;
use crate::judge::{Interruption, Verdict};
use crate::proxy::shorten;

/// How much of an answer is shown.
const BODY: usize = 200;

/// How many lines of a story are shown, and how many of them are its beginning.
const STORY: usize = 36;
const BEGIN: usize = 30;

/// What the check found.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// What was checked.
    pub service: Checked,
    /// The messages of an undisturbed request.
    pub messages: Vec<Numbered>,
    /// Every interruption of every message.
    pub tries: Vec<Try>,
    /// What happens without an interruption.
    pub undisturbed: Vec<Undisturbed>,
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// What a reader should know besides.
    pub notes: Vec<String>,
}

/// The service.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Checked {
    /// Where the request goes; empty for a function.
    pub url: String,
    /// The method of the request.
    pub method: String,
    /// The command that starts it.
    pub command: Vec<String>,
    /// Whether it was killed and started again.
    pub killed: bool,
}

/// A message of the undisturbed request.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Numbered {
    /// From 1.
    pub number: usize,
    /// What it executes, shortened.
    pub sql: String,
}

/// An answer, as a story shows it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Told {
    /// `first`, `retry`, `duplicate`, `again`, or a variant of the request.
    pub request: &'static str,
    /// `None` if no answer came.
    pub status: Option<u16>,
    /// The body, shortened, or why no answer came.
    pub body: String,
}

/// One interruption of one message.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Try {
    /// The number of the message.
    pub message: usize,
    /// What was done to it.
    pub interruption: Interruption,
    /// Whether the message occurred in this try.
    pub reached: bool,
    /// `None` if it was not reached.
    pub verdict: Option<Verdict>,
    /// The idempotency key.
    pub key: String,
    /// The verdict in words.
    pub detail: String,
    /// The effect of an undisturbed request.
    pub expected: Vec<Vec<String>>,
    /// The effect of this one.
    pub effect: Vec<Vec<String>>,
    /// What the client was told.
    pub answers: Vec<Told>,
    /// What happened, in order.
    pub story: Vec<String>,
}

/// One kind of requests without an interruption.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Undisturbed {
    /// Its name, such as `two_at_once`.
    pub check: &'static str,
    /// `None` if nothing is judged.
    pub verdict: Option<Verdict>,
    /// Whether it can be a finding.
    pub judged: bool,
    /// The verdict in words, or what happened.
    pub detail: String,
    /// The effect.
    pub effect: Vec<Vec<String>>,
    /// What the clients were told.
    pub answers: Vec<Told>,
    /// What happened, in order.
    pub story: Vec<String>,
}

/// Something that is wrong.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// The number of the message, if one was interrupted.
    pub message: Option<usize>,
    /// What was done to it.
    pub interruption: Option<Interruption>,
    /// Which requests without an interruption.
    pub check: Option<&'static str>,
    /// What is wrong.
    pub verdict: Verdict,
    /// In words.
    pub detail: String,
    /// What happened, in order.
    pub story: Vec<String>,
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
        let wrong = |verdict: Option<Verdict>| verdict.filter(|verdict| *verdict != Verdict::OneEffect);
        let undisturbed = self.undisturbed.iter().filter(|it| it.judged).filter_map(|it| {
            let verdict = wrong(it.verdict)?;
            let (detail, story) = (it.detail.clone(), it.story.clone());
            Some(Finding { message: None, interruption: None, check: Some(it.check), verdict, detail, story })
        });
        let interrupted = self.tries.iter().filter_map(|it| {
            let verdict = wrong(it.verdict)?;
            let (detail, story) = (it.detail.clone(), it.story.clone());
            let (message, interruption) = (Some(it.message), Some(it.interruption));
            Some(Finding { message, interruption, check: None, verdict, detail, story })
        });
        self.findings = undisturbed.chain(interrupted).collect();
        let missed = self.tries.iter().filter(|it| !it.reached).count();
        if missed > 0 {
            self.notes.push(format!("{missed} tries did not reach their message: the messages change from run to run"));
        }
    }

    /// How often each interruption had each verdict.
    fn table(&self) -> Table {
        let used: Vec<_> = Verdict::ALL
            .into_iter()
            .filter(|&verdict| self.tries.iter().any(|it| it.verdict == Some(verdict)))
            .collect();
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        let heads = used.iter().map(ToString::to_string);
        table.set_header(["interruption".to_owned(), "tried".to_owned()].into_iter().chain(heads));
        for interruption in Interruption::ALL {
            let of = || self.tries.iter().filter(move |it| it.interruption == interruption && it.reached);
            if of().next().is_some() {
                let count = |verdict| of().filter(|it| it.verdict == Some(verdict)).count().to_string();
                let counts = used.iter().map(|&verdict| count(verdict));
                table.add_row([interruption.name().to_owned(), of().count().to_string()].into_iter().chain(counts));
            }
        }
        table
    }
}

/// For a person.
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
        for it in &self.undisturbed {
            let verdict = it.verdict.map(|verdict| verdict.to_string());
            let detail = [verdict.as_deref().unwrap_or(""), &it.detail];
            let detail: Vec<_> = detail.into_iter().filter(|part| !part.is_empty()).collect();
            writeln!(f, "  {:<16} {}", it.check.replace('_', " "), detail.join(": "))?;
        }
        for finding in &self.findings {
            let place = match (finding.message, finding.interruption) {
                (Some(message), Some(interruption)) => format!("{message}:{}", interruption.name()),
                _ => finding.check.unwrap_or_default().replace('_', " "),
            };
            writeln!(f, "\n{}, at {place}: {}\n", finding.verdict.to_string().to_uppercase(), finding.detail)?;
            let left_out = finding.story.len().saturating_sub(STORY);
            for (at, line) in finding.story.iter().enumerate() {
                match at {
                    // The end says what came of it.
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
