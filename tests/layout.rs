//! The floors of `src/layout.md`: a module knows the floors below its own, and on its own floor no two modules know each
//! other, not even through a third. In the benchmarks, too, no modules know each other. And what the SQL of the crate names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const SRC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
const BENCH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/bench/src");

/// The modules, and what each of them knows.
type Arrows = BTreeMap<String, BTreeSet<String>>;

#[test]
fn no_module_knows_a_higher_floor() {
    let (floors, arrows) = (floors(), arrows(SRC, "lib.rs"));
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
fn no_modules_know_each_other() {
    for (folder, root) in [(SRC, "lib.rs"), (BENCH, "main.rs")] {
        let arrows = arrows(folder, root);
        let circles: Vec<&String> = arrows.keys().filter(|module| reached(&arrows, module).contains(*module)).collect();
        assert!(circles.is_empty(), "{folder}: these modules are parts of circles: {circles:?}");
    }
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
    let page = read(&Path::new(SRC).join("layout.md"));
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

/// The imports of every file, as arrows between the modules of the root. Files of tests may know everything.
fn arrows(folder: &str, root: &str) -> Arrows {
    let lib = read(&Path::new(folder).join(root));
    let modules: BTreeSet<&str> = lib
        .lines()
        .filter_map(|line| line.trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';'))
        .filter(|module| *module != "doctests")
        .collect();
    // `pub use error::{BoxError, Error};` makes `crate::Error` a name of the module `error`.
    let mut homes: BTreeMap<String, &str> = modules.iter().map(|module| ((*module).to_owned(), *module)).collect();
    for exported in lib.split("pub use ").skip(1) {
        let (path, _) = exported.split_once(';').expect("a whole statement");
        if let Some((home, names)) = path.split_once("::") {
            let home = modules.get(home).expect("an exported module");
            homes.extend(first_names(names).into_iter().map(|name| (name, *home)));
        }
    }
    let mut arrows: Arrows = modules.iter().map(|module| ((*module).to_owned(), BTreeSet::new())).collect();
    for file in files(Path::new(folder), root) {
        let within = file.strip_prefix(folder).expect("a file of the folder");
        let module =
            within.iter().next().and_then(|name| Path::new(name).file_stem()).expect("a name").to_string_lossy();
        let Some(known) = arrows.get_mut(&*module) else { continue };
        let code: Vec<String> =
            read(&file).lines().map(|line| line.split("//").next().unwrap_or("").to_owned()).collect();
        for path in code.join("\n").split("crate::").skip(1) {
            for name in first_names(path) {
                let home = homes.get(&name).unwrap_or_else(|| panic!("{}: where is {name} from?", file.display()));
                if *home != module {
                    known.insert((*home).to_owned());
                }
            }
        }
    }
    arrows
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

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// PostgreSQL would prefer a function of another schema that fits a call better, as `public.format(text, text)` does. Those that
/// are left are constructs of the grammar, and aggregates that fit exactly.
#[test]
fn every_function_in_the_sql_is_named_with_its_schema() {
    const EXACT: &str = "and any array as between bind case check coalesce count exists extract filter from greatest in insert \
                         interval is key least limit max min not nullif of on or over select set sum then unnest using values \
                         when where with record conflict";
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut texts = ["migrate.rs", "session/opening.rs", "testing/time.rs"].map(|name| root.join(name)).to_vec();
    texts.extend(files(&root.join("record"), ""));
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
