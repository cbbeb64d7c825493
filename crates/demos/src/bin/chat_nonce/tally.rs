//! What was counted in a step, against what should have been.

use std::collections::BTreeSet;

use crate::client::{Answer, Client, Transport};

#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) requests: i64,
    /// By this request: 201.
    pub(crate) created: i64,
    /// By an earlier one: 200.
    pub(crate) returned: i64,
    /// As 4xx.
    pub(crate) refused: i64,
    pub(crate) errors: i64,
    /// Different messages among all that were created or returned: by id, content and all else.
    pub(crate) messages: i64,
    /// Rows in the table, of the step's authors.
    pub(crate) stored: i64,
    /// Records of the crate, of the step's authors.
    pub(crate) records: i64,
}

pub(crate) struct Tally {
    step: &'static str,
    counted: Counts,
    expected: Counts,
    /// Each step has authors of its own, so that one's messages and nonces do not count in another.
    authors: BTreeSet<String>,
    messages: BTreeSet<String>,
    first_error: Option<String>,
}

impl Tally {
    /// Says on stdout that the step begins.
    pub(crate) fn begin(step: &'static str, expected: Counts) -> Self {
        println!("{step} …");
        let (authors, messages) = (BTreeSet::new(), BTreeSet::new());
        Self { step, counted: Counts::default(), expected, authors, messages, first_error: None }
    }

    /// Sends a message over a new line, as a client does that has lost the one before.
    pub(crate) async fn ask(
        &mut self,
        client: &Client,
        transport: Transport,
        author: &str,
        message: &str,
    ) -> anyhow::Result<Answer> {
        let mut line = client.open(transport, author).await?;
        let answer = line.ask(message).await?;
        line.close().await?;
        self.count(author, &answer);
        Ok(answer)
    }

    pub(crate) fn count(&mut self, author: &str, answer: &Answer) {
        self.authors.insert(author.to_owned());
        self.counted.requests += 1;
        match answer.status {
            201 => self.counted.created += 1,
            200 => self.counted.returned += 1,
            400..500 => self.counted.refused += 1,
            _ => self.counted.errors += 1,
        }
        if matches!(answer.status, 200 | 201) {
            self.messages.insert(answer.body.to_string());
        } else if self.expected.refused == 0 {
            self.first_error.get_or_insert_with(|| answer.body.to_string());
        }
    }

    pub(crate) async fn end(mut self, client: &Client) -> sqlx::Result<Self> {
        self.counted.messages = self.messages.len() as i64;
        (self.counted.stored, self.counted.records) = client.stored(&self.authors.iter().collect::<Vec<_>>()).await?;
        Ok(self)
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
}

impl Counts {
    fn columns(&self) -> [(&'static str, i64); 8] {
        [
            ("requests", self.requests),
            ("created", self.created),
            ("returned", self.returned),
            ("refused", self.refused),
            ("errors", self.errors),
            ("messages", self.messages),
            ("stored", self.stored),
            ("records", self.records),
        ]
    }
}

pub(crate) fn print_table(tallies: &[Tally]) {
    let row = |step: &str, columns: Vec<String>| {
        let columns: String = columns.iter().map(|column| format!("{column:>10}")).collect();
        println!("{step:<48}{columns}");
    };
    println!();
    row("step", Counts::default().columns().map(|(name, _)| name.to_owned()).to_vec());
    for tally in tallies {
        row(tally.step, tally.counted.columns().map(|(_, count)| count.to_string()).to_vec());
    }
}
