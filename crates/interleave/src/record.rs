//! What is recorded beside this crate: a text for each name. `ends.txt` has the scenarios and how they end, and
//! `mutants.txt` the statements and what became of their edits.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// The lines under each name.
pub(crate) type Record = BTreeMap<String, BTreeSet<String>>;

fn path(file: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), file].iter().collect()
}

pub(crate) fn read(file: &str) -> anyhow::Result<Record> {
    let text = std::fs::read_to_string(path(file))?;
    let mut record = Record::new();
    let mut lines = BTreeSet::new();
    // Backwards, so that each name comes after its lines.
    for line in text.lines().rev().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        match line.strip_prefix("    ") {
            Some(line) => drop(lines.insert(line.to_owned())),
            None => drop(record.insert(line.to_owned(), std::mem::take(&mut lines))),
        }
    }
    Ok(record)
}

/// Keeps the comment at the top of the file.
pub(crate) fn write(file: &str, record: &Record) -> anyhow::Result<()> {
    let before = std::fs::read_to_string(path(file))?;
    let head = before.lines().take_while(|line| line.starts_with('#')).map(str::to_owned);
    let texts = record.iter().flat_map(|(name, lines)| {
        let lines = lines.iter().map(|line| format!("    {line}"));
        [String::new(), name.clone()].into_iter().chain(lines)
    });
    let lines: Vec<String> = head.chain(texts).collect();
    Ok(std::fs::write(path(file), lines.join("\n") + "\n")?)
}
