//! The trial of the search itself: it has to find each edit of the crate's SQL.

use std::collections::BTreeMap;

use sqlx::postgres::PgConnectOptions;

use crate::ends::Ends;
use crate::explore::{Found, Search};
use crate::mutants::{self, Fates, Mutant, NO_REASON};
use crate::scenarios::{self, Scenario};
use crate::statement::Edits;
use crate::threads;
use crate::world::{self, World};

/// The longest search for a mutant, in schedules.
const LONGEST: usize = 45;
/// How many times as many schedules an edited statement may take. More show that calls do more than before.
const MORE: usize = 3;
const FUNCTION: &str = "function ";

/// A scenario that was searched without an edit.
pub(crate) struct Searched {
    pub(crate) name: String,
    /// The statements that it sent.
    pub(crate) texts: BTreeMap<String, &'static str>,
    /// How many schedules it began.
    pub(crate) begun: usize,
}

/// Tries every edit in the scenario that is written down for it; or, to record, in all that send the statement, until one
/// finds it. Returns how many were not found and have no reason, or are not written down.
pub(crate) fn hold(
    server: &PgConnectOptions,
    ends: &Ends,
    mut searched: Vec<Searched>,
    record: bool,
) -> anyhow::Result<usize> {
    searched.sort_by_key(|one| one.begun);
    let fates = Fates::read();
    let mutants = all(server, &searched)?;
    let mut trials = Vec::new();
    for mutant in mutants {
        let known = fates.finder(&mutant.label);
        let is_candidate = |one: &&Searched| match known {
            Some(finder) if !record => one.name == finder,
            finder => finder == Some(&one.name) || one.begun < LONGEST && uses(one, &mutant),
        };
        let of = |one: &Searched| (one.name.clone(), MORE * one.begun);
        let mut candidates: Vec<(String, usize)> = searched.iter().filter(is_candidate).map(of).collect();
        // The one that found it last time comes first.
        candidates.sort_by_key(|(name, _)| Some(name.as_str()) != known);
        let excused =
            fates.get(&mutant.label).is_some_and(|fate| fates.finder(&mutant.label).is_none() && fate != NO_REASON);
        trials.push((mutant, candidates, excused && !record));
    }
    let tried = threads::share(server, "trial", trials, async |database, (mutant, candidates, excused)| {
        let finder = if excused { Ok(None) } else { find(database, ends, &mutant, &candidates).await };
        if record {
            println!("{} => {finder:?} of {}", mutant.label, candidates.len());
        }
        (mutant.label, excused, finder)
    })?;
    let mut finders = BTreeMap::new();
    let mut violations = 0;
    for (label, excused, finder) in tried {
        if let Err(error) = &finder {
            println!("{label}: {error:#}");
            violations += 1;
        }
        let finder = finder.ok().flatten();
        if finder.is_none() && !excused && !record {
            println!("{label}: no scenario finds it, and no reason is written");
            violations += 1;
        }
        finders.insert(label, finder);
    }
    if record {
        Fates::write(&finders)?;
    } else {
        for label in fates.stale(&finders) {
            println!("{label}: this edit does not exist any more");
            violations += 1;
        }
    }
    let found = finders.values().filter(|finder| finder.is_some()).count();
    println!("{} mutants, {found} found, {} survive", finders.len(), finders.len() - found);
    Ok(violations)
}

/// Whether the scenario sends the statement.
fn uses(searched: &Searched, mutant: &Mutant) -> bool {
    match mutant.label.strip_prefix(FUNCTION) {
        Some(function) => {
            let call = format!("idempotency.{}(", function.split(':').next().unwrap_or_default());
            // The option that calls the others sends texts that are not prepared.
            searched.texts.keys().any(|text| text.contains(&call)) || searched.name.contains("fewest")
        }
        None => searched.texts.contains_key(&mutant.original),
    }
}

fn all(server: &PgConnectOptions, searched: &[Searched]) -> anyhow::Result<Vec<Mutant>> {
    let mut mutants: BTreeMap<String, Mutant> = BTreeMap::new();
    let mut add = |found: Vec<Mutant>| {
        for mut mutant in found {
            while mutants.get(&mutant.label).is_some_and(|other| *other != mutant) {
                mutant.label.push('\'');
            }
            mutants.insert(mutant.label.clone(), mutant);
        }
    };
    let texts: BTreeMap<&String, &str> =
        searched.iter().flat_map(|one| &one.texts).map(|(sql, name)| (sql, *name)).collect();
    texts.into_iter().filter(|(_, name)| !name.is_empty()).for_each(|(sql, name)| add(mutants::of(name, sql)));
    let functions = threads::runtime()?
        .block_on(async { world::functions(&world::create_database(server, "functions").await?).await })?;
    functions.iter().for_each(|(name, sql)| add(mutants::of(&format!("{FUNCTION}{name}"), sql)));
    Ok(mutants.into_values().collect())
}

/// The first of these scenarios in which the edit shows.
async fn find(
    database: &PgConnectOptions,
    ends: &Ends,
    mutant: &Mutant,
    candidates: &[(String, usize)],
) -> anyhow::Result<Option<String>> {
    let is_function = mutant.label.starts_with(FUNCTION);
    if is_function {
        world::define(database, &mutant.edited).await?;
    }
    let scenarios = scenarios::all();
    let mut finder = None;
    for (name, most) in candidates {
        let Some(scenario) = scenarios.iter().find(|scenario| scenario.name == *name) else { continue };
        let found = search(database, ends, mutant, is_function, scenario, *most).await;
        if found.is_none_or(|found| !found.violations.is_empty() || !ends.others(name, &found.ends).is_empty()) {
            finder = Some(name.clone());
            break;
        }
    }
    if is_function {
        world::define(database, &mutant.original).await?;
    }
    Ok(finder)
}

/// What the search finds with this edit. Nothing if the actors come to no rest, or need many more schedules than without
/// the edit: both show it.
async fn search(
    database: &PgConnectOptions,
    ends: &Ends,
    mutant: &Mutant,
    is_function: bool,
    scenario: &Scenario,
    most: usize,
) -> Option<Found> {
    let edit = (!is_function).then(|| (mutant.original.clone(), mutant.edited.clone()));
    let mut world = World::open(database, Edits { inside: scenario.inside, mutant: edit }).await.ok()?;
    let begun = |found: &Found| found.schedules + found.merged;
    let shows = |found: &Found| !found.violations.is_empty() || ends.is_new(&scenario.name, &found.ends);
    let found = Search::new(&mut world, scenario).run(|found| shows(found) || begun(found) > most).await.ok();
    let found = found.filter(|found| begun(found) <= most);
    let _ = world.close().await;
    found
}
