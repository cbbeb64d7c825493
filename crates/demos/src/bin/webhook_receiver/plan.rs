//! What the sender has to deliver, in which order, and what should come of it.

use std::collections::{BTreeMap, HashSet};
use std::iter::repeat_n;

use crate::event::Event;

/// Any number will do, as long as it is the same in every run.
const SEED: u64 = 4711;

/// Few enough that events of one account meet.
const ACCOUNTS: usize = 100;

/// One in a hundred events fails when it is first processed.
const FAILING: usize = 100;

pub(crate) struct Plan {
    run: String,
    /// Different ones.
    pub(crate) events: usize,
    /// Numbers of events, in the order of their deliveries; all but one delivery of the last event, which is the one
    /// that the sender hangs up on.
    pub(crate) order: Vec<usize>,
}

impl Plan {
    /// Seven tenths of the deliveries are of different events, and the others are repeats of some of them. A tenth of
    /// the repeats comes right after its event, when that is probably in flight; all else is shuffled.
    pub(crate) fn new(run: &str, deliveries: usize) -> Self {
        let events = deliveries * 7 / 10;
        let repeats = deliveries - events;
        let twins = repeats / 10;

        let mut random = Random(SEED);
        let mut groups: Vec<(usize, usize)> =
            (0..events - 1).map(|event| (event, if event < twins { 2 } else { 1 })).collect();
        groups.extend((twins..repeats).map(|_| (random.below(events - 1), 1)));
        for at in (1..groups.len()).rev() {
            groups.swap(at, random.below(at + 1));
        }
        let order = groups.into_iter().flat_map(|(event, times)| repeat_n(event, times)).collect();
        Self { run: run.to_owned(), events, order }
    }

    pub(crate) fn event(&self, number: usize) -> Event {
        let mut random = Random(SEED ^ number as u64);
        Event {
            id: format!("evt_{}_{number:06}", self.run),
            account: format!("acct_{:02}", random.below(ACCOUNTS)),
            amount: random.below(20_000) as i64 - 5_000,
        }
    }

    /// Of all events, and until each is acknowledged.
    pub(crate) fn deliveries(&self) -> usize {
        self.order.len() + 1
    }

    /// It fails too, so that what the sender has hung up on rolls back even where the receiver has not noticed.
    pub(crate) fn hung_up_event(&self) -> Event {
        self.event(self.events - 1)
    }

    /// How many events fail when they are first processed, the one that is hung up on not counted.
    pub(crate) fn failures(&self) -> usize {
        (0..self.events - 1).step_by(FAILING).len()
    }

    /// The ids of all that fail.
    pub(crate) fn failing(&self) -> HashSet<String> {
        let planned = (0..self.events - 1).step_by(FAILING).map(|number| self.event(number));
        planned.chain([self.hung_up_event()]).map(|event| event.id).collect()
    }

    /// What each account should have in the end: every event once.
    pub(crate) fn balances(&self) -> BTreeMap<String, i64> {
        let mut balances = BTreeMap::new();
        for Event { account, amount, .. } in (0..self.events).map(|number| self.event(number)) {
            *balances.entry(account).or_default() += amount;
        }
        balances
    }
}

/// SplitMix64: good enough for a shuffle, and the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}
