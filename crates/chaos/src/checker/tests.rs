//! The checker against histories made by hand: a good one passes, and each bad one is seen. A checker that sees nothing
//! would pass every fault.

use super::leases::{Promise, check};
use super::steps::{CHARGE, Checked, OVERTAKEN, Part, ROW, TEXT};
use super::{Aftermath, Effect, Stored, histories, lost, marks, register, steps, violations};
use crate::history::{Event, What, calls};

/// A world with one key in it.
#[derive(Default)]
struct World {
    events: Vec<Event>,
    after: Aftermath,
    parts: Vec<Part>,
}

impl World {
    fn then(mut self, call: &str, what: What) -> Self {
        let at = self.events.len() as u64;
        self.events.push(Event { at, call: call.to_owned(), key: "k".to_owned(), what });
        self
    }

    fn invoked(self, call: &str) -> Self {
        self.then(call, What::Invoked)
    }

    fn performed(self, call: &str) -> Self {
        self.then(call, What::Performed(call.to_owned()))
    }

    fn replayed(self, call: &str, response: &str) -> Self {
        self.then(call, What::Replayed(response.to_owned()))
    }

    fn effect(mut self, call: &str) -> Self {
        let downstream_key = Some("downstream".to_owned());
        self.after.effects.push(Effect { key: "k".to_owned(), call: call.to_owned(), downstream_key });
        self
    }

    fn part(mut self, step: &str, call: &str) -> Self {
        let downstream_key = (step != ROW).then(|| "downstream".to_owned());
        self.parts.push(Part { key: "k".to_owned(), call: call.to_owned(), step: step.to_owned(), downstream_key });
        self
    }

    fn stored(mut self, token: i64, response: Option<&str>) -> Self {
        let (completed, response) = (response.is_some(), response.map(str::to_owned));
        self.after.records.push(Stored { key: "k".to_owned(), token, completed, response });
        self
    }

    fn marked(mut self) -> Self {
        self.after.records.push(Stored { key: "k".to_owned(), token: 1, completed: true, response: None });
        self
    }

    #[track_caller]
    fn passes(self) {
        assert_eq!(violations(&calls(&self.events), &self.after), [""; 0]);
    }

    #[track_caller]
    fn must_be_caught(self, by: &str) {
        let found = violations(&calls(&self.events), &self.after);
        assert!(found.iter().any(|violation| violation.contains(by)), "not caught by {by:?}: {found:?}");
    }

    fn checked_steps(&self) -> Checked {
        steps::check(&calls(&self.events), &self.after, &self.parts)
    }

    /// Whether the answers are those of a register that is written once.
    #[track_caller]
    fn is_a_register(&self) -> bool {
        let checked = register::check(&calls(&self.events));
        assert_eq!((checked.histories, checked.left_out), (1, 0));
        checked.violations.is_empty()
    }

    #[track_caller]
    fn step_must_be_caught(self, by: &str) {
        let found = self.checked_steps().violations;
        assert!(found.iter().any(|violation| violation.contains(by)), "not caught by {by:?}: {found:?}");
    }

    #[track_caller]
    fn lease_must_be_caught(self, promise: Promise, by: &str) {
        let found = check(&calls(&self.events), &self.after, promise).violations;
        assert!(found.iter().any(|violation| violation.contains(by)), "not caught by {by:?}: {found:?}");
    }
}

fn once() -> World {
    World::default().invoked("a").performed("a").effect("a").stored(1, Some("a"))
}

#[test]
fn what_happened_once_and_was_replayed_passes() {
    once().passes();
    once().invoked("b").replayed("b", "a").passes();
    once().invoked("b").then("b", What::Refused("in flight".to_owned())).passes();
}

#[test]
fn a_lost_answer_passes_once_a_repeat_has_got_it() {
    let cut = World::default().invoked("a").then("a", What::Unknown("cut".to_owned()));
    cut.invoked("b").replayed("b", "a").effect("a").stored(1, Some("a")).passes();
}

#[test]
fn concurrent_calls_may_be_answered_in_any_order() {
    let both = World::default().invoked("a").invoked("b").replayed("b", "a").performed("a");
    both.effect("a").stored(1, Some("a")).passes();
}

#[test]
fn each_bad_history_is_caught() {
    let asked = || World::default().invoked("a");
    let performed = || asked().performed("a");
    let refused = |why: &str| asked().then("a", What::Refused(why.to_owned()));
    let wrong = What::Wrong("indeterminate".to_owned());
    for (by, bad) in [
        ("2 effects", once().effect("b")),
        ("2 effects", once().effect("a")),
        ("which is not there", performed()),
        ("without its response", performed().effect("a")),
        ("without its effect", World::default().stored(1, Some("a"))),
        ("not what is stored", once().invoked("b").replayed("b", "c")),
        ("did not get the response", once().invoked("b").replayed("b", "c")),
        ("got the response of b", asked().then("a", What::Performed("b".to_owned()))),
        ("before it asked", once().invoked("b").performed("b")),
        ("not completed", asked().stored(1, None)),
        ("was refused", refused("asked for").effect("a").stored(1, Some("a"))),
        ("never answered", refused("in flight")),
        ("indeterminate", asked().then("a", wrong)),
        ("2 records", once().stored(2, Some("a"))),
    ] {
        bad.must_be_caught(by);
    }
}

