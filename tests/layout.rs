//! The floors of `src/layout.md`: a module knows the floors below its own, and on its own floor no two modules know
//! each other, not even through a third. Nor do two files of one folder, here and in the tools that prove the crate.
//! And what the SQL of the crate names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The library, and the crates that measure, prove and operate it.
const CRATES: [&str; 8] = [
    "src/lib.rs",
    "crates/bench/src/main.rs",
    "crates/chaos/src/main.rs",
    "crates/demos/src/lib.rs",
    "crates/demos/src/bin/orders_api/main.rs",
    "crates/idempotency-check/src/lib.rs",
    "crates/idempotency-janitor/src/main.rs",
    "crates/interleave/src/main.rs",
];
/// A statement and its twin for a distributed table share their terms and their result.
const KNOW_EACH_OTHER: &str = "src/record";
/// The name of the file that owns a folder, where it is more than a map.
const ROOT: &str = "the root";

/// A folder, and the file that declares its modules.
struct House {
    folder: PathBuf,
    root: PathBuf,
    /// From the root of the crate, with its separators: `http::layer::`.
    path: String,
}

/// The modules, and what each of them knows.
type Arrows = BTreeMap<String, BTreeSet<String>>;

#[test]
fn no_module_knows_a_higher_floor() {
    let (floors, arrows) = (floors(), arrows(&houses(CRATES[0])[0]));
    let modules: BTreeSet<_> = arrows.keys().collect();
    assert_eq!(floors.keys().collect::<BTreeSet<_>>(), modules, "layout.md names each module once");
    let upward: Vec<String> = arrows
        .iter()
        .flat_map(|(from, known)| known.iter().map(move |to| (from, to)))
        .filter(|(from, to)| floors[*to] > floors[*from])
        .map(|(from, to)| format!("{from} knows {to}, which is on a higher floor"))
        .collect();
    assert!(upward.is_empty(), "{upward:#?}");
}

#[test]
fn no_files_of_a_folder_know_each_other() {
    let mut circles = Vec::new();
    for house in CRATES.into_iter().flat_map(houses).filter(|house| house.folder != here(KNOW_EACH_OTHER)) {
        let arrows = arrows(&house);
        let in_circles = arrows.keys().filter(|module| reached(&arrows, module).contains(*module));
        circles.extend(in_circles.map(|module| house.folder.join(module).display().to_string()));
    }
    assert!(circles.is_empty(), "these are parts of circles: {circles:#?}");
}

/// All that a module knows, also through others.
fn reached(arrows: &Arrows, from: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&String> = arrows[from].iter().collect();
    while let Some(module) = open.pop() {
        if reached.insert(module.clone()) {
            open.extend(&arrows[module]);
        }
    }
    reached
}

/// The number of each module's floor, from the table with the column *floor*: the lowest is 0.
fn floors() -> BTreeMap<String, usize> {
    let page = read(&here("src/layout.md"));
    let rows = page.lines().skip_while(|line| !line.starts_with("| floor ")).skip(2);
    let mut floors = BTreeMap::new();
    for (floor, row) in rows.take_while(|line| line.starts_with('|')).enumerate() {
        let modules = row.split('|').nth(2).expect("a column of modules");
        for module in modules.split('`').skip(1).step_by(2) {
            assert!(floors.insert(module.to_owned(), floor).is_none(), "{module} is on two floors");
        }
    }
    floors
}

/// The folder of a crate, and each folder in it that belongs to a file.
fn houses(root: &str) -> Vec<House> {
    let root = here(root);
    let folder = root.parent().expect("a folder").to_owned();
    let mut houses = vec![House { folder: folder.clone(), root, path: String::new() }];
    for file in files(&folder, "") {
        let inner = file.with_extension("");
        if inner.is_dir() {
            let within = inner.strip_prefix(&folder).expect("a folder of the crate");
            let path = within.iter().map(|name| format!("{}::", name.to_string_lossy())).collect();
            houses.push(House { folder: inner, root: file, path });
        }
    }
    houses
}

