//! The layers of `ARCHITECTURE.md`: a module uses its own row and the rows above, and no modules know each other in a
//! circle. Nor do two files of one folder, here and in the tools that prove the crate.
//! And what the SQL of the crate names, and which forms it has.

mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;

/// The library, and the crates that measure, prove and operate it.
const CRATES: [&str; 7] = [
    "src/lib.rs",
    "crates/bench/src/main.rs",
    "crates/chaos/src/main.rs",
    "crates/demos/src/lib.rs",
    "crates/idempotency-check/src/lib.rs",
    "crates/idempotency-janitor/src/main.rs",
    "crates/interleave/src/main.rs",
];
/// The name of the file that owns a folder, where it is more than a map.
const ROOT: &str = "the root";

/// A folder, and the file that declares its modules.
struct House {
    folder: PathBuf,
    root: PathBuf,
    /// From the root of the crate: `http`, `layer`.
    path: Vec<String>,
}

/// The modules, and what each of them knows.
type Arrows = BTreeMap<String, BTreeSet<String>>;

#[test]
fn a_module_uses_only_the_layers_above_it() {
    let (layers, arrows) = (layers(), arrows(&houses(CRATES[0])[0]));
    let modules: BTreeSet<_> = arrows.keys().collect();
    assert_eq!(layers.keys().collect::<BTreeSet<_>>(), modules, "ARCHITECTURE.md names each module once");
    let upward: Vec<String> = arrows
        .iter()
        .flat_map(|(from, known)| known.iter().map(move |to| (from, to)))
        .filter(|(from, to)| layers[*to] > layers[*from])
        .map(|(from, to)| format!("{from} knows {to}, which is in a row below"))
        .collect();
    assert!(upward.is_empty(), "{upward:#?}");
}

