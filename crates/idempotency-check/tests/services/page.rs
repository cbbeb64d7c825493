//! docs/checked.md, from the reports of whole runs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::Value;

use crate::program::{Checked, text};

/// A row of the page: what the program cannot know of a service.
struct Row {
    name: &'static str,
    service: &'static str,
    store: &'static str,
}

const fn row(name: &'static str, service: &'static str, store: &'static str) -> Row {
    Row { name, service, store }
}

const OURS: [Row; 6] = [
    row("transactional", "`IdempotencyLayer::transactional`", "the same transaction"),
    row("select-first", "the same, with `RoundTrips::SelectFirst`", "the same transaction"),
    row("fewest", "the same, with `RoundTrips::Fewest`", "the same transaction"),
    row("in-steps", "`IdempotencyLayer::leased`, in steps", "the same database, under a lease"),
    row("at-least-once", "the same, at least once; the effect recognises its key", "the same database, under a lease"),
    row("at-most-once", "the same, at most once; the effect recognises nothing", "the same database, under a lease"),
];

const DEMOS: [Row; 2] = [
    row("payments", "`payments`: the transactional layer", "the same transaction"),
    row("rides", "`rides`: four steps, of which the last is a text at most once", "the same database, under a lease"),
];

const BY_HAND: [Row; 3] = [
    row("planted", "axum and sqlx, the server of the planted mistakes with none of them", "the same transaction"),
    row("fastapi", "FastAPI and psycopg 3", "the same transaction"),
    row("node", "Node's `http` and `pg`", "the same transaction"),
];

const PACKAGES: [Row; 5] = [
    row("asgi-idempotency-header", "asgi-idempotency-header 0.2.0 (PyPI), FastAPI", "Redis"),
    row("idemkit", "idemkit 1.0.2 (PyPI), FastAPI", "the same PostgreSQL, by connections of its own"),
    row("idemptx", "idemptx 0.2.2 (PyPI), FastAPI", "Redis"),
    row("express-idempotency", "express-idempotency 1.0.6 with its Redis adapter 1.0.8 (npm), Express", "Redis"),
    row("node-idempotency", "@node-idempotency/nestjs 1.0.4 (npm), NestJS", "Redis"),
];

const INTRODUCTION: &str = include_str!("page.md");

/// Whether every interruption of every service is tried.
pub(crate) fn is_whole() -> bool {
    std::env::var("CHECK").is_ok_and(|check| check == "whole")
}

fn reports() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("checked")
}

/// Keeps the report of a whole run for the page.
pub(crate) fn record(name: &str, checked: &Checked) -> anyhow::Result<()> {
    if is_whole() {
        std::fs::create_dir_all(reports())?;
        std::fs::write(reports().join(name).with_extension("json"), serde_json::to_vec_pretty(&checked.report)?)?;
    }
    Ok(())
}

/// Needs the reports of all services, so `script/check-services` runs it after the other tests.
#[test]
#[ignore = "writes docs/checked.md"]
fn the_page_is_written() -> anyhow::Result<()> {
    let mut page = INTRODUCTION.to_owned();
    for (marker, rows) in [("OURS", &OURS[..]), ("DEMOS", &DEMOS), ("BY HAND", &BY_HAND), ("PACKAGES", &PACKAGES)] {
        page = page.replace(&format!("<!-- {marker} -->\n"), &table(rows)?);
    }
    page = page.replace("<!-- STORIES -->\n", &stories()?);
    Ok(std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/checked.md"), page)?)
}

fn report(row: &Row) -> anyhow::Result<Value> {
    let file = reports().join(row.name).with_extension("json");
    let report = std::fs::read(&file).with_context(|| format!("{} was not checked: {}", row.name, file.display()))?;
    Ok(serde_json::from_slice(&report)?)
}

fn table(rows: &[Row]) -> anyhow::Result<String> {
    let mut table = "| service | store of the keys | messages | interruptions tried | findings |\n".to_owned();
    table += "|---|---|---:|---:|---|\n";
    for row in rows {
        let report = report(row)?;
        let (service, store, messages) = (row.service, row.store, list(&report["messages"]).len());
        let tries = list(&report["tries"]);
        let reached = tries.iter().filter(|tried| tried["reached"] == true).count();
        let tried = if reached == tries.len() { reached.to_string() } else { format!("{reached} of {}", tries.len()) };
        writeln!(table, "| {service} | {store} | {messages} | {tried} | {} |", findings(&report))?;
    }
    Ok(table)
}

/// Such as `3 × two effects (lost-after 2, killed 1); 1 × stuck (killed 1)`.
fn findings(report: &Value) -> String {
    let mut counted: BTreeMap<String, BTreeMap<String, usize>> = BTreeMap::new();
    for finding in list(&report["findings"]) {
        *counted.entry(spoken(&finding["verdict"])).or_default().entry(place(finding)).or_default() += 1;
    }
    let of_verdict = |(verdict, places): (&String, &BTreeMap<String, usize>)| {
        let each: Vec<_> = places.iter().map(|(place, count)| format!("{place} {count}")).collect();
        format!("{} × {verdict} ({})", places.values().sum::<usize>(), each.join(", "))
    };
    let all: Vec<_> = counted.iter().map(of_verdict).collect();
    if all.is_empty() { "0".to_owned() } else { all.join("; ") }
}

/// The first story of each verdict of each package.
fn stories() -> anyhow::Result<String> {
    let mut stories = String::new();
    for row in &PACKAGES {
        let report = report(row)?;
        writeln!(stories, "### {}\n", row.service)?;
        let mut told = Vec::new();
        for finding in list(&report["findings"]) {
            let verdict = spoken(&finding["verdict"]);
            if told.contains(&verdict) {
                continue;
            }
            let at = finding["message"].as_u64().map(|number| format!(" of message {number}")).unwrap_or_default();
            writeln!(stories, "**{verdict}**, by {}{at}: {}\n\n```text", place(finding), text(&finding["detail"]))?;
            // A client that retries is told the same many times.
            for same in list(&finding["story"]).chunk_by(PartialEq::eq) {
                let times = if same.len() > 1 { format!(" ({} times)", same.len()) } else { String::new() };
                writeln!(stories, "{}{times}", text(&same[0]))?;
            }
            stories += "```\n\n";
            told.push(verdict);
        }
        if told.is_empty() {
            stories += "Nothing was found.\n\n";
        }
    }
    Ok(stories)
}

/// The interruption of a finding, or its undisturbed check.
fn place(finding: &Value) -> String {
    if finding["message"].is_null() { spoken(&finding["check"]) } else { text(&finding["interruption"]) }
}

fn spoken(name: &Value) -> String {
    text(name).replace('_', " ")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
