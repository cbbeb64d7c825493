//! The trial of the search itself. `mutants.txt` beside this crate has the edits of the crate's SQL that a scenario has
//! to find, and those that another condition or a test covers. It counts the others, which survive, for each statement.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use sqlx::postgres::PgConnectOptions;

use crate::edits::{self, Edits, Mutant, Sql};
use crate::explore::{Found, Search};
use crate::record::{self, Record};
use crate::scenarios::Scenario;
use crate::threads::share;
use crate::trace::{Module, Tree};
use crate::world::{self, Stuck, World};

const FILE: &str = "mutants.txt";
const FOUND: &str = "found by ";
const SURVIVES: &str = "survives: ";
/// Of an edit that a scenario has found before, and that none finds now.
const NO_REASON: &str = "survives: no reason is written";
/// The line of a statement with the number of its edits that have no line.
const OTHERS: &str = "others => ";
/// A reason names another condition behind these words, or a test by its path.
const ANOTHER_CONDITION: &str = "backed by ";
const TESTS: [&str; 3] = ["tests/", "crates/", "script/"];
/// A search that began this many schedules in the cheapest scenarios has not found the edit.
const ENOUGH: usize = 12_000;
/// How many times as many schedules as without the edit a scenario may take. More show that calls do more than before.
const MORE: usize = 3;

/// A scenario, and what its search without an edit has found.
pub(crate) type Searched = (Scenario, Found);

/// The statements that each scenario sends, and the functions that these call.
type Sent<'s> = BTreeMap<&'s str, BTreeSet<&'s str>>;

/// What became of each edit that has a line, by the edit's name.
fn fates<'r>(record: &'r Record, statement: &str) -> BTreeMap<&'r str, &'r str> {
    let lines = record.get(statement).into_iter().flatten().filter(|line| !line.starts_with(OTHERS));
    lines.filter_map(|line| line.split_once(" => ")).collect()
}

/// How many edits without a line are known to survive.
fn others(record: &Record, statement: &str) -> usize {
    let mut counts = record.get(statement).into_iter().flatten().filter_map(|line| line.strip_prefix(OTHERS));
    counts.next().and_then(|count| count.parse().ok()).unwrap_or_default()
}

fn edits(texts: &BTreeSet<String>) -> BTreeSet<String> {
    texts.iter().flat_map(|sql| edits::of(sql)).map(|edit| edit.name).collect()
}

/// The edits of a statement that have no line.
fn unlisted(record: &Record, statement: &str, mut edits: BTreeSet<String>) -> BTreeSet<String> {
    let fates = fates(record, statement);
    edits.retain(|edit| !fates.contains_key(&**edit));
    edits
}

/// Whether a reason names another condition, or tests that exist.
fn is_kept(fate: &str) -> bool {
    let Some(reason) = fate.strip_prefix(SURVIVES) else { return false };
    let words = reason.split_whitespace().map(|word| word.trim_end_matches([',', ';', ':']));
    let mut tests = words.filter(|word| TESTS.iter().any(|folder| word.starts_with(folder))).peekable();
    let is_named = reason.starts_with(ANOTHER_CONDITION) || tests.peek().is_some();
    is_named && tests.all(|test| Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(test).exists())
}

/// What is wrong with a line, if anything is.
fn mistake(statement: &str, fate: &str, sent: &Sent<'_>) -> Option<&'static str> {
    let finder = fate.strip_prefix(FOUND).and_then(|finder| sent.get(finder));
    match finder {
        Some(statements) if statements.contains(statement) => None,
        Some(_) => Some("this scenario never sends the statement, so another scenario must be named"),
        None if is_kept(fate) => None,
        None => Some("this names no scenario, condition or test"),
    }
}

fn sent(searched: &[Searched]) -> Sent<'_> {
    searched.iter().map(|(scenario, found)| (&*scenario.name, found.sql.keys().map(String::as_str).collect())).collect()
}

/// What is wrong with the list for this SQL and these scenarios, without trying an edit.
pub(crate) fn check(sql: &Sql, searched: &[Searched]) -> anyhow::Result<Vec<String>> {
    let all = sql.iter().map(|(statement, texts)| (&**statement, edits(texts))).collect();
    Ok(mistakes(&record::read(FILE)?, &all, &sent(searched)))
}

fn mistakes(record: &Record, all: &BTreeMap<&str, BTreeSet<String>>, sent: &Sent<'_>) -> Vec<String> {
    let mut wrong = Vec::new();
    for statement in all.keys().copied().chain(record.keys().map(String::as_str)).collect::<BTreeSet<_>>() {
        let edits = all.get(statement).cloned().unwrap_or_default();
        for (edit, fate) in fates(record, statement) {
            if !edits.contains(edit) {
                wrong.push(format!("{statement}: {edit}: this edit does not exist any more"));
            } else if let Some(mistake) = mistake(statement, fate, sent) {
                wrong.push(format!("{statement}: {edit}: {fate}: {mistake}"));
            }
        }
        let (unlisted, known) = (unlisted(record, statement, edits), others(record, statement));
        if unlisted.len() != known {
            let names: Vec<_> = unlisted.iter().map(|edit| format!("\n    {edit}")).collect();
            let count = names.len();
            wrong.push(format!("{statement}: {count} edits have no line, but {known} are known:{}", names.concat()));
        }
    }
    wrong
}

