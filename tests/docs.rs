//! The documents name files, tests and scripts of this repository. They must exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{BrokenLink, CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

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

/// The anchors that GitHub gives to the headings of a document.
fn anchors(document: &str) -> BTreeSet<String> {
    let outside_code = document.split("```").step_by(2);
    let headings = outside_code.flat_map(str::lines).filter(|line| line.starts_with('#'));
    let mut anchors = BTreeSet::new();
    for heading in headings {
        let text = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        // The second heading of the same text gets `-1`.
        let unused = (0..).map(|n| if n == 0 { anchor.clone() } else { format!("{anchor}-{n}") });
        anchors.extend(unused.skip_while(|anchor| anchors.contains(anchor)).take(1).collect::<Vec<_>>());
    }
    anchors
}

/// The targets of the links of a document, as a forge and rustdoc read them, and the labels without a target.
fn links(text: &str) -> (Vec<String>, Vec<String>) {
    let mut unknown = Vec::new();
    let mut label_is_unknown = |link: BrokenLink<'_>| {
        unknown.push(link.reference.to_string());
        None
    };
    let options = Options::ENABLE_TABLES | Options::ENABLE_TASKLISTS;
    let events = Parser::new_with_broken_link_callback(text, options, Some(&mut label_is_unknown));
    let targets = events
        .filter_map(|event| match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => Some(dest_url.to_string()),
            _ => None,
        })
        .collect();
    (targets, unknown)
}

#[test]
fn every_relative_link_leads_to_a_file_and_a_heading() {
    let (mut relative, mut headings) = (0, 0);
    for (path, text) in documents() {
        for link in links(&text).0 {
            let (target, anchor) = link.split_once('#').unwrap_or((&link, ""));
            // Items of the library, which rustdoc checks, pages of the documentation, which script/links follows, and
            // other sites.
            let is_a_file = (target.contains(['/', '.']) || target.is_empty()) && !target.ends_with("/index.html");
            if target.contains("::") || target.contains("://") || !is_a_file {
                continue;
            }
            relative += 1;
            let file = if target.is_empty() { path.clone() } else { path.parent().expect("a folder").join(target) };
            assert!(file.exists(), "{}: {link}", path.display());
            if !anchor.is_empty() {
                headings += 1;
                let document = fs::read_to_string(&file).expect("a text");
                assert!(anchors(&document).contains(anchor), "{}: {link}", path.display());
            }
        }
    }
    assert!(relative > 200 && headings > 20, "{relative} links, {headings} of them to a heading");
}

/// A page of the guide is read in the documentation, behind `links.md`, and on a forge, by itself.
#[test]
fn each_link_of_the_guide_has_a_target_in_the_documentation_and_on_a_forge() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/guide");
    let in_rustdoc = fs::read_to_string(guide.join("links.md")).expect("a text");
    let labels = |text: &str| {
        let definitions = text.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: "));
        let of_a_label = definitions.filter(|(label, _)| !label.contains(']'));
        of_a_label.map(|(label, _)| label.to_owned()).collect::<BTreeSet<_>>()
    };
    let mut used = BTreeSet::new();
    for path in files(&guide, "md").into_iter().filter(|path| !path.ends_with("links.md")) {
        let page = fs::read_to_string(&path).expect("a text");
        let ((on_a_forge, unknown), (in_documentation, _)) = (links(&page), links(&format!("{in_rustdoc}\n{page}")));
        assert!(unknown.is_empty(), "{} does not end with the targets of {unknown:?}", path.display());
        assert_eq!(on_a_forge.len(), in_documentation.len(), "{}", path.display());
        for (there, here) in on_a_forge.iter().zip(&in_documentation) {
            let is_for_a_forge = !there.contains("://") && !there.contains("::");
            let is_for_rustdoc = here.contains("://") || here.contains("::") || here.starts_with('#');
            assert!(is_for_a_forge || there == here, "{}: a forge finds nothing at {there}", path.display());
            assert!(is_for_rustdoc, "{}: give {here} its target in links.md", path.display());
        }
        used.append(&mut labels(&page));
    }
    let different: Vec<_> = labels(&in_rustdoc).symmetric_difference(&used).cloned().collect();
    assert!(different.is_empty(), "links.md has exactly the labels of all pages: {different:?}");
}

