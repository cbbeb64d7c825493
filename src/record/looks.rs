//! The looks of a reconciler at operations in doubt, in the column `looks`:
//!
//! ```json
//! {"token": 7, "lease_until": "2026-01-01T00:00:00", "in_doubt": ["text"], "since": 1767225600.0,
//! "of": {"text": {"n": 2, "looks": 2, "no_trace": 1, "at": {"1": "…", "2": "…"}, "next": 1767225900.0, "finding":
//! "no_trace"}}}
//! ```
//!
//! They count under this token, this end of the lease and these steps in doubt alone. `since` and `next` are seconds,
//! so that a jsonpath compares them. A look at an operation without steps has the name `""`.

use std::collections::{BTreeMap, BTreeSet};

use chrono::{DateTime, Utc};
use serde_json::{Map, Value, json};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

/// The looks at an operation, under one fence, by the name of the step.
#[derive(Clone, Debug)]
pub(crate) struct Looks {
    /// When the lease lapsed; for a released one, the first visit.
    pub(crate) since: f64,
    pub(crate) of: BTreeMap<String, LooksAt>,
}

/// The looks at an operation without steps, or at one step.
#[derive(Clone, Debug, Default)]
pub(crate) struct LooksAt {
    /// The number of the last look among all that were ever reserved, also in a dry run.
    pub(crate) n: u32,
    /// The looks that count towards the limit.
    pub(crate) looks: u32,
    /// The looks that found no trace, since one that may have been told that it took effect.
    pub(crate) no_trace: u32,
    /// When the next look is due, in seconds. `None` once it is left to a person.
    pub(crate) next: Option<f64>,
    /// What the last look said. `None` while it is under way, or if its process died and may have been told that it
    /// took effect.
    pub(crate) finding: Option<String>,
    pub(crate) error: Option<String>,
    /// A look has said that it took effect, and this could not be stored.
    pub(crate) took_effect: bool,
    pub(crate) given_up: bool,
    /// The time of each look, by its number.
    pub(crate) at: Map<String, Value>,
}

impl LooksAt {
    /// All but the times, which the server adds.
    pub(super) fn as_json(&self) -> Value {
        let Self { n, looks, no_trace, finding, error, took_effect, given_up, .. } = self;
        json!({
            "n": n, "looks": looks, "no_trace": no_trace, "finding": finding, "error": error,
            "took_effect": took_effect, "given_up": given_up
        })
    }

    fn of_json(look: &Value) -> Self {
        let count =
            |member: &str| look[member].as_u64().and_then(|count| u32::try_from(count).ok()).unwrap_or_default();
        let text = |member: &str| look[member].as_str().map(str::to_owned);
        let is = |member: &str| look[member].as_bool().unwrap_or_default();
        Self {
            n: count("n"),
            looks: count("looks"),
            no_trace: count("no_trace"),
            next: look["next"].as_f64(),
            finding: text("finding"),
            error: text("error"),
            took_effect: is("took_effect"),
            given_up: is("given_up"),
            at: look["at"].as_object().cloned().unwrap_or_default(),
        }
    }
}

impl Looks {
    pub(super) fn of_column(text: Option<&str>) -> Option<Self> {
        let text = text?;
        // Looks that do not parse were written by hand, and are as good as none.
        let looks: Value = serde_json::from_str(text).unwrap_or_default();
        let of = looks["of"].as_object().into_iter().flatten();
        Some(Self {
            since: looks["since"].as_f64().unwrap_or_default(),
            of: of.map(|(name, look)| (name.clone(), LooksAt::of_json(look))).collect(),
        })
    }
}

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
