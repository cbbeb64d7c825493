//! The search through every order of the messages of a scenario: depth first, and each schedule from the start.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{Hash as _, Hasher as _};

use crate::actors;
use crate::edits::Sql;
use crate::scenarios::{Scenario, With};
use crate::statement;
use crate::trace::{Seen, Step, Tree};
use crate::words::letter;
use crate::world::{Choice, Sight, Stuck, World};

/// The most steps of a schedule. A call that does not end takes more.
const LONGEST: usize = 200;

/// What a search has found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) schedules: usize,
    /// Schedules that reached a state that an earlier one had reached, and were left there.
    pub(crate) merged: usize,
    /// How the schedules ended.
    pub(crate) ends: BTreeSet<String>,
    /// What must not be, with the first schedule that showed it.
    pub(crate) violations: BTreeMap<String, String>,
    /// The statements that were sent.
    pub(crate) sql: Sql,
    /// What the actors sent and heard in each schedule, and what was committed.
    pub(crate) tree: Tree,
}

impl Found {
    /// How many schedules began.
    pub(crate) fn begun(&self) -> usize {
        self.schedules + self.merged
    }

    /// The ends that are new, and those that were not reached.
    pub(crate) fn others(&self, recorded: Option<&BTreeSet<String>>) -> Vec<String> {
        let nothing = BTreeSet::new();
        let recorded = recorded.unwrap_or(&nothing);
        let new = self.ends.difference(recorded).map(|end| format!("a new end: {end}"));
        let missing = recorded.difference(&self.ends).map(|end| format!("no schedule ends so: {end}"));
        new.chain(missing).collect()
    }
}

/// A state on the way to the present one.
struct Node {
    choices: Vec<Choice>,
    at: usize,
    /// What led here.
    step: Step,
}

pub(crate) struct Search<'w> {
    world: &'w mut World,
    scenario: &'w Scenario,
    path: Vec<Node>,
    states: HashSet<u64>,
    pub(crate) found: Found,
}

impl<'w> Search<'w> {
    pub(crate) fn new(world: &'w mut World, scenario: &'w Scenario) -> Self {
        Self { world, scenario, path: Vec::new(), states: HashSet::new(), found: Found::default() }
    }

    /// Runs every schedule, or as many as `enough` asks for.
    pub(crate) async fn run(mut self, enough: impl Fn(&Found) -> bool) -> anyhow::Result<Found> {
        loop {
            self.play().await?;
            if enough(&self.found) {
                return Ok(self.found);
            }
            while let Some(mut node) = self.path.pop() {
                node.at += 1;
                if node.at < node.choices.len() {
                    self.path.push(node);
                    break;
                }
            }
            if self.path.is_empty() {
                self.found.sql = self.world.sql().await?;
                return Ok(self.found);
            }
        }
    }

    /// Runs one schedule, and goes on with the first choices. Returns its trace.
    pub(crate) async fn run_one(mut self, schedule: &str) -> anyhow::Result<(String, Found)> {
        let mut letters = schedule.chars();
        while let Some(kind) = letters.next() {
            let actor = if kind.is_ascii_lowercase() { letters.next().unwrap_or('A') } else { kind };
            let actor = usize::from(actor as u8 - b'A');
            let choice = match kind {
                'l' => Choice::GoLeft(actor),
                'a' => Choice::Leave(actor),
                't' => Choice::TimeOut(actor),
                'd' => Choice::Drop(actor),
                'k' => Choice::Kill(actor),
                _ => Choice::Go(actor),
            };
            self.path.push(Node { choices: vec![choice], at: 0, step: Step::default() });
        }
        let trace = self.play().await?;
        Ok((trace.to_string(), self.found))
    }

