//! Mistakes that a run can be asked to make. The audit must find each of them.

use anyhow::Context as _;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// The ride is inserted by plain SQL.
    RideWithoutStep,
    /// Each attempt charges under a key of its own.
    ChargeWithNewKey,
    /// Nothing is stored before the text is sent.
    TextNotBegun,
    /// The operator releases what is in doubt without asking the gateway.
    OperatorGuesses,
    /// Nobody finishes the rides of clients that do not come back.
    NoResumer,
}

const ALL: [(&str, Mutant); 5] = [
    ("ride-without-step", Mutant::RideWithoutStep),
    ("charge-with-new-key", Mutant::ChargeWithNewKey),
    ("text-not-begun", Mutant::TextNotBegun),
    ("operator-guesses", Mutant::OperatorGuesses),
    ("no-resumer", Mutant::NoResumer),
];

impl Mutant {
    pub(crate) fn named(name: &str) -> anyhow::Result<Self> {
        let named = ALL.into_iter().find(|(known, _)| *known == name).map(|(_, mutant)| mutant);
        named.with_context(|| format!("{name:?} is none of {:?}", ALL.map(|(known, _)| known)))
    }

    pub(crate) fn name(self) -> &'static str {
        ALL.into_iter().find(|(_, mutant)| *mutant == self).map_or("", |(name, _)| name)
    }
}
