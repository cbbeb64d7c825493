//! The mode, the state and the version of a record.

use std::fmt;

use chrono::{DateTime, Utc};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

/// The mode of a record. The mode decides what the crate promises. A key belongs to one mode.
//
// The column is `text`: a new mode in an enum type would need a migration that old processes must survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// The effect commits with the record: [`ensure_idempotent`](crate::ensure_idempotent()).
    Transaction,
    /// An effect outside the database; a lapsed claim is taken over.
    AtLeastOnce,
    /// An effect outside the database; a lapsed claim is indeterminate.
    AtMostOnce,
    /// An operation whose finished steps are stored; a lapsed claim is taken over, unless a step is in doubt.
    InSteps,
    /// The record stores only the fact that the key was seen.
    Mark,
}

impl Mode {
    /// Reads the column `mode`. A newer release may write other values.
    pub(crate) fn from_column(text: &str) -> Result<Self, UnknownMode> {
        [Self::Transaction, Self::AtLeastOnce, Self::AtMostOnce, Self::InSteps, Self::Mark]
            .into_iter()
            .find(|mode| mode.as_str() == text)
            .ok_or_else(|| UnknownMode(text.to_owned()))
    }

    /// Whether the next caller takes a lapsed claim over.
    pub(crate) fn repeats(self) -> bool {
        matches!(self, Self::AtLeastOnce | Self::InSteps)
    }

    /// Whether a claim outlives its transaction.
    pub(crate) fn is_leased(self) -> bool {
        self.repeats() || self == Self::AtMostOnce
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Transaction => "transaction",
            Self::AtLeastOnce => "at_least_once",
            Self::AtMostOnce => "at_most_once",
            Self::InSteps => "in_steps",
            Self::Mark => "mark",
        }
    }
}

/// A text in the column `mode` that this release does not know.
#[derive(Clone, Debug)]
pub(crate) struct UnknownMode(pub(crate) String);

/// The name, as in the column `mode`, the output of `idempotency-janitor` and metrics: `at_least_once`.
impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The state of a record at one moment.
///
/// A record in lease mode whose attempts are used up is [`Lapsed`](Self::Lapsed) or [`Released`](Self::Released),
/// because the record does not know the service's limit: see
/// [`Shown::is_exhausted`](crate::operator::Shown::is_exhausted).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum State {
    /// The operation is complete: a retry gets its response.
    Completed,
    /// The key is marked: a retry is a duplicate.
    Mark,
    /// Its owner works under a live lease.
    InFlight,
    /// Its claim was given up: the next caller may claim it at once.
    Released,
    /// Its lease has lapsed, and its policy lets the next caller do the work again.
    Lapsed,
    /// Its owner is gone, and it is unknown whether it, or a step of it, took effect. An operator has to settle it, or,
    /// in lease mode, a [`Reconciler`](crate::lease::Reconciler).
    Indeterminate,
    /// Its retention has ended: the key is new, whether or not a sweep has deleted the record.
    Expired,
}

impl State {
    pub(crate) const ALL: &'static [Self] = &[
        Self::Completed,
        Self::Mark,
        Self::InFlight,
        Self::Released,
        Self::Lapsed,
        Self::Indeterminate,
        Self::Expired,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Mark => "mark",
            Self::InFlight => "in_flight",
            Self::Released => "released",
            Self::Lapsed => "lapsed",
            Self::Indeterminate => "indeterminate",
            Self::Expired => "expired",
        }
    }

    pub(crate) fn from_column(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|state| state.as_str() == text)
    }
}

/// The name, as in the output of `idempotency-janitor` and in metrics: `in_flight`.
impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The version of a record when it was read: its claim, the end of its lease, its steps, and whether it was completed.
/// Two versions of one key are equal if none of these has changed.
///
/// The fencing token alone is not enough: a machine that slept may wake and renew its lapsed lease **under the same
/// token**, or finish a step. So a service that settles an operation by its [error](crate::Error::Indeterminate) calls
/// [`show`](crate::operator::show), and goes on only if [`Shown::version`](crate::operator::Shown::version) is that of
/// the error. The text of a version is for a form, which sends it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    pub(crate) token: i64,
    /// The first day of year 1 for a released record.
    pub(crate) lease_until: Option<DateTime<Utc>>,
    /// A hash of the steps with their results.
    pub(crate) steps_hash: Option<i64>,
    pub(crate) completed: bool,
}

impl Version {
    /// Reads the columns `token`, `lease_until` as `readable`, and `steps_hash`.
    pub(crate) fn of(row: &PgRow, completed: bool) -> sqlx::Result<Self> {
        Ok(Self {
            token: row.try_get("token")?,
            lease_until: row.try_get("lease_until")?,
            steps_hash: row.try_get("steps_hash")?,
            completed,
        })
    }

    /// Whether the claim and the end of its lease are the same. The steps may differ.
    pub(crate) fn has_claim_of(&self, other: &Self) -> bool {
        (self.token, self.lease_until, self.completed) == (other.token, other.lease_until, other.completed)
    }

    #[cfg(test)]
    pub(crate) fn sample() -> Self {
        Self { token: 0, lease_until: None, steps_hash: None, completed: false }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |number: Option<i64>| number.map(|number| number.to_string()).unwrap_or_default();
        let lease_until = text(self.lease_until.map(|until| until.timestamp_micros()));
        write!(f, "{} {lease_until} {} {}", self.token, text(self.steps_hash), self.completed)
    }
}