/// What begins with `idempotency_` and ends as a metric does, and is outside a name of more words.
fn metrics(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let ours = words.filter(|word| word.starts_with("idempotency_"));
    // Prometheus adds these to the name of a histogram.
    let bare = ours.map(|word| ["_sum", "_count", "_bucket"].iter().fold(word, |name, end| name.trim_end_matches(end)));
    let is_metric =
        |name: &&str| *name == "idempotency_records" || name.ends_with("_total") || name.ends_with("_seconds");
    bare.filter(is_metric).map(str::to_owned).collect()
}

#[test]
fn the_guide_lists_exactly_the_metrics_that_the_crate_exports() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut exported = BTreeSet::new();
    for folder in ["src", "crates/idempotency-janitor/src"] {
        for file in files(&root.join(folder), "rs") {
            let text = fs::read_to_string(file).expect("a text");
            exported.extend(text.split('"').filter(|literal| literal.starts_with("idempotency_")).flat_map(metrics));
        }
    }
    let guide = fs::read_to_string(root.join("src/guide/metrics.md")).expect("a text");
    let listed: BTreeSet<_> =
        guide.lines().filter(|line| line.starts_with("| `idempotency_")).flat_map(metrics).collect();
    assert!(exported.len() > 5, "{exported:?}");
    assert_eq!(listed, exported);
    let mut others: Vec<_> = documents().into_iter().collect();
    for name in ["contrib/alerts.yml", "contrib/alerts_test.yml", "contrib/grafana.json"] {
        others.push((name.into(), fs::read_to_string(root.join(name)).expect("a text")));
    }
    for (path, text) in others {
        let unknown: Vec<_> = metrics(&text).difference(&exported).cloned().collect();
        assert!(unknown.is_empty(), "{}: {unknown:?}", path.display());
    }
}

/// The `runbook_url` of an alert is the heading of its name.
#[test]
fn every_alert_leads_to_its_heading_in_the_runbook() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let runbook = fs::read_to_string(root.join("src/guide/runbook.md")).expect("a text");
    let rules = fs::read_to_string(root.join("contrib/alerts.yml")).expect("a text");
    let alerts: Vec<_> = between(&rules, "- alert: ", '\n').collect();
    let urls: Vec<_> = between(&rules, "guide/runbook/index.html#", '\n').collect();
    assert_eq!(urls, alerts.iter().map(|alert| alert.to_lowercase()).collect::<Vec<_>>());
    assert!(alerts.iter().all(|alert| runbook.contains(&format!("# {alert}\n"))), "{alerts:?}");
}

/// A dashboard or an alert can only be read if its words are explained.
#[test]
fn the_guide_explains_exactly_the_outcomes_that_the_crate_counts() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("src/observe.rs")).expect("a text");
    let words = text.split_once("pub(crate) const PERFORMED").expect("the words").1;
    // `claimed` is of a span only, and `in_doubt` of a step only. `http` is the name of a feature.
    let others = ["claimed", "in_doubt", "http"];
    let counted: BTreeSet<_> = words.split('"').skip(1).step_by(2).filter(|word| !others.contains(word)).collect();
    let guide = fs::read_to_string(root.join("src/guide/metrics.md")).expect("a text");
    let table = guide.split_once("| `outcome` | meaning |\n|---|---|\n").expect("the table").1;
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    let explained: BTreeSet<_> = rows.filter_map(|row| row.split('`').nth(1)).collect();
    assert!(counted.len() > 8, "{counted:?}");
    assert_eq!(explained, counted);
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

/// A service that waits for a connection as long as sqlx does by default answers 503 when its clients have given up.
#[test]
fn every_service_that_a_document_or_an_example_starts_bounds_the_wait_for_a_connection() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let examples = files(&root.join("examples"), "rs").into_iter().map(|path| {
        let text = fs::read_to_string(&path).expect("a text");
        (path, text)
    });
    let mut services = 0;
    for (path, text) in documents().into_iter().chain(examples) {
        let connects = text.contains(".connect(") || text.contains("PgPool::connect");
        if connects && (text.contains("axum::serve") || text.contains("StatusCode")) {
            services += 1;
            let bounded = text.contains("PgPoolOptions::new().acquire_timeout(Duration::from_secs(3)).connect(");
            assert!(bounded && !text.contains("PgPool::connect"), "{}", path.display());
        }
    }
    assert!(services >= 4, "{services} services");
}

/// `safeupdate` refuses a statement without a condition, and a reader would not expect one.
#[test]
fn each_statement_of_the_guide_that_changes_records_has_a_condition() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/guide");
    let mut statements = 0;
    for path in files(&guide, "md") {
        let page = fs::read_to_string(&path).expect("a text");
        for change in ["update idempotency.record", "delete from idempotency.record"] {
            for rest in page.split(change).skip(1) {
                statements += 1;
                let statement = rest.split([';', '`']).next().unwrap_or_default();
                assert!(statement.contains("where "), "{}: {change}{statement}", path.display());
            }
        }
    }
    assert!(statements >= 5, "{statements} statements");
}

