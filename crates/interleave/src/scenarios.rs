//! The scenarios: a few actors on one key, and what is stored before.

use std::time::Duration;

use pg_idempotency::{Idempotency, InFlight, RoundTrips};

use crate::actors::{
    AT_LEAST_ONCE, AT_MOST_ONCE, Actor, Before, Ending, Isolation, Manner, PAY, REJECT, SEND, Verb, WAIT, call,
    call_isolated, call_that, call_twice, call_with_other_body, expire, lapse, mark, mark_many, operate, own,
    own_and_fail, resume, run, run_that, sweep, work_in,
};

pub(crate) struct Scenario {
    pub(crate) name: String,
    pub(crate) before: Vec<Before>,
    pub(crate) actors: Vec<Actor>,
    /// How often an effect may be there.
    pub(crate) most_effects: usize,
    pub(crate) effects: Effects,
    /// Every lock is that of the one key.
    pub(crate) one_key: bool,
    /// Statements that may wait here, for a documented reason.
    pub(crate) may_wait: &'static [&'static str],
    /// A call may be told that the key is in flight while another transaction has the row without the key's lock.
    pub(crate) may_give_up: bool,
    pub(crate) drops: &'static [usize],
    pub(crate) kills: &'static [usize],
    /// Whether a wait may end by its limit.
    pub(crate) time_outs: bool,
    /// Whether equal states are merged. At repeatable read, what an actor has heard does not show its snapshot.
    pub(crate) merged: bool,
    /// Whether statements stop between their snapshot and their lock, too.
    pub(crate) inside: bool,
}

/// What the effects have to be like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effects {
    /// An effect is there if and only if its call has performed, and each response is that of such a call.
    OfCalls,
    /// Each response is that of work that was done. Work may be done and its result not stored.
    OfWork,
    /// The responses do not show which call has performed.
    Unlike,
}

/// A scenario of transaction mode.
fn calls<const N: usize>(name: &str, actors: [Actor; N]) -> Scenario {
    Scenario {
        name: name.to_owned(),
        before: Vec::new(),
        actors: actors.into(),
        most_effects: 1,
        effects: Effects::OfCalls,
        one_key: true,
        may_wait: &[],
        may_give_up: false,
        drops: &[],
        kills: &[],
        time_outs: true,
        merged: true,
        inside: false,
    }
}

/// A scenario of lease mode, where work can be done more than once.
fn leases<const N: usize>(name: &str, actors: [Actor; N]) -> Scenario {
    // An owner that stores its result after its lease has lapsed has the row, and not the lock.
    Scenario { most_effects: N, effects: Effects::OfWork, may_give_up: true, ..calls(name, actors) }
}

/// A scenario of operations in steps, none of which is done twice.
fn steps<const N: usize>(name: &str, actors: [Actor; N]) -> Scenario {
    Scenario { most_effects: 1, effects: Effects::Unlike, ..leases(name, actors) }
}

/// A scenario of batches of marks.
fn batches<const N: usize>(name: &str, actors: [Actor; N]) -> Scenario {
    Scenario { effects: Effects::Unlike, one_key: false, ..calls(name, actors) }
}

impl Scenario {
    fn after(mut self, before: Before) -> Self {
        self.before.push(before);
        self
    }

    /// A key that expires or is forgotten is new.
    fn effects(self, most_effects: usize) -> Self {
        Self { most_effects, ..self }
    }

    fn dropping(self, drops: &'static [usize]) -> Self {
        Self { drops, ..self }
    }

    fn killing(self, kills: &'static [usize]) -> Self {
        Self { kills, ..self }
    }

    fn undoing(self) -> Self {
        Self { effects: Effects::Unlike, ..self }
    }

    fn unmerged(self) -> Self {
        Self { merged: false, ..self }
    }

    fn patient(self) -> Self {
        Self { time_outs: false, ..self }
    }

    fn giving_up(self) -> Self {
        Self { may_give_up: true, ..self }
    }

    fn inside(self) -> Self {
        Self { inside: true, name: format!("{}-inside", self.name), ..self }
    }

    fn may_wait(self, may_wait: &'static [&'static str]) -> Self {
        Self { may_wait, ..self }
    }
}

const BOTH: [&str; 2] = [PAY, SEND];
const LONG: InFlight = InFlight::Wait(Duration::from_secs(600));

fn plainly(manner: Manner) -> Actor {
    call_that(manner, Isolation::ReadCommitted, WAIT)
}

fn at_repeatable_read(options: Idempotency) -> Actor {
    call_that(Manner::Keeps, Isolation::RepeatableRead, options)
}