#[test]
fn no_files_of_a_folder_know_each_other() {
    let mut circles = Vec::new();
    for house in CRATES.into_iter().flat_map(houses) {
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

/// The number of each module's layer, from the table with the column *layer*: the first row is 0.
fn layers() -> BTreeMap<String, usize> {
    let page = read(&here("ARCHITECTURE.md"));
    let rows = page.lines().skip_while(|line| !line.starts_with("| layer ")).skip(2);
    let mut layers = BTreeMap::new();
    for (layer, row) in rows.take_while(|line| line.starts_with('|')).enumerate() {
        let modules = row.split('|').nth(2).expect("a column of modules");
        for module in modules.split('`').skip(1).step_by(2) {
            assert!(layers.insert(module.to_owned(), layer).is_none(), "{module} is in two layers");
        }
    }
    layers
}

/// The folder of a crate, and each folder in it that belongs to a file.
fn houses(root: &str) -> Vec<House> {
    let root = here(root);
    let folder = root.parent().expect("a folder").to_owned();
    let mut houses = vec![House { folder: folder.clone(), root, path: Vec::new() }];
    for file in files(&folder, "") {
        let inner = file.with_extension("");
        if inner.is_dir() {
            let within = inner.strip_prefix(&folder).expect("a folder of the crate");
            let path = within.iter().map(|name| name.to_string_lossy().into_owned()).collect();
            houses.push(House { folder: inner, root: file, path });
        }
    }
    houses
}

/// The imports of every file, as arrows between the modules of a folder. Files of tests may know everything.
fn arrows(House { folder, root, path }: &House) -> Arrows {
    let map = parsed(root);
    let mut arrows = Arrows::new();
    // `pub use error::{BoxError, Error};` makes `crate::Error` a name of the module `error`.
    let mut homes = BTreeMap::new();
    for item in &map.items {
        if let syn::Item::Mod(module) = item
            && module.content.is_none()
        {
            arrows.insert(module.ident.to_string(), BTreeSet::new());
            homes.insert(module.ident.to_string(), module.ident.to_string());
        }
    }
    let modules: BTreeSet<String> = arrows.keys().cloned().collect();
    let mut know = |from: &str, to: &str| {
        if from != to {
            arrows.entry(to.to_owned()).or_default();
            arrows.entry(from.to_owned()).or_default().insert(to.to_owned());
        }
    };
    for item in &map.items {
        let used = paths(item.to_token_stream());
        match item {
            syn::Item::Use(used_here) if !matches!(used_here.vis, syn::Visibility::Inherited) => {
                for path in used.into_iter().filter(|path| path.len() > 1 && modules.contains(&path[0])) {
                    homes.insert(path[1].clone(), path[0].clone());
                }
            }
            _ => {
                for path in used.iter().filter(|path| path.len() > 1 && modules.contains(&path[0])) {
                    know(ROOT, &path[0]);
                }
            }
        }
    }
    for file in files(folder, "").into_iter().filter(|file| file != root) {
        let within = file.strip_prefix(folder).expect("a file of the folder").with_extension("");
        let names = within.iter().map(|name| name.to_string_lossy().into_owned());
        let place: Vec<String> = path.iter().cloned().chain(names).collect();
        let module = &place[path.len()];
        if !modules.contains(module) {
            continue;
        }
        for used in paths(parsed(&file).to_token_stream()) {
            let climbed = used.iter().take_while(|name| *name == "super").count();
            let absolute = match &used[climbed..] {
                [first, rest @ ..] if climbed == 0 && first == "crate" => rest.to_vec(),
                rest if climbed > 0 && climbed <= place.len() => [&place[..place.len() - climbed], rest].concat(),
                _ => continue,
            };
            if let Some([name, ..]) = absolute.strip_prefix(&path[..]) {
                know(module, homes.get(name).map_or(ROOT, String::as_str));
            }
        }
    }
    arrows
}

/// A file without the tests at its end.
fn parsed(path: &Path) -> syn::File {
    let mut file = syn::parse_file(&read(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    file.items.retain(|item| !matches!(item, syn::Item::Mod(module) if module.ident == "tests"));
    file
}

/// All paths in the code, also in the arguments of macros. A group is each of its paths: `a::{b, c::d}` is `a::b` and
/// `a::c::d`.
fn paths(code: TokenStream) -> Vec<Vec<String>> {
    let mut tokens = code.into_iter().peekable();
    let (mut found, mut path, mut joined) = (Vec::new(), Vec::new(), false);
    while let Some(token) = tokens.next() {
        let is_colon =
            |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(mark)) if mark.as_char() == ':');
        match token {
            TokenTree::Ident(name) => {
                if !joined {
                    found.extend((!path.is_empty()).then(|| std::mem::take(&mut path)));
                }
                path.push(name.to_string());
                joined = false;
            }
            TokenTree::Punct(mark) if mark.as_char() == ':' && is_colon(tokens.peek()) => {
                tokens.next();
                joined = true;
            }
            TokenTree::Group(group) => {
                let inside = paths(group.stream());
                let front = std::mem::take(&mut path);
                if joined {
                    found.extend(inside.into_iter().map(|rest| [&front[..], &rest].concat()));
                } else {
                    found.extend((!front.is_empty()).then_some(front).into_iter().chain(inside));
                }
                joined = false;
            }
            _ => {
                found.extend((!path.is_empty()).then(|| std::mem::take(&mut path)));
                joined = false;
            }
        }
    }
    found.extend((!path.is_empty()).then_some(path));
    found
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
    let mut texts = ["src/migrate.rs", "src/session/own.rs", "src/testing.rs"].map(here).to_vec();
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

/// In a Turkish database, the lower case of TRIGGER is another word.
#[test]
fn no_statement_changes_the_case_of_a_word_by_the_locale_of_the_database() {
    let mut texts = files(&here("src/record"), "");
    texts.push(here("src/migrate.rs"));
    let sql = fs::read_dir(here("migrations")).expect("a folder").map(|entry| entry.expect("an entry").path());
    texts.extend(sql.filter(|path| path.extension().is_some_and(|extension| extension == "sql")));
    let (mut changes, mut by_locale) = (0, Vec::new());
    for path in texts {
        let text = read(&path);
        for word in ["lower(", "upper(", "initcap("] {
            for argument in clauses_of(&text, word) {
                changes += 1;
                if !argument.contains("collate") {
                    by_locale.push(format!("{}: {word}{argument})", path.display()));
                }
            }
        }
    }
    assert!(changes > 1, "{changes}");
    assert_eq!(by_locale, Vec::<String>::new());
}

/// The functions that PostgreSQL declares volatile, among those that the statements use.
const VOLATILE: [&str; 5] =
    ["set_config", "clock_timestamp", "pg_try_advisory_xact_lock", "pg_advisory_xact_lock", "gen_random_uuid"];

/// Citus executes the statements on a Citus local table (`src/guide/larger.md`), except for these forms. `script/citus`
/// executes each statement there, and this test finds the next one without a cluster.
#[test]
fn no_statement_on_the_record_has_a_form_that_citus_refuses() {
    let mut refused = Vec::new();
    let mut clauses = 0;
    for source::Statement { name, sql } in source::statements() {
        let sql = without_comments(&sql);
        if !sql.contains("idempotency.record") {
            continue;
        }
        let mut refuse = |why: &str| refused.push(format!("{name}: {why}"));
        let volatile = |text: &str| VOLATILE.iter().any(|function| text.contains(&format!("{function}(")));
        for returning in clauses_of(&sql, "returning") {
            clauses += 1;
            // A dollar of a JSON path comes before a dot.
            if returning.match_indices('$').any(|(at, _)| !returning[at..].starts_with("$.")) {
                refuse("a parameter in RETURNING");
            }
            // An insert may have one: the claim.
            if volatile(&returning) && name != "claim" {
                refuse("a volatile function in RETURNING");
            }
        }
        for update in clauses_of(&sql, "update idempotency.record") {
            clauses += 1;
            if volatile(&update) {
                refuse("a volatile function in an UPDATE");
            }
        }
        if sql.contains(" recursive ") {
            refuse("WITH RECURSIVE");
        }
        for before in sql.match_indices("for update").map(|(at, _)| select_before(&sql[..at])) {
            clauses += 1;
            let from = before.split_once(" from ").map_or("", |(_, from)| from);
            let tables = from.split(" where ").next().unwrap_or_default();
            if tables.contains(',') || tables.contains(" join ") {
                refuse("a locking clause over a join");
            }
        }
    }
    assert!(clauses > 25, "{clauses}");
    assert_eq!(refused, Vec::<String>::new());
}

/// One line, in which one space separates the words.
fn without_comments(sql: &str) -> String {
    let mut text: String =
        sql.lines().map(|line| line.split("--").next().unwrap_or_default()).collect::<Vec<_>>().join(" ");
    while let (Some(from), Some(to)) = (text.find("/*"), text.find("*/")) {
        text.replace_range(from..to + 2, " ");
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What follows each of these words, up to the end of the parentheses around it.
fn clauses_of(sql: &str, word: &str) -> Vec<String> {
    let end = |rest: &str| {
        let mut depth = 0;
        rest.find(|character| {
            depth += match character {
                '(' => 1,
                ')' => -1,
                _ => 0,
            };
            depth < 0
        })
        .unwrap_or(rest.len())
    };
    let rests = sql.match_indices(word).map(|(at, _)| &sql[at + word.len()..]);
    rests.map(|rest| rest[..end(rest)].to_owned()).collect()
}

/// The SELECT that ends here, without the SELECTs inside of its parentheses.
fn select_before(sql: &str) -> String {
    let (mut depth, mut own) = (0, Vec::new());
    for character in sql.chars().rev() {
        depth += match character {
            ')' => 1,
            '(' => -1,
            _ => 0,
        };
        if depth < 0 {
            break;
        }
        if depth == 0 {
            own.push(character);
        }
    }
    own.iter().rev().collect()
}