/// What a program writes behind the placeholder of a parameter, if the text begins with one.
fn behind_the_placeholder(text: &str) -> Option<&str> {
    match text.strip_prefix('$') {
        Some(number) => Some(number.trim_start_matches(|digit: char| digit.is_ascii_digit())),
        None => Some(text.strip_prefix("%(")?.split_once(")s")?.1),
    }
}

/// Without the cast, a reader passes a string, in which PostgreSQL reads each backslash as an escape.
#[test]
fn each_program_for_other_languages_casts_the_parameters_of_bytes() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/guide");
    let programs =
        fs::read_dir(guide.join("any_language")).expect("a folder").map(|entry| entry.expect("a file").path());
    let mut parameters = 0;
    for path in programs.chain([guide.join("any_language.md")]) {
        let text = fs::read_to_string(&path).expect("a text");
        for argument in ["idempotency.fingerprint(", "body => "] {
            for behind in text.split(argument).skip(1).filter_map(behind_the_placeholder) {
                parameters += 1;
                assert!(behind.starts_with("::bytea"), "{}: {argument}…{behind:.40}", path.display());
            }
        }
    }
    assert!(parameters >= 11, "{parameters} parameters");
}

#[test]
fn the_description_for_tools_names_every_problem() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let description = fs::read_to_string(root.join("docs/openapi.yaml")).expect("a text");
    let rejections = fs::read_to_string(root.join("src/http/rejection.rs")).expect("a text");
    let problems: Vec<_> = between(&rejections, " => (\"", '"').collect();
    assert!(problems.len() >= 15, "{problems:?}");
    let missing: Vec<_> = problems.into_iter().filter(|kind| !description.contains(&format!("`{kind}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Each rule has a test, and the tests pass.
#[test]
fn the_alerts_fire_when_they_should() {
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("contrib");
    let rules = fs::read_to_string(contrib.join("alerts.yml")).expect("a text");
    let tests = fs::read_to_string(contrib.join("alerts_test.yml")).expect("a text");
    let untested: Vec<_> = between(&rules, "- alert: ", '\n').filter(|alert| !tests.contains(alert)).collect();
    assert!(untested.is_empty(), "{untested:?}");
    for arguments in [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]] {
        let Ok(output) = std::process::Command::new("promtool").args(arguments).current_dir(&contrib).output() else {
            eprintln!("SKIPPED: there is no promtool, so no alert of contrib/alerts.yml was tested");
            return;
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// A Job cannot be changed and does not run again, so without Helm its name has to change with the version.
#[test]
fn the_migration_job_runs_again_after_an_upgrade() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let version = env!("CARGO_PKG_VERSION");
    let job = fs::read_to_string(root.join("contrib/kubernetes/migrate-job.yaml")).expect("a text");
    assert!(job.contains(&format!("  name: idempotency-migrate-{version}\n")), "{job}");
    let guide = fs::read_to_string(root.join("src/guide/migrations.md")).expect("a text");
    assert!(guide.contains(&format!("job/idempotency-migrate-{version}\n")), "the page waits for this Job");
    for path in files(&root.join("contrib/kubernetes"), "yaml") {
        let text = fs::read_to_string(&path).expect("a text");
        let images: Vec<_> = between(&text, "image: idempotency-janitor:", '\n').collect();
        assert!(!images.is_empty() && images.iter().all(|image| *image == version), "{}: {images:?}", path.display());
        for confined in ["readOnlyRootFilesystem: true", "runAsNonRoot: true", "drop: [\"ALL\"]"] {
            assert!(text.contains(confined), "{}: {confined}", path.display());
        }
    }
}

/// `llms.txt` describes the crate to language models.
#[test]
fn llms_txt_lists_the_pages_of_the_guide_and_no_name_that_is_gone() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| fs::read_to_string(root.join(path)).expect("a text");
    let (rules, listed) =
        read("llms.txt").split_once("## Guide\n").map(|(a, b)| (a.to_owned(), b.to_owned())).expect("pages");
    let guide = read("src/guide/guide.md");
    let listing = guide.lines().filter(|line| line.contains("][") && line.contains(".md]") && !line.contains("../"));
    let pages = listing.map(|line| {
        let (text, page) = line.split_once("][").expect("a link");
        format!("{text}](src/guide/{}\n", page.replacen(']', ")", 1))
    });
    let pages: String = pages.collect();
    assert_eq!(listed.trim_start(), pages, "llms.txt lists the pages of src/guide/guide.md");
    let sources: String =
        files(&root.join("src"), "rs").iter().map(|file| fs::read_to_string(file).expect("a text")).collect();
    let words: BTreeSet<_> = sources.split(|c: char| !c.is_alphanumeric()).collect();
    // Those of axum and sqlx.
    let foreign = ["Json", "Handler", "layer", "begin", "execute"];
    for name in quoted(&rules).filter(|name| name.chars().all(char::is_alphanumeric) && !foreign.contains(name)) {
        assert!(words.contains(name), "llms.txt names {name}, and no source does");
    }
}

/// The code blocks of a text, each with the words after its fence.
fn code_blocks(text: &str) -> Vec<(String, String)> {
    let mut blocks: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for event in Parser::new(text) {
        match event {
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(words))) => {
                blocks.push((words.to_string(), String::new()));
                inside = true;
            }
            Event::End(TagEnd::CodeBlock) => inside = false,
            Event::Text(code) if inside => blocks.last_mut().expect("a block").1.push_str(&code),
            _ => {}
        }
    }
    blocks
}

/// The doc comments of a source file, each without its slashes.
fn doc_comments(source: &str) -> Vec<String> {
    let mut comments = vec![String::new()];
    for line in source.lines() {
        let line = line.trim_start();
        match line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) {
            Some(text) => {
                let comment = comments.last_mut().expect("a comment");
                comment.push_str(text.strip_prefix(' ').unwrap_or(text));
                comment.push('\n');
            }
            // A file in the middle of the comment.
            None if line.starts_with("#[doc = ") => {}
            None => comments.push(String::new()),
        }
    }
    comments
}