/// Tries each edit of the statements with this in their names, in the scenario that is written down for it. Returns how
/// many were not found, and the traces of the others.
pub(crate) fn hold(
    databases: &[PgConnectOptions],
    name: &str,
    searched: &[Searched],
) -> anyhow::Result<(usize, Module)> {
    let record = record::read(FILE)?;
    let sent = sent(searched);
    let mut trials = Vec::new();
    for statement in record.keys().filter(|statement| statement.contains(name)) {
        for (edit, fate) in fates(&record, statement) {
            let finder = searched.iter().find(|(scenario, _)| fate.strip_prefix(FOUND) == Some(&*scenario.name));
            let Some(finder) = finder else { continue };
            if let Some(mistake) = mistake(statement, fate, &sent) {
                anyhow::bail!("{FILE}: {statement}: {edit} => {fate}: {mistake}");
            }
            trials.push((mutant(statement, edit), finder));
        }
    }
    let tried = trials.len();
    let found = share(databases, trials, async |database, (mutant, finder)| {
        let found = find(database, &mutant, &[finder]).await;
        if !matches!(found, Ok(Some(_))) {
            println!("{mutant:?}: {} does not find it any more: {found:?}", finder.0.name);
        }
        (mutant, finder, found.ok().flatten())
    })?;
    let mut traces = Module::default();
    let mut count = 0;
    for (mutant, (scenario, _), found) in found {
        if let Some((_, tree)) = found {
            count += 1;
            if scenario.is_specified() {
                traces.add(&format!("{}: {}", mutant.statement, mutant.edit), &tree);
            }
        }
    }
    println!("{tried} mutants, {count} found");
    Ok((tried - count, traces))
}

/// Tries the edits without a line, of the statements with this in their names, in the scenarios that send each of them.
/// Prints those that survive. Returns how many were found, and so need a line.
pub(crate) fn try_others(
    databases: &[PgConnectOptions],
    name: &str,
    sql: &Sql,
    searched: &[Searched],
) -> anyhow::Result<usize> {
    let record = record::read(FILE)?;
    let mut trials = Vec::new();
    for (statement, texts) in sql.iter().filter(|(statement, _)| statement.contains(name)) {
        trials.extend(unlisted(&record, statement, edits(texts)).iter().map(|edit| mutant(statement, edit)));
    }
    let tried = trials.len();
    let found = share(databases, trials, async |database, mutant| {
        let Mutant { statement, edit } = &mutant;
        let found = find(database, &mutant, &candidates(statement, "", searched)).await?;
        match &found {
            Some((finder, _)) => println!("{statement}: {edit}: {FOUND}{finder}, but mutants.txt has no line"),
            None => println!("{statement}: {edit}: survives"),
        }
        anyhow::Ok(found.is_some())
    })?;
    let found = found.into_iter().collect::<anyhow::Result<Vec<bool>>>()?;
    let count = found.into_iter().filter(|found| *found).count();
    println!("{tried} others, {} survive", tried - count);
    Ok(count)
}

/// Tries every edit of the statements with this in their names; without a name, of those whose edits are not those that
/// are known. The list is written after each statement. It never counts more others than before, because somebody has
/// to decide about a new edit that survives.
pub(crate) fn record(
    databases: &[PgConnectOptions],
    name: &str,
    sql: &Sql,
    searched: &[Searched],
) -> anyhow::Result<()> {
    let mut record = record::read(FILE)?;
    record.retain(|statement, _| sql.contains_key(statement));
    for (statement, texts) in sql {
        let before = fates(&record, statement);
        let edits = edits(texts);
        let known = others(&record, statement);
        let is_known = before.keys().all(|edit| edits.contains(*edit)) && edits.len() == before.len() + known;
        if !statement.contains(name) || name.is_empty() && is_known {
            continue;
        }
        let lines = share(databases, edits.into_iter().collect(), async |database, edit| {
            let fate = before.get(&*edit).copied().unwrap_or_default();
            let found = find(database, &mutant(statement, &edit), &candidates(statement, fate, searched)).await?;
            let fate = match found {
                Some((finder, _)) => Some(format!("{FOUND}{finder}")),
                None if fate.starts_with(FOUND) => Some(NO_REASON.to_owned()),
                None if fate.is_empty() => None,
                None => Some(fate.to_owned()),
            };
            println!("{statement}: {edit} => {}", fate.as_deref().unwrap_or("survives"));
            anyhow::Ok(fate.map(|fate| format!("{edit} => {fate}")))
        })?;
        let lines = lines.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let survive = known.min(lines.iter().filter(|line| line.is_none()).count());
        let count = (survive > 0).then(|| format!("{OTHERS}{survive}"));
        record.insert(statement.clone(), lines.into_iter().flatten().chain(count).collect());
        record.retain(|_, lines| !lines.is_empty());
        record::write(FILE, &record)?;
    }
    Ok(())
}

