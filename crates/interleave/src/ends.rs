//! How the scenarios end: `ends.txt` beside this crate. A schedule that ends in another way, and an end that no schedule
//! reaches any more, are both worth a look.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/ends.txt");
const HEAD: &str = "\
# Written by script/interleave --record: for each scenario, every way in which it ends. What each actor was told, the
# effects that are there (by actor, and by step or event), the state of the record, and the answer to a further call.
";

#[derive(Debug, Default)]
pub(crate) struct Ends(BTreeMap<String, BTreeSet<String>>);

impl Ends {
    pub(crate) fn read() -> anyhow::Result<Self> {
        let mut ends = Self::default();
        let mut scenario = String::new();
        let text = std::fs::read_to_string(PATH).unwrap_or_default();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            match line.strip_prefix("    ") {
                Some(end) => drop(ends.0.entry(scenario.clone()).or_default().insert(end.to_owned())),
                None => scenario = line.to_owned(),
            }
        }
        Ok(ends)
    }

    /// The ends that are new, and those that were not reached.
    pub(crate) fn others(&self, scenario: &str, ends: &BTreeSet<String>) -> Vec<String> {
        let nothing = BTreeSet::new();
        let recorded = self.0.get(scenario).unwrap_or(&nothing);
        let new = ends.difference(recorded).map(|end| format!("a new end: {end}"));
        let missing = recorded.difference(ends).map(|end| format!("no schedule ends so: {end}"));
        new.chain(missing).collect()
    }

    /// Whether one of these ends is not recorded.
    pub(crate) fn is_new(&self, scenario: &str, ends: &BTreeSet<String>) -> bool {
        self.0.get(scenario).is_none_or(|recorded| !ends.is_subset(recorded))
    }

    pub(crate) fn record(&mut self, scenario: String, ends: BTreeSet<String>) {
        self.0.insert(scenario, ends);
    }

    pub(crate) fn write(&self) -> anyhow::Result<()> {
        let mut text = HEAD.to_owned();
        for (scenario, ends) in &self.0 {
            writeln!(text, "\n{scenario}")?;
            ends.iter().try_for_each(|end| writeln!(text, "    {end}"))?;
        }
        Ok(std::fs::write(PATH, text)?)
    }
}
