//! The trial of the search itself: a scenario has to find each edit of the crate's SQL, or `mutants.txt` beside this
//! crate has a reason why none can.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use sqlx::postgres::PgConnectOptions;

use crate::edits;
use crate::ends::Ends;
use crate::explore::{Found, Search};
use crate::scenarios::{self, Scenario};
use crate::statement::{self, Edits, FUNCTION};
use crate::world::{self, World};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/mutants.txt");
const HEAD: &str = "\
# The edits of each statement, and the scenario that finds each of them, or the reason why none does. The number is a hash
# of the statement. Written by script/interleave --mutants --record, which keeps the reasons.
";
const FOUND: &str = "found by ";
const SURVIVES: &str = "survives: ";
const NO_REASON: &str = "survives: no reason is written";
/// Before what was recorded of an edit whose statement has changed since.
const AGAIN: &str = "again, ";
/// A search that began this many schedules in the cheapest scenarios has not found the edit.
const ENOUGH: usize = 12_000;
/// How many times as many schedules as without the edit a scenario may take. More show that calls do more than before.
const MORE: usize = 3;

/// The statements that were sent, by name, and the functions of the schema. A name may have more than one text.
pub(crate) type Sql = BTreeMap<String, BTreeSet<String>>;

/// A scenario that was searched without an edit.
pub(crate) struct Searched {
    pub(crate) name: String,
    /// The names of what it sent.
    pub(crate) sent: BTreeSet<String>,
    /// How many schedules it began.
    pub(crate) begun: usize,
}

/// One edit of one statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mutant {
    statement: String,
    edit: String,
}

impl Mutant {
    /// The edited text of this statement, if it has what the edit takes away.
    pub(crate) fn apply(&self, name: &str, sql: &str) -> Option<String> {
        if name != self.statement {
            return None;
        }
        edits::of(sql).into_iter().find(|edit| edit.name == self.edit).map(|edit| edit.apply(sql))
    }
}

/// What is recorded: the hash of each statement, and what became of its edits.
#[derive(Debug, Default)]
struct Book(BTreeMap<String, (String, BTreeMap<String, String>)>);

impl Book {
    fn read() -> Self {
        let mut book = Self::default();
        let mut statement = String::new();
        let text = std::fs::read_to_string(PATH).unwrap_or_default();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            if let Some((edit, fate)) = line.strip_prefix("    ").and_then(|line| line.split_once(" => ")) {
                book.0.entry(statement.clone()).or_default().1.insert(edit.to_owned(), fate.to_owned());
            } else if let Some((name, hash)) = line.rsplit_once(' ') {
                statement = name.to_owned();
                book.0.entry(statement.clone()).or_default().0 = hash.to_owned();
            }
        }
        book
    }

    fn write(&self) -> anyhow::Result<()> {
        let mut text = HEAD.to_owned();
        for (statement, (hash, fates)) in self.0.iter().filter(|(_, (_, fates))| !fates.is_empty()) {
            writeln!(text, "\n{statement} {hash}")?;
            fates.iter().try_for_each(|(edit, fate)| writeln!(text, "    {edit} => {fate}"))?;
        }
        Ok(std::fs::write(PATH, text)?)
    }

    /// Makes the edits those of this SQL. New ones, and those of a statement that has changed, are to be tried.
    fn renew(&mut self, sql: &Sql) {
        let mut before = std::mem::take(&mut self.0);
        for (statement, texts) in sql {
            let (hash, mut fates) = before.remove(statement).unwrap_or_default();
            let now = self.0.entry(statement.clone()).or_default();
            now.0 = fingerprint(texts);
            for edit in names(texts) {
                let fate = fates.remove(&edit).unwrap_or_else(|| NO_REASON.to_owned());
                let again = (hash != now.0 || fate == NO_REASON) && !fate.starts_with(AGAIN);
                now.1.insert(edit, if again { format!("{AGAIN}{fate}") } else { fate });
            }
        }
    }

    fn each(&self) -> impl Iterator<Item = (Mutant, &str)> {
        self.0.iter().flat_map(|(statement, (_, fates))| {
            let mutant = |edit: &String| Mutant { statement: statement.clone(), edit: edit.clone() };
            fates.iter().map(move |(edit, fate)| (mutant(edit), &**fate))
        })
    }

    /// How many edits of this statement the scenario finds.
    fn finds(&self, statement: &str, scenario: &str) -> usize {
        let fates = self.0.get(statement).into_iter().flat_map(|(_, fates)| fates.values());
        fates.filter(|fate| fate.ends_with(&format!("{FOUND}{scenario}"))).count()
    }
}

fn names(texts: &BTreeSet<String>) -> BTreeSet<String> {
    texts.iter().flat_map(|sql| edits::of(sql)).map(|edit| edit.name).collect()
}

/// FNV-1a of the texts without comments and line breaks.
fn fingerprint(texts: &BTreeSet<String>) -> String {
    let plain: BTreeSet<String> = texts.iter().map(|sql| statement::plain(sql)).collect();
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    format!("{:08x}", plain.iter().flat_map(|sql| sql.bytes()).fold(0x811c_9dc5, step))
}

/// What is wrong with the list for this SQL, without trying an edit.
pub(crate) fn check(sql: &Sql) -> Vec<String> {
    let book = Book::read();
    let is_known =
        |statement: &str, edit: &str| book.0.get(statement).is_some_and(|(_, fates)| fates.contains_key(edit));
    let edits = sql.iter().flat_map(|(statement, texts)| names(texts).into_iter().map(move |edit| (statement, edit)));
    let mut wrong: Vec<String> = edits
        .filter(|(statement, edit)| !is_known(statement, edit))
        .map(|(statement, edit)| format!("{statement}: {edit}: mutants.txt does not list this edit"))
        .collect();
    for (Mutant { statement, edit }, fate) in book.each() {
        if !sql.get(&statement).is_some_and(|texts| names(texts).contains(&edit)) {
            wrong.push(format!("{statement}: {edit}: this edit does not exist any more"));
        } else if fate == NO_REASON
            || fate.starts_with(AGAIN)
            || !(fate.starts_with(FOUND) || fate.starts_with(SURVIVES))
        {
            wrong.push(format!("{statement}: {edit}: no scenario is known to find it, and no reason is written"));
        }
    }
    wrong
}

