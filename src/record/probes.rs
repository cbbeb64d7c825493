//! The probes of a reconciler, in the column `probes`:
//!
//! ```json
//! {"token": 7, "lease_until": "2026-01-01T00:00:00", "of": [{"step": "text", "probes": 2, "no_trace": 1,
//! "finding": "no_trace", "error": null, "at": 1767225600.0, "next": 1767225900.0}]}
//! ```
//!
//! The probes count only while the record has this token, this end of the lease and these steps in doubt. For an
//! operation without steps, `of` has one element, which contains no step.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::ends::storable;

/// The column.
#[derive(Serialize, Deserialize)]
pub(super) struct Probes {
    pub(super) token: i64,
    /// The end of the lease, in the form of `stored_time`.
    pub(super) lease_until: String,
    pub(super) of: Vec<ShownProbes>,
}

/// The probes of an operation, or of one of its steps, as a [`Reconciler`](crate::lease::Reconciler) has stored them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ShownProbes {
    /// The step. `None` for an operation without steps.
    // The probes count only while the elements of `Probes::of` name exactly the steps in doubt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// How many probes were begun.
    // A probe is stored only if this number has not changed since the reconciler read the number.
    pub probes: u32,
    /// How many probes found no trace. After a probe that may have learned that the operation took effect, the count
    /// begins again at zero.
    pub no_trace: u32,
    /// The result of the last probe. `None` if that probe is under way, or if its process died. Once a probe has found
    /// the effect, the result stays [`TookEffect`](Probed::TookEffect).
    pub finding: Option<Probed>,
    /// Why the look-up has failed, or why its answer could not be stored.
    pub error: Option<String>,
    /// When the last probe was begun, or ended.
    #[serde(with = "seconds")]
    pub at: Option<DateTime<Utc>>,
    /// When the next probe is due. `None` once the operation, or the step, is left to a person.
    #[serde(with = "seconds")]
    pub next: Option<DateTime<Utc>>,
}

/// The result of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Probed {
    /// The operation took effect. The look-up's answer could not be stored, so a person has to settle the operation.
    TookEffect,
    /// The other service has no trace of the operation.
    NoTrace,
    /// The other service does not know yet whether the operation took effect, or the look-up panicked or took too long.
    /// Such a look-up may have seen the effect.
    Unknown,
    /// The look-up returned an error instead of an answer from the other service.
    Failed,
}

impl Probed {
    /// The name of the result, as in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TookEffect => "took_effect",
            Self::NoTrace => "no_trace",
            Self::Unknown => "unknown",
            Self::Failed => "failed",
        }
    }
}

impl ShownProbes {
    /// Reads the column, which the statement returns as null if the probes do not count any more.
    pub(super) fn read(row: &PgRow) -> sqlx::Result<Vec<Self>> {
        let Some(column) = row.try_get::<Option<&str>, _>("probes")? else { return Ok(Vec::new()) };
        let column: Probes = serde_json::from_str(column).map_err(|error| sqlx::Error::Decode(error.into()))?;
        Ok(column.of)
    }

    /// The probes after the beginning of the next probe.
    pub(crate) fn begun(&self) -> Self {
        let mut begun = Self { probes: self.probes.saturating_add(1), ..self.clone() };
        if begun.finding.is_none() {
            // The process of the last probe may have been told that the operation took effect.
            begun.no_trace = 0;
        }
        if begun.finding != Some(Probed::TookEffect) {
            (begun.finding, begun.error) = (None, None);
        }
        begun
    }

    /// The probes after the end of the probe that is under way. A later probe does not outvote a probe that found the
    /// effect.
    pub(crate) fn ended(self, finding: Probed, error: Option<String>) -> Self {
        if self.finding == Some(Probed::TookEffect) && finding != Probed::TookEffect {
            return self;
        }
        let no_trace = match finding {
            Probed::NoTrace => self.no_trace.saturating_add(1),
            Probed::Failed => self.no_trace,
            Probed::TookEffect | Probed::Unknown => 0,
        };
        Self { no_trace, finding: Some(finding), error: error.map(|error| storable(&error)), ..self }
    }
}

/// Times as seconds, which a jsonpath compares.
mod seconds {
    use chrono::{DateTime, Utc};
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Option<DateTime<Utc>>, to: S) -> Result<S::Ok, S::Error> {
        time.map(|time| time.timestamp_micros() as f64 / 1e6).serialize(to)
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Option<DateTime<Utc>>, D::Error> {
        // A person may have written a number that is too large or too small to be a valid time. If such a number is due
        // for the jsonpath, the time that this function returns must be due, too.
        let time = |seconds: f64| {
            let end = if seconds < 0.0 { DateTime::<Utc>::MIN_UTC } else { DateTime::<Utc>::MAX_UTC };
            DateTime::from_timestamp_millis((seconds * 1e3) as i64).unwrap_or(end)
        };
        Ok(Option::<f64>::deserialize(from)?.map(time))
    }
}

pub(super) fn as_json(column: &impl Serialize) -> String {
    serde_json::to_string(column).expect("numbers, texts and lists have a JSON form")
}
