//! docs/checked.md, from the reports of whole runs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::installed::directory;
use crate::packages::{IDEMKIT, IN_REDIS};
use crate::program::{Checked, text};
use crate::{ours, planted};

/// A row of the page: what the program cannot know of a service.
#[derive(Clone, Copy)]
struct Row {
    name: &'static str,
    service: &'static str,
    store: &'static str,
}

const fn row(name: &'static str, service: &'static str, store: &'static str) -> Row {
    Row { name, service, store }
}

const OURS: [Row; 2] = [
    row("payments", "`payments`: the transactional layer", "the same transaction"),
    row("rides", "`rides`: four steps, the last by `step_at_most_once`", "the same database, under a lease"),
];

const FUNCTIONS: [Row; 3] = [
    row("fastapi", "FastAPI and psycopg 3", "the same transaction"),
    row("node", "Node's `http` and `pg`", "the same transaction"),
    row("plpgsql", "PL/pgSQL alone, one statement a request", "the same transaction"),
];

const BY_HAND: [Row; 1] =
    [row("planted", "axum and sqlx: the server for planted mistakes, all turned off", "the same transaction")];

const PACKAGES: [Row; 5] = [
    row("asgi-idempotency-header", "asgi-idempotency-header {asgi-idempotency-header} (PyPI), FastAPI", "Redis"),
    row("idemkit", "idemkit {idemkit} (PyPI), FastAPI", "the same PostgreSQL, by connections of its own"),
    row("idemptx", "idemptx {idemptx} (PyPI), FastAPI", "Redis"),
    row(
        "express-idempotency",
        "express-idempotency {express-idempotency}, its adapter {express-idempotency-redis-adapter} (npm), Express",
        "Redis",
    ),
    row("node-idempotency", "@node-idempotency/nestjs {@node-idempotency/nestjs} (npm), NestJS", "Redis"),
];

/// The tables and stories have a marker each.
const PROSE: &str = include_str!("page.template");

/// The prose, in which a fact about the tests replaces each `{name}`.
fn prose() -> String {
    let spaced = |duration: &str| duration.replace('s', " s");
    [
        ("{patience_in_doubt}", spaced(ours::PATIENCE)),
        ("{mistakes}", planted::FOUND.len().to_string()),
        ("{patience_with_idemkit}", spaced(IDEMKIT.patience)),
        ("{claim_of_idemkit}", spaced(IDEMKIT.claim)),
        ("{again_with_idemkit}", IDEMKIT.again.unwrap_or("nothing more").to_owned()),
        ("{patience_with_redis}", spaced(IN_REDIS.patience)),
        ("{claim_in_redis}", IN_REDIS.claim.to_owned()),
    ]
    .into_iter()
    .fold(PROSE.to_owned(), |prose, (name, value)| prose.replace(name, &value))
}

/// The versions of all packages, as the lock files have them.
fn versions() -> anyhow::Result<Vec<(String, String)>> {
    let python = std::fs::read_to_string(directory("python").join("requirements.txt"))?;
    let of_python = python.lines().filter_map(|line| line.split_once("=="));
    let node: Value = serde_json::from_slice(&std::fs::read(directory("node").join("package-lock.json"))?)?;
    let of_node = node["packages"].as_object().into_iter().flatten();
    let of_node = of_node.filter_map(|(path, it)| Some((path.strip_prefix("node_modules/")?, it["version"].as_str()?)));
    Ok(of_python.chain(of_node).map(|(name, version)| (name.to_owned(), version.to_owned())).collect())
}

/// The name of a service, in which the version replaces each `{package}`.
fn service(row: &Row) -> anyhow::Result<String> {
    let versions = versions()?.into_iter();
    let named =
        versions.fold(row.service.to_owned(), |text, (name, version)| text.replace(&format!("{{{name}}}"), &version));
    ensure!(!named.contains('{'), "no lock file has the version in {named}");
    Ok(named)
}

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
    let mut page = prose();
    for (marker, rows) in
        [("OURS", &OURS[..]), ("FUNCTIONS", &FUNCTIONS), ("BY HAND", &BY_HAND), ("PACKAGES", &PACKAGES)]
    {
        page = page.replace(&format!("<!-- {marker} -->\n"), &table(rows)?);
    }
    page = page.replace("<!-- STORIES -->\n", &stories()?);
    Ok(std::fs::write(written(), page)?)
}

fn written() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/checked.md")
}

/// A new version or another patience needs a new run.
#[test]
fn the_page_describes_the_tests_of_today() -> anyhow::Result<()> {
    let page = std::fs::read_to_string(written())?;
    let prose = prose();
    ensure!(!prose.contains('{'), "a name of the prose has no value");
    let mut rest = &*page;
    for part in prose.split("<!-- ").map(|part| part.split_once("-->\n").map_or(part, |(_, part)| part)) {
        let (_, after) =
            rest.split_once(part).with_context(|| format!("docs/checked.md lacks, or has elsewhere: {part}"))?;
        rest = after;
    }
    for row in [&OURS[..], &FUNCTIONS, &BY_HAND, &PACKAGES].concat() {
        let named = format!("| {} | {} |", service(&row)?, row.store);
        ensure!(page.contains(&named), "docs/checked.md has no row {named}");
    }
    Ok(())
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
        let (service, store, messages) = (service(row)?, row.store, list(&report["messages"]).len());
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
        writeln!(stories, "### {}\n", service(row)?)?;
        let untried = list(&report["undisturbed"]).iter().filter(|it| text(&it["detail"]).starts_with("not tried"));
        let untried: Vec<_> = untried.map(|it| format!("`{}`", text(&it["check"]))).collect();
        if !untried.is_empty() {
            writeln!(stories, "These checks were not tried: {}.\n", untried.join(", "))?;
        }
        let mut told = Vec::new();
        for finding in list(&report["findings"]) {
            let verdict = spoken(&finding["verdict"]);
            if told.contains(&verdict) {
                continue;
            }
            let at = finding["message"].as_u64().map(|number| format!(", message {number}")).unwrap_or_default();
            writeln!(stories, "**{verdict}** ({}{at}): {}\n\n```text", place(finding), text(&finding["detail"]))?;
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