/// Tries each edit in the scenario that is written down for it. Returns how many were not found.
pub(crate) fn hold(server: &PgConnectOptions, ends: &Ends, searched: &[Searched]) -> anyhow::Result<usize> {
    let book = Book::read();
    let finder = |fate: &str| searched.iter().find(|one| fate.strip_prefix(FOUND) == Some(&*one.name));
    let trials: Vec<_> = book.each().filter_map(|(mutant, fate)| Some((mutant, finder(fate)?))).collect();
    let tried = trials.len();
    let found = crate::share(server, "trial", trials, async |database, (mutant, finder)| {
        let found = find(database, ends, &mutant, &[finder]).await;
        if !matches!(found, Ok(Some(_))) {
            println!("{}: {}: {} does not find it any more: {found:?}", mutant.statement, mutant.edit, finder.name);
        }
        matches!(found, Ok(Some(_)))
    })?;
    let found = found.into_iter().filter(|found| *found).count();
    println!("{tried} mutants, {found} found");
    Ok(tried - found)
}

/// Tries every edit that is new, or whose statement has changed, and has no reason yet. The list is written after each, so
/// this can be stopped, and goes on where it was.
pub(crate) fn record(server: &PgConnectOptions, ends: &Ends, sql: &Sql, searched: &[Searched]) -> anyhow::Result<()> {
    let mut book = Book::read();
    book.renew(sql);
    book.write()?;
    let trials: Vec<_> =
        book.each().filter_map(|(mutant, fate)| Some((mutant, fate.strip_prefix(AGAIN)?.to_owned()))).collect();
    let total = trials.len();
    let book = Mutex::new((book, 0));
    let lock = || book.lock().unwrap_or_else(PoisonError::into_inner);
    let written = crate::share(server, "trial", trials, async |database, (mutant, before)| {
        // The cheapest scenario first, and sooner if it finds other edits of this statement.
        let mut candidates: Vec<&Searched> =
            searched.iter().filter(|one| one.sent.contains(&mutant.statement)).collect();
        let is_finder = |one: &Searched| before.strip_prefix(FOUND) == Some(&*one.name);
        candidates.sort_by_cached_key(|one| {
            (!is_finder(one), one.begun * 8 / (1 + lock().0.finds(&mutant.statement, &one.name)))
        });
        let mut begun = 0;
        candidates.retain(|one| {
            begun += one.begun;
            begun <= ENOUGH || begun == one.begun
        });
        let found = find(database, ends, &mutant, &candidates).await;
        let fate = match &found {
            Ok(Some(name)) => format!("{FOUND}{name}"),
            Ok(None) if before.starts_with(SURVIVES) => before,
            Ok(None) => NO_REASON.to_owned(),
            Err(error) => format!("{AGAIN}{error:#}"),
        };
        let (book, tried) = &mut *lock();
        *tried += 1;
        println!("{tried} of {total}: {}: {} => {fate}", mutant.statement, mutant.edit);
        if let Some((_, fates)) = book.0.get_mut(&mutant.statement) {
            fates.insert(mutant.edit, fate);
        }
        book.write()
    })?;
    written.into_iter().collect()
}

/// The first of these scenarios in which the edit shows.
async fn find(
    database: &PgConnectOptions,
    ends: &Ends,
    mutant: &Mutant,
    candidates: &[&Searched],
) -> anyhow::Result<Option<String>> {
    let function = match mutant.statement.strip_prefix(FUNCTION) {
        Some(name) => Some(world::function(database, name).await?),
        None => None,
    };
    if let Some(original) = &function {
        let edited = mutant.apply(&mutant.statement, original).unwrap_or_default();
        // The server refuses some edits.
        if world::define(database, &edited).await.is_err() {
            return Ok(None);
        }
    }
    let scenarios = scenarios::all();
    let mut finder = None;
    for one in candidates {
        let Some(scenario) = scenarios.iter().find(|scenario| scenario.name == one.name) else { continue };
        // Twice, because a busy machine may keep actors from coming to rest, too.
        let most = MORE * one.begun;
        if shows(database, ends, mutant, scenario, most).await && shows(database, ends, mutant, scenario, most).await {
            finder = Some(one.name.clone());
            break;
        }
    }
    if let Some(original) = &function {
        world::define(database, original).await?;
    }
    Ok(finder)
}

/// Whether the search finds something with this edit. Actors that come to no rest, and many more schedules than without
/// the edit, show it too.
async fn shows(database: &PgConnectOptions, ends: &Ends, mutant: &Mutant, scenario: &Scenario, most: usize) -> bool {
    let edits = Edits { inside: scenario.inside, mutant: Some(mutant.clone()) };
    let Ok(mut world) = World::open(database, edits).await else { return false };
    let begun = |found: &Found| found.schedules + found.merged;
    let is_new = |found: &Found| !found.violations.is_empty() || ends.is_new(&scenario.name, &found.ends);
    let found = Search::new(&mut world, scenario).run(|found| is_new(found) || begun(found) > most).await;
    let _ = world.close().await;
    found.map_or(true, |found| {
        is_new(&found) || begun(&found) > most || !ends.others(&scenario.name, &found.ends).is_empty()
    })
}
