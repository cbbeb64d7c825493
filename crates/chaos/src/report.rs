//! How far it is, and the table at the end.

use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, interval};

use crate::stage::{Finding, Stage};

/// Enough to see what kind it is; the first are as good as the last.
const SHOWN_VIOLATIONS: usize = 5;

/// Tells every second what was asked and broken so far, until it is dropped.
pub(crate) async fn progress(name: &str, stage: &Stage) {
    let started = Instant::now();
    let mut seconds = interval(Duration::from_secs(if std::io::stdout().is_terminal() { 1 } else { 5 }));
    seconds.tick().await;
    loop {
        seconds.tick().await;
        if let Some(world) = stage.shown() {
            let faults: u64 = world.faults().iter().map(|(_, count)| count).sum();
            let (at, calls) = (started.elapsed().as_secs(), world.history.len() / 2);
            println!("  {name}: {at} s, {calls} calls, {faults} faults");
        }
    }
}

pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) finding: Finding,
}

pub(crate) fn told(name: &str, finding: &Finding) {
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

pub(crate) fn table(rows: &[Row], seed: u64) {
    let faults_of = |finding: &Finding| finding.faults.iter().map(|(_, count)| count).sum::<u64>();
    println!();
    println!(
        "{:<28} {:>10} {:>8} {:>10} {:>14}  seed",
        "scenario", "operations", "faults", "violations", "longest outage"
    );
    for Row { name, finding } in rows {
        if finding.skipped.is_some() {
            println!("{name:<28} {:>10} {:>8} {:>10} {:>14}  {seed}", "skipped", "-", "-", "-");
            continue;
        }
        println!(
            "{name:<28} {:>10} {:>8} {:>10} {:>14}  {seed}",
            finding.operations,
            faults_of(finding),
            finding.violations.len(),
            format!("{:.2} s", finding.longest_outage.as_secs_f64()),
        );
    }
    println!(
        "{:<28} {:>10} {:>8} {:>10}",
        "all",
        rows.iter().map(|row| row.finding.operations).sum::<usize>(),
        rows.iter().map(|row| faults_of(&row.finding)).sum::<u64>(),
        rows.iter().map(|row| row.finding.violations.len()).sum::<usize>(),
    );
    println!();
    for Row { name, finding } in rows {
        let faults: Vec<String> = finding.faults.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let told = faults.into_iter().chain(finding.notes.iter().cloned()).chain(finding.skipped.clone());
        println!("{name}: {}", told.collect::<Vec<_>>().join("; "));
    }
}