    /// One schedule: the choices of the path, and then the first of each new state.
    async fn play(&mut self) -> anyhow::Result<Trace> {
        self.world.begin(self.scenario).await?;
        let mut trace = Trace::default();
        let mut faulty = false;
        let mut last = None;
        let mut answered = BTreeSet::new();
        for depth in 0..LONGEST {
            self.world.come_to_rest().await?;
            self.offer_time_out(last, depth);
            let fresh = self.fresh_answers(&mut answered);
            if self.world.has_ended() {
                self.found.schedules += 1;
                let sight = self.world.look().await?;
                self.check_on_the_way(&sight, &fresh, &trace);
                self.check_end(&sight, &trace).await?;
                let step = self.step(last, &sight);
                self.check_take_over(&step, depth, &trace);
                self.note(step);
                return Ok(trace);
            }
            if depth == self.path.len() {
                let sight = self.world.look().await?;
                self.check_on_the_way(&sight, &fresh, &trace);
                let step = self.step(last, &sight);
                self.check_take_over(&step, depth, &trace);
                let mut state = DefaultHasher::new();
                (self.world.state(&sight), faulty).hash(&mut state);
                if !self.scenario.has(With::Unmerged) && !self.states.insert(state.finish()) {
                    self.found.merged += 1;
                    self.note(step);
                    self.world.run_free().await?;
                    return Ok(trace);
                }
                let choices = self.world.choices(self.scenario, faulty);
                anyhow::ensure!(!choices.is_empty(), Stuck(format!("nobody can go on after {trace}")));
                self.path.push(Node { choices, at: 0, step });
            } else {
                self.world.board.lock().events.clear();
            }
            let choice = self.path[depth].choices[self.path[depth].at];
            faulty |= matches!(choice, Choice::Drop(_) | Choice::Leave(_) | Choice::Kill(_));
            let name = self.world.apply(choice).await.map_err(|error| error.context(format!("after {trace}")))?;
            trace.push(choice, name);
            last = Some(choice);
        }
        anyhow::bail!(Stuck(format!("no end after {trace}")))
    }

    /// What has happened since the last state.
    fn step(&self, last: Option<Choice>, sight: &Sight) -> Step {
        let killed = if let Some(Choice::Kill(actor)) = last { Some(actor) } else { None };
        let chosen = if let Some(Choice::Go(actor) | Choice::GoLeft(actor) | Choice::Drop(actor)) = last {
            Some(actor)
        } else {
            None
        };
        let mut board = self.world.board.lock();
        let told = board.players.iter().map(|player| player.answer.clone().or(player.end.clone())).collect();
        let mut events = std::mem::take(&mut board.events);
        // The others waited for this message, and their answers may arrive before its own.
        events.sort_by_key(|event| Some(event.actor()) != chosen);
        Step { events, killed, told, seen: sight.seen.clone(), holders: sight.holders.clone() }
    }

    /// Adds this schedule to the tree of traces.
    fn note(&mut self, last: Step) {
        let steps = self.path.iter().map(|node| &node.step).chain([&last]);
        self.found.tree.add(steps);
    }

    /// The actors whose calls have returned since the last step.
    fn fresh_answers(&self, answered: &mut BTreeSet<usize>) -> Vec<usize> {
        let board = self.world.board.lock();
        let with_answer = |at: &usize| board.players[*at].answer.is_some() || board.players[*at].end.is_some();
        (0..board.players.len()).filter(with_answer).filter(|&at| answered.insert(at)).collect()
    }

    /// A wait that began with the last step may also end by its limit.
    fn offer_time_out(&mut self, last: Option<Choice>, depth: usize) {
        let Some(Choice::Go(actor)) = last.filter(|_| !self.scenario.has(With::Patient)) else { return };
        let waits = self.world.waits();
        if waits.iter().any(|(waiting, name, _)| *waiting == actor && name == statement::AWAIT) {
            let node = &mut self.path[depth - 1];
            if !node.choices.contains(&Choice::TimeOut(actor)) {
                node.choices.push(Choice::TimeOut(actor));
            }
        }
    }

    fn violation(&mut self, what: String, trace: &Trace) {
        self.found.violations.entry(what).or_insert_with(|| trace.to_string());
    }

    /// What holds in every state.
    fn check_on_the_way(&mut self, sight: &Sight, fresh: &[usize], trace: &Trace) {
        for (actor, name, by) in self.world.waits() {
            let is_known = self.scenario.may_wait_inside(&name);
            if !statement::may_wait(&name) && !is_known {
                let by: String = by.into_iter().map(letter).collect();
                self.violation(format!("{} {name} waits for {by}", letter(actor)), trace);
            }
        }
        let answers: Vec<Option<String>> = {
            let board = self.world.board.lock();
            board.players.iter().map(|player| player.answer.clone().or(player.end.clone())).collect()
        };
        // A call that has not returned may yet perform, and one that has failed has the key until its rollback.
        let idle = ["replayed", "duplicate", "InFlight", "KeyReused", "OtherMode"];
        let performs = |actor: &usize| {
            let answer = answers[*actor].as_deref().unwrap_or_default();
            !idle.iter().any(|idle| answer.starts_with(idle))
        };
        // Inside, a claim or a look may have tried the lock by an older snapshot.
        if !self.scenario.has(With::ManyKeys) && !self.scenario.is_inside() {
            for holder in sight.holders.iter().filter(|holder| !performs(holder)) {
                let answer = answers[*holder].as_deref().unwrap_or_default();
                if sight.response_is_live || answer == "OtherMode" {
                    self.violation(format!("{} {answer}, and holds the key's lock in vain", letter(*holder)), trace);
                }
            }
        }
        for &actor in fresh.iter().filter(|&&actor| answers[actor].as_deref() == Some("InFlight")) {
            let somebody = sight.holders.iter().any(|holder| *holder != actor && performs(holder));
            if !somebody && !sight.lease_is_live && !self.scenario.has(With::GivesUp) {
                self.violation(format!("{} is told *in flight*, and nobody performs", letter(actor)), trace);
            }
        }
    }