/// The imports of every file, as arrows between the modules of a folder. Files of tests may know everything.
fn arrows(House { folder, root, path }: &House) -> Arrows {
    let map = code(root);
    let modules: BTreeSet<&str> = map
        .lines()
        .filter_map(|line| {
            line.trim_start_matches("pub(crate) ").trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';')
        })
        .filter(|module| *module != "doctests")
        .collect();
    let mut arrows: Arrows = modules.iter().map(|module| ((*module).to_owned(), BTreeSet::new())).collect();
    // `pub use error::{BoxError, Error};` makes `crate::Error` a name of the module `error`.
    let mut homes: BTreeMap<String, &str> = modules.iter().map(|module| ((*module).to_owned(), *module)).collect();
    let mut owned = String::new();
    for statement in map.split_inclusive(';') {
        let exported = statement.split_once("pub use ").or_else(|| statement.split_once("pub(crate) use "));
        match exported.and_then(|(_, path)| path.split_once("::")).filter(|(home, _)| modules.contains(home)) {
            Some((home, names)) => {
                let home = modules.get(home).expect("an exported module");
                homes.extend(first_names(names).into_iter().map(|name| (name, *home)));
            }
            None => owned.push_str(statement),
        }
    }
    let mut know = |from: &str, to: &str| {
        if from != to {
            arrows.entry(to.to_owned()).or_default();
            arrows.entry(from.to_owned()).or_default().insert(to.to_owned());
        }
    };
    for module in &modules {
        let path = format!("{module}::");
        let mut before = owned.match_indices(&path).map(|(at, _)| owned[..at].chars().next_back());
        if before.any(|before| !before.is_some_and(|c| c.is_alphanumeric() || "_:.".contains(c))) {
            know(ROOT, module);
        }
    }
    for file in files(folder, "").into_iter().filter(|file| file != root) {
        let within = file.strip_prefix(folder).expect("a file of the folder").with_extension("");
        let module = within.iter().next().expect("a name").to_string_lossy();
        if !modules.contains(&*module) {
            continue;
        }
        let (code, root_of_crate) = (code(&file), format!("crate::{path}"));
        let climbing = code.match_indices("super::").filter(|(at, _)| !code[..*at].ends_with("super::"));
        let climbing = climbing.filter_map(|(at, _)| {
            let path = code[at..].trim_start_matches("super::");
            (code[at..].len() - path.len() == within.iter().count() * "super::".len()).then_some(path)
        });
        for path in code.split(&root_of_crate).skip(1).chain(climbing) {
            for name in first_names(path) {
                know(&module, homes.get(&name).copied().unwrap_or(ROOT));
            }
        }
    }
    arrows
}

/// A file without its comments, and without the tests at its end.
fn code(file: &Path) -> String {
    let text = read(file);
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or(""));
    lines.take_while(|line| *line != "mod tests {").map(|line| format!("{line}\n")).collect()
}

/// The first name of a path, or of each path in braces.
fn first_names(path: &str) -> Vec<String> {
    let name =
        |path: &str| path.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let Some(group) = path.strip_prefix('{') else { return vec![name(path)] };
    let (mut depth, mut names, mut start) = (0, Vec::new(), 0);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' | ',' if depth == 0 => {
                names.push(name(&group[start..at]));
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// The files of a folder, without the root. A module of tests says so in its first line.
fn files(folder: &Path, root: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path, root));
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && path.file_name().is_some_and(|name| name != root)
            && !read(&path).starts_with("//! Tests ")
        {
            found.push(path);
        }
    }
    found
}

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// PostgreSQL would prefer a function of another schema that fits a call better, as `public.format(text, text)` does.
/// Those that are left are constructs of the grammar, and aggregates that fit exactly.
#[test]
fn every_function_in_the_sql_is_named_with_its_schema() {
    const EXACT: &str = "and any array as between bind case check coalesce count exists extract filter from greatest in insert \
                         interval is key least limit max min not nullif of on or over select set sum then unnest using values \
                         when where with record conflict";
    let mut texts = ["src/migrate.rs", "src/session/own.rs", "src/testing/time.rs"].map(here).to_vec();
    texts.extend(files(&here("src/record"), ""));
    let (mut calls, mut bare) = (0, Vec::new());
    for path in texts {
        let lines: String = read(&path)
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
            .map(|line| format!("{line}\n"))
            .collect();
        for literal in lines.replace("\\\"", "").split('"').skip(1).step_by(2) {
            if !["select", "update ", "set ", "case", "pg_catalog", "_at", "_until"]
                .iter()
                .any(|word| literal.contains(word))
            {
                continue;
            }
            for (at, _) in literal.match_indices('(') {
                let before = &literal[..at];
                let name = before.rsplit(|c: char| !(c.is_ascii_lowercase() || c == '_')).next().unwrap_or_default();
                calls += 1;
                let qualified = before[..before.len() - name.len()].ends_with(['.', '$']);
                if !name.is_empty() && !qualified && !EXACT.split_whitespace().any(|exact| exact == name) {
                    bare.push(format!("{}: {name}(", path.display()));
                }
            }
        }
    }
    assert!(calls > 100, "{calls}");
    assert_eq!(bare, Vec::<String>::new());
}