/// The part of a line of Rust after its first statement, if it has more than one. A semicolon inside brackets, a string
/// or a comment of this line ends no statement.
fn second_statement(line: &str) -> Option<&str> {
    let mut depth = 0;
    let mut in_string = false;
    let mut characters = line.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' if in_string => drop(characters.next()),
            '"' => in_string = !in_string,
            _ if in_string => {}
            '/' if line[at..].starts_with("//") => return None,
            // The character literals of a quote and of the brackets.
            '\'' if line[at + 1..].chars().nth(1) == Some('\'') => drop((characters.next(), characters.next())),
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ';' if depth <= 0 => {
                let rest = line[at + 1..].trim_start();
                return (!rest.is_empty() && !rest.starts_with("//") && !rest.starts_with('}')).then_some(rest);
            }
            _ => {}
        }
    }
    None
}

/// An editor, or a program, that wraps an example as if it were prose joins its statements. The example still compiles.
#[test]
fn no_example_was_wrapped_as_prose() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(second_statement("let a = 1; let b = 2;"), Some("let b = 2;"));
    assert_eq!(second_statement("let a = [0; 8]; // two; three"), None);
    assert_eq!(second_statement(r#"run(|| { a; b }, "c; d", ';', '"');"#), None);
    let mut texts: Vec<_> = documents().into_iter().map(|(path, text)| (path, vec![text])).collect();
    for file in files(&root.join("src"), "rs") {
        let comments = doc_comments(&fs::read_to_string(&file).expect("a text"));
        texts.push((file, comments));
    }
    let (mut rust, mut json) = (0, 0);
    for (path, texts) in texts {
        // Outside `src`, a block without a word is not for rustdoc.
        let unnamed_is_rust = path.starts_with(root.join("src"));
        for (words, code) in texts.iter().flat_map(|text| code_blocks(text)) {
            let mut words = words.split([',', ' ']).map(str::trim);
            let is_rust = |word| matches!(word, "rust" | "no_run" | "ignore" | "should_panic" | "compile_fail");
            if words.clone().any(|word| word == "json") {
                json += 1;
                let parsed = serde_json::from_str::<serde_json::Value>(&code);
                assert!(parsed.is_ok(), "{}: {parsed:?} in\n{code}", path.display());
            } else if words.clone().any(is_rust) || unnamed_is_rust && words.all(str::is_empty) {
                rust += 1;
                // A reader does not see the lines that rustdoc hides.
                for line in code.lines().filter(|line| !line.trim_start().starts_with("# ")) {
                    let second = second_statement(line);
                    assert!(second.is_none(), "{}: two statements in\n{line}", path.display());
                }
            }
        }
    }
    assert!(rust > 30, "{rust} blocks of Rust, {json} of JSON");
}
