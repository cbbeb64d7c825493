//! What was counted in a step, against what should have been.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use reqwest::StatusCode;

use crate::client::{Answer, Intent};

/// A step's requests, sorted by what came back, and the payments that stand in the table after it.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) requests: usize,
    pub(crate) performed: usize,
    /// With the same bytes as every other answer under its key.
    pub(crate) replayed: usize,
    pub(crate) refused: BTreeMap<u16, usize>,
    /// Cut off on purpose, by the client or by SIGKILL.
    pub(crate) unanswered: usize,
    pub(crate) errors: usize,
    pub(crate) payments: i64,
}

pub(crate) struct Tally {
    pub(crate) step: &'static str,
    pub(crate) counted: Counts,
    pub(crate) expected: Counts,
    /// The first answer to each intent, which every later one must equal.
    pub(crate) answers: HashMap<Intent, Vec<u8>>,
    latencies: Vec<Duration>,
    first_error: Option<String>,
}

impl Tally {
    /// Says on stdout that the step begins.
    pub(crate) fn begin(step: &'static str, expected: Counts) -> Self {
        println!("{step} …");
        Self {
            step,
            counted: Counts::default(),
            expected,
            answers: HashMap::new(),
            latencies: Vec::new(),
            first_error: None,
        }
    }

    pub(crate) fn count(&mut self, intent: &Intent, answer: reqwest::Result<Answer>) {
        self.counted.requests += 1;
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return self.count_error(format!("{:#}", anyhow::Error::new(error))),
        };
        self.latencies.push(answer.latency);
        match answer.status {
            StatusCode::CREATED => {
                let first = self.answers.entry(intent.clone()).or_insert_with(|| answer.body.clone());
                match (*first == answer.body, answer.replayed) {
                    (true, false) => self.counted.performed += 1,
                    (true, true) => self.counted.replayed += 1,
                    (false, _) => self.count_error("two answers to one intent differ".to_owned()),
                }
            }
            status if status.is_client_error() => *self.counted.refused.entry(status.as_u16()).or_default() += 1,
            status => self.count_error(format!("{status}: {}", String::from_utf8_lossy(&answer.body))),
        }
    }

    pub(crate) fn count_error(&mut self, error: String) {
        self.counted.errors += 1;
        self.first_error.get_or_insert(error);
    }

    pub(crate) fn count_unanswered(&mut self) {
        self.counted.requests += 1;
        self.counted.unanswered += 1;
    }

    /// The counts that are not what they should be.
    pub(crate) fn wrong(&self) -> Option<String> {
        let columns = self.counted.columns().into_iter().zip(self.expected.columns());
        let mut wrong: Vec<String> = columns
            .filter(|(counted, expected)| counted != expected)
            .map(|((name, counted), (_, expected))| format!("{counted} {name}, expected {expected}"))
            .collect();
        if wrong.is_empty() {
            return None;
        }
        wrong.extend(self.first_error.clone());
        Some(format!("{}: {}", self.step, wrong.join("; ")))
    }

    /// The latency that this share of the answers did not exceed.
    fn percentile(&self, share: f64) -> String {
        let mut latencies = self.latencies.clone();
        latencies.sort_unstable();
        // Nearest rank: of one sample, that one.
        let rank = (latencies.len() as f64 * share).ceil() as usize;
        match latencies.get(rank.saturating_sub(1)) {
            Some(latency) => format!("{:.1} ms", latency.as_secs_f64() * 1000.0),
            None => "-".to_owned(),
        }
    }
}

impl Counts {
    fn columns(&self) -> [(&'static str, String); 7] {
        let refused: Vec<String> = self.refused.iter().map(|(status, count)| format!("{count} × {status}")).collect();
        [
            ("requests", self.requests.to_string()),
            ("performed", self.performed.to_string()),
            ("replayed", self.replayed.to_string()),
            ("refused", if refused.is_empty() { "0".to_owned() } else { refused.join(", ") }),
            ("unanswered", self.unanswered.to_string()),
            ("errors", self.errors.to_string()),
            ("payments", self.payments.to_string()),
        ]
    }
}

pub(crate) fn print_table(steps: &[Tally]) {
    let row = |step: &str, columns: Vec<String>, p50: &str, p99: &str| {
        let columns: String = columns.iter().map(|column| format!("{column:>11}")).collect();
        println!("{step:<40}{columns}{p50:>11}{p99:>11}");
    };
    println!();
    let names = Counts::default().columns().into_iter().map(|(name, _)| name.to_owned()).collect();
    row("step", names, "p50", "p99");
    for step in steps {
        let counted = step.counted.columns().into_iter().map(|(_, count)| count).collect();
        row(step.step, counted, &step.percentile(0.5), &step.percentile(0.99));
    }
}
