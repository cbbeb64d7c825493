//! The documents name files, tests and scripts of this repository. They must exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// All files below a folder.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target" && name != ".git") {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found
}

fn documents() -> Vec<(PathBuf, String)> {
    let read = |path: PathBuf| (path.clone(), fs::read_to_string(path).expect("a text"));
    let documents: Vec<_> = files(Path::new(env!("CARGO_MANIFEST_DIR")), "md").into_iter().map(read).collect();
    assert!(documents.len() > 8, "{documents:?}");
    documents
}

/// What is between each `open` and the next `close`.
fn between<'t>(text: &'t str, open: &'static str, close: char) -> impl Iterator<Item = &'t str> {
    text.split(open).skip(1).filter_map(move |rest| rest.split_once(close)).map(|(inside, _)| inside)
}

/// What is between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn every_relative_link_leads_to_a_file() {
    let mut links = 0;
    for (path, text) in documents() {
        for link in between(&text, "](", ')') {
            let target = link.split('#').next().unwrap_or_default();
            // Items of the library, which rustdoc checks, and other sites.
            if target.contains("::") || target.contains("://") || !target.contains(['/', '.']) {
                continue;
            }
            links += 1;
            let file = path.parent().expect("a folder").join(target);
            assert!(file.exists(), "{}: {link}", path.display());
        }
    }
    assert!(links > 20, "{links} links");
}

/// Names such as `rules::a_missing_key_is_refused`, in the form in which `cargo test` prints them.
#[test]
fn every_test_that_a_document_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut tests = BTreeSet::new();
    for folder in ["tests", "crates", "src"] {
        for file in files(&root.join(folder), "rs") {
            let text = fs::read_to_string(file).expect("a text");
            tests.extend(between(&text, "fn ", '(').map(|name| name.split('<').next().unwrap_or_default().to_owned()));
        }
    }
    let mut named = 0;
    for (path, text) in documents() {
        for quoted in quoted(&text) {
            let Some((_, name)) = quoted.rsplit_once("::") else { continue };
            // Tests are sentences; functions of the library have fewer words.
            if name.matches('_').count() < 4
                || !name.chars().all(|c| c.is_ascii_lowercase() || "_0123456789".contains(c))
            {
                continue;
            }
            named += 1;
            assert!(tests.contains(name), "{}: {quoted}", path.display());
        }
    }
    assert!(named > 20, "{named} tests");
}

#[test]
fn every_script_that_a_document_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (path, text) in documents() {
        for script in quoted(&text).filter_map(|quoted| quoted.strip_prefix("script/")) {
            let name = script.split([' ', ',']).next().unwrap_or_default();
            assert!(root.join("script").join(name).exists(), "{}: script/{script}", path.display());
        }
    }
}

/// A guide shows a change as a diff, and compiles the code after it.
#[test]
fn every_diff_leads_to_the_code_of_its_document() {
    let mut added = 0;
    for (path, text) in documents() {
        let code: String = text.split("```rust").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        for diff in text.split("```diff\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            for line in diff.lines().filter_map(|line| line.strip_prefix(['+', ' '])) {
                added += 1;
                assert!(code.lines().any(|code| code == line), "{}: {line}", path.display());
            }
        }
    }
    assert!(added > 0, "no document has a diff");
}