pub(crate) fn all() -> Vec<Scenario> {
    let fewest = WAIT.with_round_trips(RoundTrips::Fewest);
    let select_first = WAIT.with_round_trips(RoundTrips::SelectFirst);
    let wait = || call(WAIT);
    let reject = || call(REJECT);
    let owns = || own(AT_LEAST_ONCE, Ending::Completes);
    let renews = || own(AT_LEAST_ONCE, Ending::Renews);
    let owns_once = || own(AT_MOST_ONCE, Ending::Completes);
    let marks = || mark(LONG, Manner::Keeps);
    let batch = |events| mark_many(events, LONG, Manner::Keeps);
    use Before::*;
    use Manner::*;
    vec![
        // The longest search of all comes first, so that the threads end together.
        steps("steps-pay-lapses", [work_in(&[PAY]), lapse(), work_in(&[PAY])]).patient(),
        // New keys.
        calls("two-wait", [wait(), wait()]),
        calls("two-reject", [reject(), reject()]),
        calls("wait-reject", [wait(), reject()]),
        calls("three-wait", [wait(), wait(), wait()]),
        calls("three-mixed", [wait(), wait(), reject()]),
        calls("fails", [plainly(Fails), wait()]),
        calls("fails-three", [plainly(Fails), wait(), wait()]).patient(),
        calls("regrets", [plainly(Regrets), wait()]),
        calls("regrets-reject", [plainly(Regrets), reject()]),
        calls("commits-inside", [plainly(Commits), wait()]),
        calls("rolls-back-inside", [plainly(RollsBack), wait()]),
        calls("twice", [call_twice(WAIT), wait()]),
        calls("other-body", [wait(), call_with_other_body(WAIT)]),
        calls("isolated", [call_isolated(Keeps, WAIT), wait()]),
        calls("isolated-fails", [call_isolated(Fails, WAIT), wait()]),
        calls("isolated-undoes", [call_isolated(Undoes, WAIT), wait()]).undoing(),
        calls("run", [run(WAIT), run(WAIT)]),
        calls("fewest", [run(fewest), run(fewest)]),
        calls("fewest-plain", [run(fewest), wait()]),
        calls("fewest-commits-inside", [run_that(Commits, fewest), wait()]),
        calls("fewest-rolls-back-inside", [run_that(RollsBack, fewest), wait()]),
        calls("select-first", [run(select_first), run(select_first)]),
        calls("select-first-fewest", [run(select_first), run(fewest)]),
        calls("repeatable-read", [wait(), at_repeatable_read(WAIT)]).unmerged(),
        calls("repeatable-read-two", [at_repeatable_read(WAIT), at_repeatable_read(WAIT)]).unmerged(),
        calls("drops", [wait(), wait()]).dropping(&[0, 1]),
        calls("drops-run", [run(WAIT), run(WAIT)]).dropping(&[0, 1]),
        calls("drops-fewest", [run(fewest), run(fewest)]).dropping(&[0, 1]),
        calls("kills", [wait(), wait()]).killing(&[0, 1]),
        calls("kills-run", [run(WAIT), run(WAIT)]).killing(&[0, 1]),
        // Records that are expired, swept, forgotten or released.
        calls("completed-sweep", [wait(), sweep()]).after(Completed),
        calls("expired-two", [wait(), wait()]).after(Expired),
        calls("expired-reject", [reject(), reject()]).after(Expired),
        calls("expired-three", [wait(), wait(), wait()]).after(Expired).patient(),
        calls("expired-fails", [plainly(Fails), wait()]).after(Expired),
        calls("expired-regrets", [plainly(Regrets), reject()]).after(Expired),
        calls("expired-isolated-fails", [call_isolated(Fails, WAIT), wait()]).after(Expired),
        calls("expired-fewest", [run(fewest), run(fewest)]).after(Expired),
        calls("expired-repeatable-read", [reject(), at_repeatable_read(REJECT)]).after(Expired).unmerged(),
        calls("expired-sweep", [wait(), sweep()]).after(Expired),
        calls("expired-reject-sweep", [reject(), sweep()]).after(Expired).giving_up(),
        calls("expired-two-sweep", [wait(), wait(), sweep()]).after(Expired).patient(),
        calls("expired-forget", [wait(), wait(), operate(Verb::Forget)]).after(Expired).effects(2).patient(),
        calls("completed-forget", [wait(), reject(), operate(Verb::Forget)]).after(Completed),
        calls("expires", [wait(), expire(), wait()]).effects(2),
        calls("expires-completed", [wait(), expire(), reject()]).after(Completed),
        calls("expires-sweep", [wait(), expire(), sweep()]).after(Completed),
        calls("released-two", [wait(), wait()]).after(Released),
        calls("released-three", [reject(), reject(), reject()]).after(Released),
        // Leases.
        leases("lease-two", [owns(), owns()]).effects(1),
        leases("lease-once", [owns_once(), owns_once()]).effects(1),
        leases("lease-releases", [own(AT_LEAST_ONCE, Ending::Releases), owns()]),
        leases("lease-fails", [own_and_fail(AT_LEAST_ONCE), owns()]),
        leases("lease-once-fails", [own_and_fail(AT_MOST_ONCE), owns_once()]).effects(1),
        leases("lease-once-fails-resolve", [own_and_fail(AT_MOST_ONCE), lapse(), operate(Verb::Resolve)]),
        leases("lease-once-fails-release", [own_and_fail(AT_MOST_ONCE), lapse(), operate(Verb::Release)]),
        leases("lease-lapses", [owns(), lapse(), owns()]),
        leases("lease-once-lapses", [owns_once(), lapse(), owns_once()]).effects(1),
        leases("lease-release-lapses", [own(AT_LEAST_ONCE, Ending::Releases), lapse(), owns()]).patient(),
        leases("lease-renews", [renews(), owns()]).effects(1),
        leases("lease-renews-expires", [renews(), expire(), lapse()]),
        leases("lease-renews-resolve", [renews(), lapse(), operate(Verb::Resolve)]),
        leases("lease-renews-release", [renews(), lapse(), operate(Verb::Release)]),
        leases("lapsed-two", [owns(), owns()]).after(Lapsed(AT_LEAST_ONCE)),
        leases("lapsed-once-resolve", [owns_once(), operate(Verb::Resolve)]).after(Lapsed(AT_MOST_ONCE)),
        leases("lapsed-once-release", [owns_once(), operate(Verb::Release), owns_once()]).after(Lapsed(AT_MOST_ONCE)),
        leases("lapsed-forget", [owns(), operate(Verb::Forget)]).after(Lapsed(AT_LEAST_ONCE)),
        leases("lease-operators", [owns(), lapse(), operate(Verb::Resolve)]),
        leases("lease-operator-releases", [owns_once(), lapse(), operate(Verb::Release)]),
        leases("lapsed-operators", [operate(Verb::Resolve), operate(Verb::Release)]).after(Lapsed(AT_MOST_ONCE)),
        leases("lease-expired-sweep", [owns(), sweep()]).after(LapsedAndExpired(AT_LEAST_ONCE)),
        leases("lease-ends-sweep", [owns(), expire(), lapse(), sweep()]),
        leases("lease-kills", [own(AT_LEAST_ONCE, Ending::Releases), owns()]).killing(&[0]),
        leases("lease-other-mode", [owns(), wait()]),
        // Steps.
        steps("steps-two", [work_in(&BOTH), work_in(&BOTH)]),
        steps("steps-send-lapses", [work_in(&[SEND]), lapse(), operate(Verb::Release)]),
        steps("steps-pay-release", [work_in(&[PAY]), lapse(), operate(Verb::Release)]),
        steps("steps-pay-resolve", [work_in(&[PAY]), lapse(), operate(Verb::Resolve)]),
        steps("steps-send-resolve", [work_in(&[SEND]), lapse(), operate(Verb::Resolve)]),
        steps("steps-paid-two", [work_in(&BOTH), work_in(&BOTH)]).after(Paid),
        steps("steps-resume", [work_in(&BOTH), resume(&BOTH)]).after(Paid),
        steps("steps-resume-two", [resume(&BOTH), resume(&BOTH)]).after(Paid),
        steps("steps-resume-sweep", [resume(&[PAY]), expire(), sweep()]).after(Paid),
        steps("steps-in-doubt", [work_in(&[SEND]), operate(Verb::ResolveStep)]).after(InDoubt),
        steps("steps-in-doubt-release", [work_in(&[SEND]), operate(Verb::Release)]).after(InDoubt),
        // Marks.
        calls("mark-two", [marks(), marks()]),
        calls("mark-regrets", [mark(LONG, Regrets), marks()]),
        calls("mark-reject", [marks(), mark(InFlight::Reject, Keeps)]),
        calls("mark-expired", [marks(), marks()]).after(ExpiredMark),
        calls("mark-expired-sweep", [marks(), sweep()]).after(ExpiredMark),
        batches("batch-overlap", [batch("ab"), batch("ba")]),
        batches("batch-three", [batch("ab"), batch("bc"), batch("ca")]).patient(),
        // The last round has two statements, and the owner may end between them.
        batches("batch-regrets", [mark_many("ab", LONG, Regrets), batch("ab")]).giving_up(),
        batches("batch-expired", [batch("ab"), batch("ba")]).after(ExpiredEvent('a')).after(ExpiredEvent('b')),
        batches("batch-expired-sweep", [batch("ab"), sweep()]).after(ExpiredEvent('a')).after(ExpiredEvent('b')),
        // Between the snapshot and the lock.
        calls("two-wait", [wait(), wait()]).inside(),
        calls("two-reject", [reject(), reject()]).inside(),
        calls("fails", [plainly(Fails), wait()]).inside(),
        calls("expired-two", [wait(), wait()]).after(Expired).inside(),
        calls("expired-sweep", [wait(), sweep()]).after(Expired).inside(),
        calls("released-two", [wait(), wait()]).after(Released).inside(),
        // A claim can wait in its insert for the completion of a lease: DESIGN.md.
        leases("lease-two", [owns(), owns()]).effects(1).may_wait(&["claim"]).inside(),
        leases("lapsed-two", [owns(), owns()]).after(Lapsed(AT_LEAST_ONCE)).inside(),
        calls("mark-two", [marks(), marks()]).inside(),
        batches("batch-overlap", [batch("ab"), batch("ba")]).inside(),
    ]
}
