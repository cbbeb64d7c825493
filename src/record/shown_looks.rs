//! The looks of a reconciler as an operator sees them.

use std::collections::BTreeSet;

use chrono::{DateTime, Utc};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::looks::Looks;

/// The looks at an operation, or at one of its steps, as a reconciler has stored them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShownLooks {
    /// The step. `None` for an operation without steps.
    pub step: Option<String>,
    /// How many looks were made.
    pub looks: u32,
    /// How many of them found no trace, since the last one that may have been told that it took effect.
    pub no_trace: u32,
    /// When they were made, the earliest first.
    pub at: Vec<DateTime<Utc>>,
    /// What the last look said: `took_effect`, `no_trace`, `unknown` or `failed`. `None` if its answer was not stored.
    pub finding: Option<String>,
    /// Why the last look failed.
    pub error: Option<String>,
    /// When the next look is due.
    pub next: Option<DateTime<Utc>>,
    /// Whether it is left to a person.
    pub given_up: bool,
}

impl ShownLooks {
    /// Reads the column `looks`, which is null if the looks do not count any more.
    pub(super) fn all(row: &PgRow) -> sqlx::Result<Vec<Self>> {
        let looks = Looks::of_column(row.try_get("looks")?);
        let of = looks.map(|looks| looks.of).unwrap_or_default();
        Ok(of
            .into_iter()
            .map(|(step, look)| Self {
                step: (!step.is_empty()).then_some(step),
                looks: look.looks,
                no_trace: look.no_trace,
                at: look
                    .at
                    .iter()
                    .filter_map(|(number, at)| number.parse::<u32>().ok().and(at.as_str()?.parse().ok()))
                    .collect::<BTreeSet<_>>()
                    .into_iter()
                    .collect(),
                finding: look.finding,
                error: look.error,
                next: look.next.and_then(|next| DateTime::from_timestamp_millis((next * 1000.0) as i64)),
                given_up: look.given_up,
            })
            .collect())
    }
}
