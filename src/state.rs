//! The mode, the state and the version of a record.

use std::fmt;

use chrono::{DateTime, Utc};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

/// The mode of a record. The mode decides which promise the crate makes. A key belongs to one mode.
//
// The column has the type `text`. With an enum type, a new mode would need a migration that old processes must survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// The effect commits together with the record, as in [`ensure_idempotent`](crate::ensure_idempotent()).
    Transaction,
    /// The effect is outside the database, and the next caller takes a lapsed claim over.
    AtLeastOnce,
    /// The effect is outside the database, and a lapsed claim is indeterminate.
    AtMostOnce,
    /// The finished steps of the operation are stored. The next caller takes a lapsed claim over, unless a step is in
    /// doubt.
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

/// Prints the name of the mode, such as `at_least_once`. The column `mode`, the output of `idempotency-janitor` and
/// metrics use the same name.
impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The state of a record at one moment.
///
/// A record in lease mode whose attempts are used up is [`Lapsed`](Self::Lapsed) or [`Released`](Self::Released),
/// because the record does not contain the service's limit.
/// [`Shown::is_exhausted`](crate::operator::Shown::is_exhausted) compares the record with a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum State {
    /// The operation is complete, and a retry gets its response.
    Completed,
    /// The key is marked, so a retry is a duplicate.
    Mark,
    /// The owner of the claim works under a live lease.
    InFlight,
    /// The claim was given up, and the next caller may claim the key at once.
    Released,
    /// The lease has lapsed, and the policy lets the next caller do the work again.
    Lapsed,
    /// No live lease shows an owner, no result is stored, and the outcome of the operation or of one of its steps is
    /// unknown. An operator has to settle the operation. In lease mode, a [`Reconciler`](crate::lease::Reconciler) may
    /// also settle the operation.
    Indeterminate,
    /// The retention has ended. The key is new, even if no sweep has deleted the record yet.
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

/// Prints the name of the state, such as `in_flight`. The output of `idempotency-janitor` and metrics use the same
/// name.
impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The version of a record when it was read: its claim, the end of its lease, its steps, and whether it was completed.
/// Two versions of one key are equal if all four parts are unchanged.
///
/// The fencing token alone is not enough, because a machine that slept may wake and renew its lapsed lease **under the
/// same token**, or finish a step. After the error [`Indeterminate`](crate::Error::Indeterminate), a service may want
/// to settle the operation. The service then calls [`show`](crate::operator::show), and settles the operation only
/// if [`Shown::version`](crate::operator::Shown::version) equals the version in the error. An HTML form may contain
/// the text of a version, and send this text back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    pub(crate) token: i64,
    /// The end of the lease. For a released record, this is the first day of year 1.
    pub(crate) lease_until: Option<DateTime<Utc>>,
    /// A hash of the steps with their results.
    pub(crate) steps_hash: Option<i64>,
    pub(crate) completed: bool,
}

impl Version {
    /// Reads the columns `token`, `lease_until` (in the form of the macro `readable`) and `steps_hash`.
    pub(crate) fn of(row: &PgRow, completed: bool) -> sqlx::Result<Self> {
        Ok(Self {
            token: row.try_get("token")?,
            lease_until: row.try_get("lease_until")?,
            steps_hash: row.try_get("steps_hash")?,
            completed,
        })
    }

    /// Whether both versions have the same claim, end of the lease and completion. The steps may differ.
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
