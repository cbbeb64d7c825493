//! `llms.txt` describes the crate to language models. Its list of items and of pages is generated from the source:
//! `UPDATE=1 cargo test --test llms` writes it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const DOCS: &str = "https://docs.rs/pg-idempotency/latest/pg_idempotency";
/// The public modules. Every other item is exported by the root.
const MODULES: [&str; 5] = ["http", "lease", "mark", "operator", "testing"];

fn source(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect("a text")
}

fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let (folders, sources): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let inside = folders.iter().flat_map(|folder| files(folder));
    sources.into_iter().filter(|path| path.extension().is_some_and(|found| found == "rs")).chain(inside).collect()
}

/// The names that a module exports.
fn exported(root: &str) -> BTreeSet<String> {
    let uses = root.split("\npub use ").skip(1).filter_map(|rest| rest.split_once(';')).map(|(names, _)| names);
    let names = uses.flat_map(|names| names.rsplit("::").next().unwrap_or(names).split(','));
    names.map(|name| name.trim_matches(['{', '}', ' ', '\n']).to_owned()).filter(|name| !name.is_empty()).collect()
}

/// A declaration without its body, on one line.
fn declaration(lines: &[&str]) -> String {
    let mut text = String::new();
    for line in lines {
        text = format!("{text} {}", line.trim());
        if line.ends_with(['{', ';']) || line.ends_with('}') {
            break;
        }
    }
    let text = text
        .trim()
        .trim_end_matches(['{', ';', ' '])
        .replace("( ", "(")
        .replace(", )", ")")
        .replace("mut self", "self");
    let text = text.strip_prefix("pub ").unwrap_or(&text);
    // The value of a constant and private fields are no part of the interface.
    let is_struct = text.starts_with("struct") && !text.contains("(pub ");
    text.split(if is_struct { "(" } else { " = " }).next().unwrap_or(text).to_owned()
}

/// The items of one file, by their name: the declaration with the first sentence of its documentation, and the methods.
fn items(text: &str, exported: &BTreeSet<String>, found: &mut BTreeMap<String, (String, Vec<String>)>) {
    let lines: Vec<_> = text.lines().collect();
    let (mut doc, mut owner) = (String::new(), String::new());
    for (at, line) in lines.iter().enumerate() {
        if let Some(sentence) = line.strip_prefix("/// ").filter(|_| !doc.ends_with(['.', ':'])) {
            doc = format!("{doc} {sentence}").trim().to_owned();
        } else if let Some(rest) = line.strip_prefix("impl") {
            let rest = rest.split(" for ").last().unwrap_or(rest).trim_start_matches(|c| c != ' ').trim();
            owner = rest.split(['<', ' ']).next().unwrap_or_default().to_owned();
        } else if let Some(rest) = line.strip_prefix("pub ") {
            let mut words = rest.split([' ', '(', '<', '{', ';', ':']);
            let keywords = ["async", "const", "fn", "static", "type", "struct", "enum", "trait"];
            let name = words.find(|word| !keywords.contains(word)).unwrap_or_default();
            if exported.contains(name) {
                let variants = lines[at..].iter().take_while(|line| **line != "}").filter_map(|line| {
                    let variant = line.strip_prefix("    ").filter(|line| line.starts_with(char::is_uppercase))?;
                    Some(variant.split("(#[").next().unwrap_or(variant).trim_end_matches([',', '{', ' ']).to_owned())
                });
                let variants: Vec<_> = if rest.starts_with("enum") { variants.collect() } else { Vec::new() };
                let sentence = doc.split_once(". ").map_or(&*doc, |(first, _)| first).trim_end_matches('.');
                let entry = found.entry(name.to_owned()).or_default();
                entry.0 = format!("{} -- {sentence}", declaration(&lines[at..]));
                if !variants.is_empty() {
                    entry.1.insert(0, format!("= {}", variants.join(" | ")));
                }
            }
            owner = if rest.starts_with("trait") { name.to_owned() } else { owner };
        } else if line.contains(" trait ") && !line.starts_with(' ') {
            owner.clear(); // not public
        } else if (line.starts_with("    pub ") && line.contains("fn "))
            || line.starts_with("    fn ")
            || line.starts_with("    async fn ")
        {
            let of_trait = found.get(&owner).is_some_and(|(item, _)| item.starts_with("trait"));
            if exported.contains(&owner) && (of_trait || line.starts_with("    pub ")) && !line.contains("pub(") {
                found.entry(owner.clone()).or_default().1.push(declaration(&lines[at..]));
            }
        }
        if !line.starts_with("//") && !line.starts_with('#') {
            doc.clear();
        }
    }
}

fn api() -> String {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut api = String::new();
    for module in ["lib"].into_iter().chain(MODULES) {
        let exported = exported(&source(&format!("src/{module}.rs")));
        let mut found = BTreeMap::new();
        for path in files(&src) {
            let top = path.strip_prefix(&src).expect("inside").with_extension("");
            let top = top.iter().next().and_then(|top| top.to_str()).expect("a name");
            // `operator` also exports rows of `record`, and the root what no public module exports.
            if top == module || !MODULES.contains(&top) {
                items(&fs::read_to_string(&path).expect("a text"), &exported, &mut found);
            }
        }
        let missing: Vec<_> = exported.iter().filter(|name| !found.contains_key(*name)).collect();
        // Other crates, which the root exports as a whole.
        assert!(missing.iter().all(|name| ["chrono", "sqlx"].contains(&name.as_str())), "{module}: {missing:?}");
        api += &format!("\n{}\n", if module == "lib" { "pg_idempotency" } else { module });
        for (item, methods) in found.values() {
            api += &format!("  {}\n", item.trim_end_matches(" -- "));
            api.extend(methods.iter().map(|method| format!("    {method}\n")));
        }
    }
    api
}

/// The pages of the guide, as its front page lists them.
fn pages() -> String {
    let guide = source("src/guide/guide.md").replace("crate::guide::", &format!("{DOCS}/guide/"));
    let pages = guide.lines().filter(|line| line.starts_with("- [") && line.contains("/guide/"));
    pages.map(|line| line.replacen(')', "/index.html)", 1) + "\n").collect()
}

#[test]
fn llms_txt_lists_every_public_item_and_every_page() {
    let written = source("llms.txt");
    let (before, rest) = written.split_once("```text\n").expect("the items");
    let (_, after) = rest.split_once("```\n").expect("their end");
    let (between, _) = after.split_once("## Guide\n").expect("the pages");
    let api = api();
    let current = format!("{before}```text{api}```\n{between}## Guide\n\n{}", pages());
    if std::env::var_os("UPDATE").is_some() {
        fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("llms.txt"), &current).expect("written");
    }
    assert!(written == current, "llms.txt is stale: UPDATE=1 cargo test --test llms");
    for name in before.split('`').skip(1).step_by(2).filter(|name| name.chars().all(char::is_alphanumeric)) {
        assert!(
            api.contains(name) || ["Json", "Handler", "layer", "begin", "execute"].contains(&name),
            "{name} is no item"
        );
    }
}
