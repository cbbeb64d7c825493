//! The costs of a fault for the callers: the time from a caller's first error to its next answer, and the answers that are
//! lost.

use std::collections::HashMap;
use std::time::Duration;

use crate::history::{Call, Moment, What};

/// A fault, when it began, and when its formation was whole again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Injected {
    pub(crate) kind: &'static str,
    pub(crate) at: Moment,
    pub(crate) over: Moment,
}

/// One caller without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Outage {
    /// When the first call failed.
    failed: Moment,
    /// From when that call was made, to the next answer.
    time: Duration,
}

/// How the faults of one kind looked to the callers.
#[derive(Debug)]
pub(crate) struct Seen {
    kind: &'static str,
    /// For each fault, the longest outage of one caller.
    of_one: Vec<Duration>,
    /// For each fault, the longest time in which no caller got an answer.
    of_all: Vec<Duration>,
    /// Answers that are not true any more, of all faults of this kind.
    lost: usize,
}

impl Seen {
    pub(crate) fn longest(&self) -> Duration {
        self.of_one.iter().copied().max().unwrap_or_default()
    }
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (kind, one, all) = (self.kind, range(&self.of_one), range(&self.of_all));
        write!(f, "{kind}: one caller without an answer for {one}, all callers for {all}, {} answers lost", self.lost)
    }
}

/// The outages of all callers but the direct ones, which cannot follow the leader. `lost` has the moment of each answer that
/// was given and lost, before the fault or while the old leader still answered.
pub(crate) fn seen(calls: &[Call], faults: &[Injected], lost: &[Moment]) -> Vec<Seen> {
    let outages = outages(calls.iter().filter(|call| !call.name.starts_with("direct")));
    let mut answers: Vec<Moment> =
        calls.iter().filter(|call| call.response().is_some()).map(|call| call.ended).collect();
    answers.sort_unstable();
    let mut all: Vec<Seen> = Vec::new();
    for (number, fault) in faults.iter().enumerate() {
        let until = faults.get(number + 1).map_or(Moment::MAX, |next| next.at);
        let during = |moment: Moment| (fault.at..until).contains(&moment);
        let of_one = outages.iter().filter(|outage| during(outage.failed)).map(|outage| outage.time).max();
        let of_all = answers.windows(2).filter(|two| during(two[1])).map(|two| two[1] - two[0]).max();
        let since = number.checked_sub(1).map_or(0, |previous| faults[previous].over);
        let gone = lost.iter().filter(|moment| (since..fault.over).contains(moment)).count();
        let place = all.iter().position(|seen| seen.kind == fault.kind).unwrap_or_else(|| {
            all.push(Seen { kind: fault.kind, of_one: Vec::new(), of_all: Vec::new(), lost: 0 });
            all.len() - 1
        });
        all[place].lost += gone;
        all[place].of_one.push(of_one.unwrap_or_default());
        all[place].of_all.push(Duration::from_nanos(of_all.unwrap_or_default()));
    }
    all
}

/// A refused call is no outage, unlike one with an unknown end.
fn outages<'a>(calls: impl Iterator<Item = &'a Call>) -> Vec<Outage> {
    let mut open: HashMap<&str, (Moment, Moment)> = HashMap::new();
    let mut outages = Vec::new();
    for call in calls {
        let caller = call.name.split('/').next().unwrap_or_default();
        if matches!(call.end, What::Unknown(_)) {
            open.entry(caller).or_insert((call.invoked, call.ended));
        } else if call.response().is_some()
            && let Some((since, failed)) = open.remove(caller)
        {
            outages.push(Outage { failed, time: Duration::from_nanos(call.ended - since) });
        }
    }
    outages
}

/// The median, with the range if there are several times.
fn range(times: &[Duration]) -> String {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let (Some(least), Some(most)) = (sorted.first(), sorted.last()) else { return "-".to_owned() };
    let median = (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2;
    let seconds = |time: &Duration| format!("{:.1}", time.as_secs_f64());
    match sorted.len() {
        1 => format!("{} s", seconds(&median)),
        _ => format!("{} s ({}–{} s)", seconds(&median), seconds(least), seconds(most)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Injected, range, seen};
    use crate::history::{Event, What, calls};

    fn call(name: &str, from: u64, to: u64, what: What) -> [Event; 2] {
        let of = |at: u64, what| Event { at: at * 1_000_000_000, call: name.to_owned(), key: "k".to_owned(), what };
        [of(from, What::Invoked), of(to, what)]
    }

    #[test]
    fn an_outage_lasts_from_the_first_failed_call_to_the_next_answer() {
        let unknown = || What::Unknown("cut".to_owned());
        let answer = || What::Performed("x".to_owned());
        let events = [
            call("a/1", 0, 1, answer()),
            call("a/2", 2, 4, unknown()),
            call("a/3", 4, 5, unknown()),
            call("b/1", 4, 6, answer()),
            call("a/4", 5, 9, answer()),
            call("direct/1", 3, 8, unknown()),
            call("direct/2", 8, 90, answer()),
        ];
        let second = |number: u64| number * 1_000_000_000;
        let faults = [Injected { kind: "cut", at: second(3), over: second(10) }];
        let seen = seen(&calls(&events.concat()), &faults, &[second(1), second(12)]);
        assert_eq!(seen[0].lost, 1);
        assert_eq!(seen[0].of_one, [Duration::from_secs(7)]);
        assert_eq!(seen[0].longest(), Duration::from_secs(7));
    }

    #[test]
    fn several_times_are_shown_by_their_median_and_range() {
        let times = [4, 1, 3].map(Duration::from_secs);
        assert_eq!(range(&times), "3.0 s (1.0–4.0 s)");
        assert_eq!(range(&times[..1]), "4.0 s");
    }
}