#[test]
fn what_was_lost_is_counted() {
    let gone = World::default().invoked("a").performed("a").invoked("b").replayed("b", "a");
    assert_eq!(lost(&calls(&gone.events), &gone.after), 2);
    let there = once();
    assert_eq!(lost(&calls(&there.events), &there.after), 0);
}

#[test]
fn a_double_outside_is_counted_at_least_once_and_caught_at_most_once() {
    let doubled = || once().effect("b");
    let world = doubled();
    let checked = check(&calls(&world.events), &world.after, Promise::AtLeastOnce);
    assert_eq!((checked.violations.len(), checked.doubles), (0, 1));
    doubled().lease_must_be_caught(Promise::AtMostOnce, "under at most once");
}

#[test]
fn each_bad_history_of_a_mark_is_caught() {
    let performed = || World::default().invoked("a").performed("a");
    let once = || performed().effect("a").marked();
    let found = |world: World| marks::violations(&calls(&world.events), &world.after);
    assert_eq!(found(once().invoked("b").replayed("b", "a")), [""; 0]);
    for (by, bad) in [
        ("2 effects of one mark", once().effect("b")),
        ("which is not there", performed()),
        ("0 effects and 1 marks", World::default().marked()),
    ] {
        let found = found(bad);
        assert!(found.iter().any(|violation| violation.contains(by)), "not caught by {by:?}: {found:?}");
    }
}

#[test]
fn each_bad_history_of_a_lease_is_caught() {
    let performed = || World::default().invoked("a").performed("a").effect("a");
    let stale = World::default().invoked("a").then("a", What::Claimed(7)).performed("a").effect("a");
    let mut another = once().effect("b");
    another.after.effects[1].downstream_key = Some("another".to_owned());
    for (by, bad) in [
        ("has changed", performed().effect("b").stored(2, Some("b"))),
        ("0 results", performed()),
        ("2 completions", once().invoked("b").performed("b").effect("b")),
        ("not the claim's", stale.stored(8, Some("a"))),
        ("2 downstream keys", another),
        ("without an effect", World::default().stored(1, Some("a"))),
    ] {
        bad.lease_must_be_caught(Promise::AtLeastOnce, by);
    }
}

#[test]
fn a_history_for_the_specification_has_each_call_that_matters() {
    let in_flight = || What::Refused("in flight".to_owned());
    let mut world = World::default().invoked("a").invoked("b");
    for caller in ["c", "d", "e", "f"] {
        world = world.invoked(caller).then(caller, in_flight());
    }
    world = world.performed("b").effect("b");
    for caller in ["g", "h", "i"] {
        world = world.invoked(caller).replayed(caller, "b");
    }
    let told = histories::of(Some("transaction"), &calls(&world.events), &world.after, &[]);
    let [history] = &*told.histories else { panic!("not one history: {told:?}") };
    // Neither the first refusal nor the last replay.
    let names = "\"A\", \"B\", \"C\", \"C\", \"D\", \"D\", \"E\", \"E\", \"B\", \"F\", \"F\", \"G\", \"G\"";
    assert!(history.text.ends_with(&format!("events |-> <<{names}>>]")), "{}", history.text);
    for call in
        ["A |-> [end |-> \"unknown\", of |-> \"\"", "B |-> [end |-> \"performed\", of |-> \"B\", effect |-> TRUE"]
    {
        assert!(history.text.contains(call), "{call}: {}", history.text);
    }
    for more in ["j", "k", "l", "m", "n"] {
        world = world.invoked(more);
    }
    // A transaction that was rolled back can only be seen in a refusal.
    let told = histories::of(Some("transaction"), &calls(&world.events), &world.after, &[]);
    assert!(told.histories[0].text.ends_with("events |-> <<\"A\", \"A\", \"B\", \"B\", \"C\", \"C\">>]"));
    let told = histories::of(Some("at_least_once"), &calls(&world.events), &world.after, &[]);
    assert_eq!((told.histories.len(), told.left_out.len()), (0, 1));
}

/// `a` was killed after two steps, and `b` has performed the others.
fn in_steps() -> World {
    let response = || "a a b".to_owned();
    let world = World::default().invoked("a").invoked("b").then("b", What::Performed(response()));
    world.part(ROW, "a").part(CHARGE, "a").part(TEXT, "b").stored(1, Some(&response()))
}

