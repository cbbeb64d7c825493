//! The mode of a record.

use std::fmt;

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
