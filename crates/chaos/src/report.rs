//! The table on standard output, and the histories on disk.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

use crate::checker::histories::{Told, module};
use crate::finding::Finding;

/// Enough to see the kind of the violation.
const SHOWN_VIOLATIONS: usize = 5;

pub(crate) fn summary(name: &str, finding: &Finding) {
    if let Some(why) = &finding.skipped {
        println!("  {name}: skipped: {why}");
    }
    for violation in finding.violations.iter().take(SHOWN_VIOLATIONS) {
        println!("  VIOLATION {violation}");
    }
    if finding.violations.len() > SHOWN_VIOLATIONS {
        println!("  … and {} more", finding.violations.len() - SHOWN_VIOLATIONS);
    }
    let _ = std::io::stdout().flush();
}

/// Writes the histories of the keys with a violation to a file, and prints its path.
pub(crate) fn keep_histories(name: &str, seed: u64, lines: &[String]) -> std::io::Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/chaos");
    std::fs::create_dir_all(&directory)?;
    let file = directory.join(format!("{name}-{seed}.txt"));
    println!("  the histories of their keys: {}", file.display());
    std::fs::write(file, lines.join("\n") + "\n")
}

/// Writes the histories for the specification to this file, and prints how many keys have none.
pub(crate) fn tell<'a>(
    file: Option<&Path>,
    all: impl Iterator<Item = (&'a str, &'a Told)> + Clone,
) -> std::io::Result<()> {
    let Some(file) = file else { return Ok(()) };
    let histories = all.clone().flat_map(|(of, told)| told.histories.iter().map(move |history| (of, history)));
    std::fs::write(file, module(histories.clone()))
        .map_err(|error| std::io::Error::new(error.kind(), format!("{} cannot be written: {error}", file.display())))?;
    println!("\n{} histories for the specification: {}", histories.count(), file.display());
    let mut left_out: BTreeMap<&str, usize> = BTreeMap::new();
    for (reason, count) in all.flat_map(|(_, told)| &told.left_out) {
        *left_out.entry(reason).or_default() += count;
    }
    for (reason, count) in left_out {
        println!("{count} keys are left out: {reason}");
    }
    Ok(())
}

/// The table of `docs/reliability.md`, and a line with the faults and the counts of each scenario.
pub(crate) fn table(rows: &[(&'static str, Finding)], seed: u64) {
    println!();
    println!(
        "{:<28} {:>10} {:>8} {:>10} {:>14}  seed",
        "scenario", "operations", "faults", "violations", "longest outage"
    );
    for (name, finding) in rows {
        if finding.skipped.is_some() {
            println!("{name:<28} {:>10} {:>8} {:>10} {:>14}  {seed}", "skipped", "-", "-", "-");
            continue;
        }
        println!(
            "{name:<28} {:>10} {:>8} {:>10} {:>14}  {seed}",
            finding.operations,
            finding.sum_of_faults(),
            finding.violations.len(),
            format!("{:.2} s", finding.longest_outage.as_secs_f64()),
        );
    }
    println!(
        "{:<28} {:>10} {:>8} {:>10}",
        "all",
        rows.iter().map(|(_, finding)| finding.operations).sum::<usize>(),
        rows.iter().map(|(_, finding)| finding.sum_of_faults()).sum::<u64>(),
        rows.iter().map(|(_, finding)| finding.violations.len()).sum::<usize>(),
    );
    println!(
        "\n{} histories of a key are checked as a register that is written once, and {} are left out",
        rows.iter().map(|(_, finding)| finding.registers).sum::<usize>(),
        rows.iter().map(|(_, finding)| finding.registers_left_out).sum::<usize>(),
    );
    println!();
    for (name, finding) in rows {
        let faults: Vec<String> = finding.faults.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let parts = faults.into_iter().chain(finding.notes.iter().cloned()).chain(finding.skipped.clone());
        println!("{name}: {}", parts.collect::<Vec<_>>().join("; "));
    }
}