#[test]
fn an_operation_in_steps_passes_and_its_charges_may_repeat_under_one_key() {
    let checked = in_steps().part(CHARGE, "b").checked_steps();
    assert_eq!((checked.violations, checked.deduplicated), (Vec::new(), 1));
}

#[test]
fn a_second_effect_of_a_step_is_caught() {
    in_steps().part(ROW, "b").step_must_be_caught("2 rows");
    in_steps().part(TEXT, "a").step_must_be_caught("2 texts");
    let mut charged = in_steps().part(CHARGE, "b");
    charged.parts[3].downstream_key = Some("another".to_owned());
    charged.step_must_be_caught("2 charges");
}

#[test]
fn a_row_of_an_overtaken_attempt_is_caught() {
    in_steps().part(OVERTAKEN, "b").step_must_be_caught("an overtaken attempt");
}

#[test]
fn a_stored_step_without_its_effect_is_caught() {
    let mut world = in_steps();
    world.parts.pop();
    world.step_must_be_caught("0 texts");
    let mut world = in_steps();
    world.parts[0].call = "b".to_owned();
    world.step_must_be_caught("has no effect");
}

#[test]
fn another_answer_of_an_operation_in_steps_is_caught() {
    in_steps().invoked("c").replayed("c", "a b b").step_must_be_caught("the answer has changed");
    in_steps().invoked("c").then("c", What::Performed("a a b".to_owned())).step_must_be_caught("2 completions");
}

#[test]
fn an_operation_in_steps_without_an_answer_is_caught() {
    let mut world = in_steps();
    world.after.records.clear();
    world.stored(1, None).step_must_be_caught("left unfinished");
    let mut world = in_steps();
    world.after.records.clear();
    world.step_must_be_caught("0 records");
}

#[test]
fn good_answers_are_a_register_that_is_written_once() {
    let unknown = |world: World, call: &str| world.then(call, What::Unknown("cut".to_owned()));
    let asked = || World::default().invoked("a");
    assert!(once().invoked("b").replayed("b", "a").is_a_register());
    assert!(asked().invoked("b").replayed("b", "a").performed("a").is_a_register());
    assert!(unknown(asked(), "a").invoked("b").replayed("b", "a").is_a_register());
    assert!(unknown(asked(), "a").invoked("b").performed("b").invoked("c").replayed("c", "b").is_a_register());
    // The effect of a refused owner is outside, and an operator has resolved its operation.
    let refused = asked().then("a", What::Claimed(1)).then("a", What::Refused("retryable".to_owned()));
    assert!(refused.invoked("b").replayed("b", "a").is_a_register());
}

#[test]
fn bad_answers_are_no_register_that_is_written_once() {
    let unknown = || World::default().invoked("a").then("a", What::Unknown("cut".to_owned()));
    let refused = || World::default().invoked("a").then("a", What::Refused("in flight".to_owned()));
    for bad in [
        // A replay before the write.
        World::default().invoked("b").replayed("b", "a").invoked("a").performed("a"),
        // A replay of a call that did nothing, or that does not exist.
        refused().invoked("b").replayed("b", "a"),
        World::default().invoked("b").replayed("b", "a"),
        // The old state, which another call has replaced.
        unknown().invoked("b").performed("b").invoked("c").replayed("c", "a"),
        unknown().invoked("b").replayed("b", "a").invoked("c").performed("c"),
        // A second write, also at the same time.
        once().invoked("b").performed("b"),
        World::default().invoked("a").invoked("b").performed("a").performed("b"),
    ] {
        assert!(!bad.is_a_register(), "not caught: {:?}", bad.events);
    }
}

/// The other rules compare each answer with the tables, and not with the beginning of the call that gave it.
#[test]
fn only_the_register_sees_an_answer_from_the_future() {
    let early = World::default().invoked("b").replayed("b", "a").invoked("a");
    let early = early.then("a", What::Unknown("cut".to_owned())).effect("a").stored(1, Some("a"));
    assert!(!early.is_a_register());
    early.passes();
}

/// The search would otherwise try each order of all these calls.
#[test]
fn the_search_ends_soon_for_many_calls_at_the_same_time() {
    let asked = (0..40).fold(World::default(), |world, call| world.invoked(&format!("c{call}")));
    let answered = |world: World, call: usize| world.replayed(&format!("c{call}"), &format!("c{}", call % 2));
    assert!(!(2..40).fold(asked, answered).is_a_register());
    let asked = (0..40).fold(World::default(), |world, call| world.invoked(&format!("c{call}")));
    let different = |world: World, call: usize| world.replayed(&format!("c{call}"), &format!("c{}", call - 20));
    let world = (20..40).fold(asked, different);
    let checked = register::check(&calls(&world.events));
    assert_eq!((checked.histories, checked.left_out), (0, 1));
}