fn mutant(statement: &str, edit: &str) -> Mutant {
    Mutant { statement: statement.to_owned(), edit: edit.to_owned() }
}

/// The scenarios that send this statement: the one that has found the edit before, and then the cheapest first.
fn candidates<'s>(statement: &str, fate: &str, searched: &'s [Searched]) -> Vec<&'s Searched> {
    let mut candidates: Vec<&Searched> =
        searched.iter().filter(|(_, found)| found.sql.contains_key(statement)).collect();
    candidates.sort_by_key(|(scenario, found)| (fate.strip_prefix(FOUND) != Some(&*scenario.name), found.begun()));
    let mut begun = 0;
    candidates.retain(|(_, found)| {
        begun += found.begun();
        begun <= ENOUGH || begun == found.begun()
    });
    candidates
}

/// The first of these scenarios in which the edit shows, and the traces until it has shown.
async fn find(
    database: &PgConnectOptions,
    mutant: &Mutant,
    candidates: &[&Searched],
) -> anyhow::Result<Option<(String, Tree)>> {
    let mut function = None;
    if let Some((_, found)) = candidates.first()
        && world::is_function(&mutant.statement)
    {
        let original = found.sql[&mutant.statement].first();
        let edited = original.and_then(|original| mutant.apply(&mutant.statement, original)).unwrap_or_default();
        // The server refuses some edits.
        if world::execute(database, &edited).await.is_err() {
            return Ok(None);
        }
        function = original;
    }
    let finder = first(database, mutant, candidates).await;
    if let Some(original) = function {
        world::execute(database, original).await?;
    }
    finder
}

async fn first(
    database: &PgConnectOptions,
    mutant: &Mutant,
    candidates: &[&Searched],
) -> anyhow::Result<Option<(String, Tree)>> {
    for searched in candidates {
        // Twice, because a busy machine may keep actors from coming to rest, too.
        if shows(database, mutant, searched).await?.is_some()
            && let Some(tree) = shows(database, mutant, searched).await?
        {
            return Ok(Some((searched.0.name.clone(), tree)));
        }
    }
    Ok(None)
}

/// The traces of the search, if it finds something with this edit. A schedule that comes to no end, and many more
/// schedules than without the edit, show it too. Another error, such as a refusal of the schema, shows nothing.
async fn shows(
    database: &PgConnectOptions,
    mutant: &Mutant,
    (scenario, plain): &Searched,
) -> anyhow::Result<Option<Tree>> {
    let edits = Edits { inside: scenario.is_inside(), mutant: Some(mutant.clone()) };
    let mut world = World::open(database, edits).await?;
    let has_shown = |found: &Found| {
        !found.violations.is_empty() || !found.ends.is_subset(&plain.ends) || found.begun() > MORE * plain.begun()
    };
    let found = Search::new(&mut world, scenario).run(has_shown).await;
    let _ = world.close().await;
    match found {
        Ok(found) => Ok((has_shown(&found) || found.ends != plain.ends).then_some(found.tree)),
        Err(error) if error.is::<Stuck>() => Ok(Some(Tree::default())),
        Err(error) => Err(error.context(format!("{mutant:?} in {}", scenario.name))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::{Sent, mistakes};

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// What is wrong with these lines of a statement that has the edits a, b and c.
    fn wrong(lines: &[&str]) -> Vec<String> {
        let record = BTreeMap::from([("claim".to_owned(), set(lines))]);
        let sent = Sent::from([("two", BTreeSet::from(["claim"])), ("sweep", BTreeSet::from(["sweep"]))]);
        mistakes(&record, &BTreeMap::from([("claim", set(&["a", "b", "c"]))]), &sent)
    }

    #[test]
    fn each_edit_has_a_line_that_names_what_covers_it_or_is_counted() {
        let right = ["a => found by two", "b => survives: backed by c", "others => 1"];
        assert_eq!(wrong(&right), [""; 0]);
        assert_eq!(wrong(&["a => found by two", "b => survives: no plan: tests/layout.rs", "others => 1"]), [""; 0]);
        for (lines, said) in [
            (["a => found by two", "others => 1", ""], "claim: 2 edits have no line, but 1 are known:\n    b\n    c"),
            (
                ["a => found by two", "b => survives: backed by c", ""],
                "claim: 1 edits have no line, but 0 are known:\n    c",
            ),
            (["a => found by three", "others => 2", ""], "claim: a: found by three: this names no scenario"),
            (["a => found by sweep", "others => 2", ""], "claim: a: found by sweep: this scenario never sends the"),
            (["a => survives: cost only", "others => 2", ""], "claim: a: survives: cost only: this names no"),
            (["a => survives: tests/no.rs", "others => 2", ""], "claim: a: survives: tests/no.rs: this names no"),
            (["d => found by two", "others => 3", ""], "claim: d: this edit does not exist any more"),
        ] {
            let wrong = wrong(&lines);
            assert!(wrong.len() == 1 && wrong[0].starts_with(said), "{lines:?}: {wrong:?}");
        }
        assert_eq!(wrong(&[]).len(), 1, "a statement that the list does not name");
    }
}
