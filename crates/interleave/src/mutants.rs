//! The trial of the search itself: a scenario has to find each edit of the crate's SQL, or `mutants.txt` beside this
//! crate has a reason why none can.

use std::collections::{BTreeMap, BTreeSet};

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
const NO_REASON: &str = "survives: no reason is written";
/// A search that began this many schedules in the cheapest scenarios has not found the edit.
const ENOUGH: usize = 12_000;
/// How many times as many schedules as without the edit a scenario may take. More show that calls do more than before.
const MORE: usize = 3;

/// A scenario, and what its search without an edit has found.
pub(crate) type Searched = (Scenario, Found);

/// What became of each edit, by the edit's name.
fn fates<'r>(record: &'r Record, statement: &str) -> BTreeMap<&'r str, &'r str> {
    record.get(statement).into_iter().flatten().filter_map(|line| line.split_once(" => ")).collect()
}

fn edits(texts: &BTreeSet<String>) -> BTreeSet<String> {
    texts.iter().flat_map(|sql| edits::of(sql)).map(|edit| edit.name).collect()
}

/// What is wrong with the list for this SQL, without trying an edit.
pub(crate) fn check(sql: &Sql) -> anyhow::Result<Vec<String>> {
    let record = record::read(FILE)?;
    let mut wrong = Vec::new();
    for statement in sql.keys().chain(record.keys()).collect::<BTreeSet<_>>() {
        let edits = sql.get(statement).map(edits).unwrap_or_default();
        let fates = fates(&record, statement);
        let new = edits.iter().filter(|edit| !fates.contains_key(&***edit));
        wrong.extend(new.map(|edit| format!("{statement}: {edit}: mutants.txt does not list this edit")));
        for (edit, fate) in fates {
            if !edits.contains(edit) {
                wrong.push(format!("{statement}: {edit}: this edit does not exist any more"));
            } else if fate == NO_REASON || !(fate.starts_with(FOUND) || fate.starts_with(SURVIVES)) {
                wrong.push(format!("{statement}: {edit}: no scenario is known to find it, and no reason is written"));
            }
        }
    }
    Ok(wrong)
}

/// Tries each edit of the statements with this in their names, in the scenario that is written down for it. Returns how
/// many were not found, and the traces of the others.
pub(crate) fn hold(
    databases: &[PgConnectOptions],
    name: &str,
    searched: &[Searched],
) -> anyhow::Result<(usize, Module)> {
    let record = record::read(FILE)?;
    let mut trials = Vec::new();
    for statement in record.keys().filter(|statement| statement.contains(name)) {
        for (edit, fate) in fates(&record, statement) {
            let finder = searched.iter().find(|(scenario, _)| fate.strip_prefix(FOUND) == Some(&*scenario.name));
            trials.extend(finder.map(|finder| (mutant(statement, edit), finder)));
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

/// Tries every edit of the statements with this in their names; without a name, of those whose edits are not those that
/// are listed. The list is written after each statement.
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
        let is_listed = edits.iter().map(|edit| &**edit).eq(before.keys().copied());
        if !statement.contains(name) || name.is_empty() && is_listed {
            continue;
        }
        let lines = share(databases, edits.into_iter().collect(), async |database, edit| {
            let fate = before.get(&*edit).copied().unwrap_or(NO_REASON);
            let found = find(database, &mutant(statement, &edit), &candidates(statement, fate, searched)).await?;
            let fate = match found {
                Some((finder, _)) => format!("{FOUND}{finder}"),
                None if fate.starts_with(SURVIVES) => fate.to_owned(),
                None => NO_REASON.to_owned(),
            };
            println!("{statement}: {edit} => {fate}");
            anyhow::Ok(format!("{edit} => {fate}"))
        })?;
        record.insert(statement.clone(), lines.into_iter().collect::<anyhow::Result<_>>()?);
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