    /// No call takes over what was committed under a live lease, with a response or with a step in doubt. The ends do
    /// not show this: an owner that is overtaken ends as one whose lease has lapsed.
    fn check_take_over(&mut self, step: &Step, depth: usize, trace: &Trace) {
        let before = depth.checked_sub(1).and_then(|before| self.path[before].step.seen.as_ref());
        let Some(kept) = before.and_then(Seen::is_kept) else { return };
        if let Some(event) = step.events.iter().find(|event| event.takes_over()) {
            self.violation(format!("{} takes over a record with {kept}", letter(event.actor())), trace);
        }
    }

    async fn check_end(&mut self, sight: &Sight, trace: &Trace) -> anyhow::Result<()> {
        let ends: Vec<String> = {
            let board = self.world.board.lock();
            board.players.iter().map(|player| player.end.clone().unwrap_or_default()).collect()
        };
        for holder in &sight.holders {
            self.violation(format!("{} has ended and still holds a lock", letter(*holder)), trace);
        }
        let (unlike, works) = (self.scenario.has(With::Unlike), self.scenario.has(With::Works));
        if sight.bystander_is_hurt {
            self.violation("the record of another key has changed".to_owned(), trace);
        }
        let mut told = Vec::new();
        for (at, end) in ends.iter().enumerate() {
            if !end.is_empty() {
                told.push(format!("{} {end}", letter(at)));
            }
            let of = |who: &str| sight.effects.iter().any(|(what, by)| what.is_empty() && by == who);
            if let Some(response) = end.strip_prefix("replayed ").and_then(|response| response.get(..1))
                && !unlike
                && !of(response)
                && ![actors::EARLIER, actors::OPERATORS].contains(&response)
            {
                self.violation(format!("{} {end}, and this effect is not there", letter(at)), trace);
            }
            let performed = end.starts_with("performed") && !end.contains("rolls back");
            let is_known = !end.starts_with("is ") && !end.starts_with("fails");
            if !unlike && !works && is_known && performed != of(&letter(at).to_string()) {
                self.violation(format!("{} {end}, and its effect is {}", letter(at), !performed), trace);
            }
            if end.starts_with("fails") && !self.scenario.has(With::Kills(at)) {
                self.violation(format!("{} {end}", letter(at)), trace);
            }
            if end.contains("unusable") {
                self.violation(format!("{} {end}", letter(at)), trace);
            }
        }
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        sight.effects.iter().for_each(|(what, _)| *counts.entry(what).or_default() += 1);
        for (what, count) in counts {
            if count > self.scenario.most_effects() {
                self.violation(format!("the effect {what:?} is there {count} times"), trace);
            }
        }
        let there: Vec<String> = sight.effects.iter().map(|(what, who)| format!("{who}{what}")).collect();
        let left = actors::left(&self.world.operators, &mut self.world.monitor, &self.world.key).await?;
        let end = format!("{} | effects {} | {left}", told.join(", "), there.join(" "));
        self.found.ends.insert(end);
        Ok(())
    }
}

/// The steps of a schedule, for people, and as letters for `SCHEDULE`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    letters: String,
    steps: Vec<String>,
}

impl Trace {
    fn push(&mut self, choice: Choice, name: String) {
        let (prefix, actor) = match choice {
            Choice::Go(actor) => ("", actor),
            Choice::GoLeft(actor) => ("l", actor),
            Choice::Leave(actor) => ("a", actor),
            Choice::TimeOut(actor) => ("t", actor),
            Choice::Drop(actor) => ("d", actor),
            Choice::Kill(actor) => ("k", actor),
        };
        self.letters.push_str(&format!("{prefix}{}", letter(actor)));
        self.steps.push(name);
    }
}

impl std::fmt::Display for Trace {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "SCHEDULE={}  {}", self.letters, self.steps.join("; "))
    }
}
