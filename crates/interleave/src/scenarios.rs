//! The scenarios: a few actors on one key, and what is special about each.

use std::time::Duration;

use pg_idempotency::OnDuplicate;
use pg_idempotency::lease::Policy;

use crate::actors::Before::{
    self, Completed, Expired, ExpiredEvent, ExpiredMark, InDoubt, Lapsed, LapsedAndExpired, Noted, Paid,
    PaidAndExpired, Probed, Released,
};
use crate::actors::Ending::{Completes, Releases, Renews};
use crate::actors::Manner::{Commits, Fails, Keeps, Regrets, RollsBack, Undoes};
use crate::actors::Verb::{Forget, Release, ReleaseStep, Resolve, ResolveStep};
use crate::actors::Way::{AsRequest, Isolated, OtherBody, Plain, RepeatableRead, Run, Twice};
use crate::actors::{
    AT_LEAST_ONCE, AT_MOST_ONCE, Actor, IN_STEPS, LEASE, PAY, REJECT, SEND, WAIT, call, call_in_sql,
    call_in_sql_as_request, expire, lapse, mark, mark_many, operate, outlive, own, own_and_fail,
    own_at_repeatable_read, own_other_body, own_with_request, reconcile, request, request_leased, request_without_key,
    resume, run_in_sql, sweep, wake_and_die, wake_begin_and_die, work_in,
};
use crate::trace::is_outside;
use With::{
    After, Drops, GivesUp, Inside, IsInside, Kills, Leaves, ManyKeys, Most, Patient, Unlike, Unmerged, WaitsInside,
    Works,
};

#[derive(Clone)]
pub(crate) struct Scenario {
    pub(crate) name: String,
    pub(crate) actors: Vec<Actor>,
    with: Vec<With>,
}

/// What is special about a scenario.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum With {
    /// A record of an earlier call.
    After(Before),
    /// An effect may be there so often, and not once only: a key that expires or is forgotten is new.
    Most(usize),
    /// Work may be done and its result not stored.
    Works,
    /// The responses do not show which call has performed.
    Unlike,
    /// Not every lock is that of one key.
    ManyKeys,
    /// The future of this actor may be dropped.
    Drops(usize),
    /// The future of this actor may be dropped while the COMMIT of its lease is on its way.
    Leaves(usize),
    /// The server's process of this actor may be killed.
    Kills(usize),
    /// No wait ends by its limit.
    Patient,
    /// A call may be told that the key is in flight while another transaction has the row without the key's lock.
    GivesUp,
    /// Equal states are not merged. At repeatable read, what an actor has heard does not show its snapshot.
    Unmerged,
    /// There is a second scenario, in which statements stop between their snapshot and their lock, too.
    Inside,
    /// This is the second one.
    IsInside,
    /// This statement may wait there, for a documented reason.
    WaitsInside(&'static str),
}

impl Scenario {
    fn new(name: &str, actors: impl Into<Vec<Actor>>, with: &[With], and: &[With]) -> Self {
        Self { name: name.to_owned(), actors: actors.into(), with: [with, and].concat() }
    }

    pub(crate) fn has(&self, with: With) -> bool {
        self.with.contains(&with)
    }

    pub(crate) fn is_inside(&self) -> bool {
        self.has(IsInside)
    }

    /// Whether the specification covers the scenario. A statement of the specification stops nowhere.
    pub(crate) fn is_specified(&self) -> bool {
        !self.is_inside() && !is_outside(&self.name)
    }

    /// Whether this statement may wait between its snapshot and its lock.
    pub(crate) fn may_wait_inside(&self, name: &str) -> bool {
        self.is_inside() && self.with.iter().any(|with| matches!(with, WaitsInside(known) if *known == name))
    }

    pub(crate) fn before(&self) -> impl Iterator<Item = Before> {
        self.with.iter().filter_map(|with| if let After(before) = with { Some(*before) } else { None })
    }

    pub(crate) fn most_effects(&self) -> usize {
        self.with.iter().find_map(|with| if let Most(most) = with { Some(*most) } else { None }).unwrap_or(1)
    }

    fn inside(mut self) -> Self {
        self.name += "-inside";
        self.with.push(IsInside);
        self
    }
}

/// A scenario of transaction mode.
fn calls<const N: usize>(name: &str, actors: [Actor; N], with: &[With]) -> Scenario {
    Scenario::new(name, actors, with, &[])
}

/// A scenario of lease mode, where work can be done more than once.
fn leases<const N: usize>(name: &str, actors: [Actor; N], with: &[With]) -> Scenario {
    // An owner that stores its result after its lease has lapsed has the row, and not the lock.
    Scenario::new(name, actors, with, &[Most(N), Works, GivesUp])
}

/// A scenario of operations in steps, none of which is done twice.
fn steps<const N: usize>(name: &str, actors: [Actor; N], with: &[With]) -> Scenario {
    Scenario::new(name, actors, with, &[Unlike, GivesUp])
}

/// A scenario of batches of marks.
fn batches<const N: usize>(name: &str, actors: [Actor; N], with: &[With]) -> Scenario {
    Scenario::new(name, actors, with, &[Unlike, ManyKeys])
}

const BOTH: [&str; 2] = [PAY, SEND];
const LONG: OnDuplicate = OnDuplicate::Wait(Duration::from_secs(600));

pub(crate) fn all() -> Vec<Scenario> {
    let replay_first = WAIT.replay_first(true);
    let wait = || call(Plain, Keeps, WAIT);
    let reject = || call(Plain, Keeps, REJECT);
    let reject_other = || call(OtherBody, Keeps, REJECT);
    let run = |options| call(Run, Keeps, options);
    let asks = || request(Keeps, REJECT);
    let asks_first = || request(Keeps, REJECT.replay_first(true));
    let in_sql = || call_in_sql(Keeps, "10 min");
    let owns = || own(AT_LEAST_ONCE, Completes);
    let renews = || own(AT_LEAST_ONCE, Renews);
    // Its heartbeat is not due when the clock moves to that of another owner.
    let owns_long = || own(Policy::AtLeastOnce { lease: LEASE * 10 }, Completes);
    let owns_once = || own(AT_MOST_ONCE, Completes);
    let owns_and_stores = |ending| own_with_request(AT_MOST_ONCE, ending);
    let marks = || mark(LONG, Keeps);
    let batch = |events| mark_many(events, LONG, Keeps);
    let scenarios = vec![
        // The longest searches come first, so that the threads end together. In the second one, a lapsed owner begins a
        // step between another caller's look and its take-over.
        steps("steps-pay-lapses", [work_in(&[PAY]), lapse(), work_in(&[PAY])], &[Patient]),
        steps("steps-send-overtaken", [work_in(&[SEND]), lapse(), work_in(&[])], &[Patient]),
        // New keys.
        calls("two-wait", [wait(), wait()], &[Inside]),
        calls("two-reject", [reject(), reject()], &[Inside]),
        calls("wait-reject", [wait(), reject()], &[]),
        calls("three-wait", [wait(), wait(), wait()], &[]),
        calls("three-mixed", [wait(), wait(), reject()], &[]),
        calls("fails", [call(Plain, Fails, WAIT), wait()], &[Inside]),
        calls("fails-three", [call(Plain, Fails, WAIT), wait(), wait()], &[Patient]),
        calls("regrets", [call(Plain, Regrets, WAIT), wait()], &[]),
        calls("regrets-reject", [call(Plain, Regrets, WAIT), reject()], &[]),
        calls("commits-inside", [call(Plain, Commits, WAIT), wait()], &[]),
        calls("rolls-back-inside", [call(Plain, RollsBack, WAIT), wait()], &[]),
        calls("twice", [call(Twice, Keeps, WAIT), wait()], &[]),
        calls("other-body", [wait(), call(OtherBody, Keeps, WAIT)], &[]),
        calls("isolated", [call(Isolated, Keeps, WAIT), wait()], &[]),
        calls("isolated-fails", [call(Isolated, Fails, WAIT), wait()], &[]),
        calls("isolated-undoes", [call(Isolated, Undoes, WAIT), wait()], &[Unlike]),
        calls("run", [run(WAIT), run(WAIT)], &[]),
        calls("select-first", [run(replay_first), run(replay_first)], &[]),
        calls("expired-select-first", [run(replay_first), run(replay_first)], &[After(Expired)]),
        calls("repeatable-read", [wait(), call(RepeatableRead, Keeps, WAIT)], &[Unmerged]),
        calls(
            "repeatable-read-two",
            [call(RepeatableRead, Keeps, WAIT), call(RepeatableRead, Keeps, WAIT)],
            &[Unmerged],
        ),
        calls("drops", [wait(), wait()], &[Drops(0), Drops(1)]),
        calls("drops-run", [run(WAIT), run(WAIT)], &[Drops(0), Drops(1)]),
        calls("kills", [wait(), wait()], &[Kills(0), Kills(1)]),
        calls("kills-run", [run(WAIT), run(WAIT)], &[Kills(0), Kills(1)]),
        // Records that are expired, swept, forgotten or released.
        calls("completed-sweep", [wait(), sweep()], &[After(Completed)]),
        calls("expired-two", [wait(), wait()], &[After(Expired), Inside]),
        calls("expired-reject", [reject(), reject()], &[After(Expired)]),
        calls("expired-three", [wait(), wait(), wait()], &[After(Expired), Patient]),
        calls("expired-fails", [call(Plain, Fails, WAIT), wait()], &[After(Expired)]),
        calls("expired-regrets", [call(Plain, Regrets, WAIT), reject()], &[After(Expired)]),
        calls("expired-isolated-fails", [call(Isolated, Fails, WAIT), wait()], &[After(Expired)]),
        calls("expired-repeatable-read", [reject(), call(RepeatableRead, Keeps, REJECT)], &[After(Expired), Unmerged]),
        calls("expired-sweep", [wait(), sweep()], &[After(Expired), Inside]),
        calls("expired-reject-sweep", [reject(), sweep()], &[After(Expired), GivesUp]),
        calls("expired-two-sweep", [wait(), wait(), sweep()], &[After(Expired), Patient]),
        calls("expired-forget", [wait(), wait(), operate(Forget)], &[After(Expired), Most(2), Patient]),
        calls("completed-forget", [wait(), reject(), operate(Forget)], &[After(Completed)]),
        calls("expires", [wait(), expire(), wait()], &[Most(2)]),
        calls("expires-completed", [wait(), expire(), reject()], &[After(Completed)]),
        calls("expires-sweep", [wait(), expire(), sweep()], &[After(Completed)]),
        calls("released-two", [wait(), wait()], &[After(Released), Inside]),
        calls("released-expires", [reject(), expire(), reject_other()], &[After(Released), Most(2)]),
        calls("released-expires-sweep", [reject(), expire(), sweep()], &[After(Released), GivesUp]),
        // Records whose transaction was committed without a response.
        calls("unfinished-expires", [call(Plain, Commits, REJECT), expire(), reject_other()], &[Most(2)]),
        calls("unfinished-expires-sweep", [call(Plain, Commits, REJECT), expire(), sweep()], &[GivesUp]),
        calls("released-three", [reject(), reject(), reject()], &[After(Released)]),
        // Leases.
        // Inside, a claim can wait in its insert for the completion of a lease: DESIGN.md.
        leases("lease-two", [owns(), owns()], &[Most(1), Inside, WaitsInside("claim")]),
        leases("lease-once", [owns_once(), owns_once()], &[Most(1)]),
        leases("lease-releases", [own(AT_LEAST_ONCE, Releases), owns()], &[]),
        leases("lease-fails", [own_and_fail(AT_LEAST_ONCE), owns()], &[]),
        leases("lease-once-fails", [own_and_fail(AT_MOST_ONCE), owns_once()], &[Most(1)]),
        leases("lease-once-fails-resolve", [own_and_fail(AT_MOST_ONCE), lapse(), operate(Resolve)], &[]),
        leases("lease-once-fails-release", [own_and_fail(AT_MOST_ONCE), lapse(), operate(Release)], &[]),
        leases("lease-lapses", [owns(), lapse(), owns()], &[]),
        leases("lease-once-lapses", [owns_once(), lapse(), owns_once()], &[Most(1)]),
        leases("lease-release-lapses", [own(AT_LEAST_ONCE, Releases), lapse(), owns()], &[Patient]),
        leases("lease-renews", [renews(), owns()], &[Most(1)]),
        leases("lease-renews-expires", [renews(), expire(), lapse()], &[]),
        leases("lease-renews-resolve", [renews(), lapse(), operate(Resolve)], &[]),
        leases("lease-renews-release", [renews(), lapse(), operate(Release)], &[]),
        // A heartbeat between another caller's look and its take-over.
        leases("lease-renews-lapses", [renews(), lapse(), owns_long()], &[Patient]),
        leases("lease-renews-outlived", [renews(), outlive(), owns_long()], &[Patient]),
        leases("lapsed-two", [owns(), owns()], &[After(Lapsed(AT_LEAST_ONCE)), Inside]),
        leases("lapsed-once-resolve", [owns_once(), operate(Resolve)], &[After(Lapsed(AT_MOST_ONCE))]),
        leases("lapsed-once-release", [owns_once(), operate(Release), owns_once()], &[After(Lapsed(AT_MOST_ONCE))]),
        leases("lapsed-forget", [owns(), operate(Forget)], &[After(Lapsed(AT_LEAST_ONCE))]),
        leases("lease-operators", [owns(), lapse(), operate(Resolve)], &[]),
        leases("lease-operator-releases", [owns_once(), lapse(), operate(Release)], &[]),
        leases("lapsed-operators", [operate(Resolve), operate(Release)], &[After(Lapsed(AT_MOST_ONCE))]),
        leases("lease-expired-sweep", [owns(), sweep()], &[After(LapsedAndExpired(AT_LEAST_ONCE))]),
        // A suspended owner wakes between the look of a call in another mode and its take-over.
        leases("lease-expired-wakes", [owns_once(), wake_and_die()], &[After(LapsedAndExpired(AT_LEAST_ONCE))]),
        leases("lease-ends-sweep", [owns(), expire(), lapse(), sweep()], &[]),
        leases("lease-kills", [own(AT_LEAST_ONCE, Releases), owns()], &[Kills(0)]),
        leases("lease-other-mode", [owns(), wait()], &[]),
        leases("lease-other-mode-and-body", [own(AT_LEAST_ONCE, Releases), expire(), reject_other()], &[]),
        leases("lease-other-body", [own(AT_LEAST_ONCE, Releases), expire(), own_other_body(AT_LEAST_ONCE)], &[]),
        leases("lease-expires", [own(AT_LEAST_ONCE, Releases), expire(), owns()], &[]),
        // A second attempt whose record expires, or expires and is then of another mode.
        leases("lapsed-expires", [owns(), expire(), owns()], &[After(Lapsed(AT_LEAST_ONCE))]),
        leases("lapsed-expires-mode", [owns(), expire(), reject()], &[After(Lapsed(AT_LEAST_ONCE))]),
        leases("lapsed-expires-body", [own_other_body(AT_MOST_ONCE), expire()], &[After(Lapsed(AT_MOST_ONCE))]),
        leases("lapsed-expires-mode-and-body", [reject_other(), expire()], &[After(Lapsed(AT_MOST_ONCE))]),
        leases("expired-other-mode", [owns(), reject_other()], &[After(Expired)]),
        // A call in steps does not repeat work that has begun under another key.
        leases("lease-lapses-steps", [owns(), lapse(), own(IN_STEPS, Completes)], &[Most(1)]),
        // A call that waits, and finds a record that it must not take over.
        leases("lease-release-other-mode", [own(AT_LEAST_ONCE, Releases), wait()], &[]),
        leases("lease-once-drops", [owns_once(), owns_once()], &[Drops(0), Most(1)]),
        // Claims that never begin, because their caller does not hear of the COMMIT.
        leases("unbegun", [owns(), owns()], &[Leaves(0)]),
        leases("unbegun-once", [owns_once(), owns_once()], &[Leaves(0), Most(1)]),
        leases("unbegun-lapsed", [owns(), owns()], &[After(Lapsed(AT_LEAST_ONCE)), Leaves(0), Inside]),
        leases("unbegun-once-resolve", [owns_once(), lapse(), operate(Resolve)], &[Leaves(0)]),
        leases(
            "unbegun-repeatable-read",
            [own_at_repeatable_read(AT_MOST_ONCE, Completes), operate(Release)],
            &[Leaves(0), Unmerged, Inside],
        ),
        // Callers of the SQL functions, among themselves and beside others.
        calls("sql-two", [in_sql(), in_sql()], &[]),
        calls("sql-reject", [call_in_sql(Keeps, "0"), reject()], &[]),
        calls("sql-caller", [in_sql(), wait()], &[]),
        calls("sql-layer", [call_in_sql_as_request(), asks()], &[]),
        calls("sql-fails", [call_in_sql(Fails, "10 min"), wait()], &[]),
        calls("sql-regrets", [call(Plain, Regrets, WAIT), in_sql()], &[]),
        calls("sql-commits-inside", [call_in_sql(Commits, "10 min"), wait()], &[]),
        calls("sql-rolls-back-inside", [call_in_sql(RollsBack, "10 min"), wait()], &[]),
        calls("sql-kills", [in_sql(), in_sql()], &[Kills(0)]),
        calls("sql-expired", [in_sql(), wait()], &[After(Expired)]),
        calls("sql-expired-reject", [call_in_sql(Keeps, "0"), call_in_sql(Keeps, "0")], &[After(Expired)]),
        calls("sql-expired-sweep", [call_in_sql(Keeps, "0"), sweep()], &[After(Expired), GivesUp]),
        calls("sql-expires", [in_sql(), expire(), in_sql()], &[Most(2)]),
        calls("sql-released", [in_sql(), wait()], &[After(Released)]),
        calls("sql-run-two", [run_in_sql("10 min"), run_in_sql("10 min")], &[]),
        calls("sql-run-caller", [run_in_sql("10 min"), wait()], &[]),
        calls("sql-run-ensure", [run_in_sql("0"), in_sql()], &[]),
        calls("sql-run-kills", [run_in_sql("10 min"), run_in_sql("10 min")], &[Kills(0)]),
        calls("sql-run-expired-sweep", [run_in_sql("0"), sweep()], &[After(Expired), GivesUp]),
        calls("sql-completed-forget", [call_in_sql(Keeps, "0"), operate(Forget)], &[After(Completed)]),
        calls("sql-indeterminate-release", [call_in_sql(Commits, "0"), in_sql(), operate(Release)], &[Most(2)]),
        // Steps.
        steps("steps-two", [work_in(&BOTH), work_in(&BOTH)], &[]),
        steps("steps-send-lapses", [work_in(&[SEND]), lapse(), operate(Release)], &[]),
        steps("steps-pay-release", [work_in(&[PAY]), lapse(), operate(Release)], &[]),
        steps("steps-pay-resolve", [work_in(&[PAY]), lapse(), operate(Resolve)], &[]),
        steps("steps-send-resolve", [work_in(&[SEND]), lapse(), operate(Resolve)], &[]),
        steps("steps-paid-two", [work_in(&BOTH), work_in(&BOTH)], &[After(Paid)]),
        // As in `lease-expired-wakes`, but the owner begins a step before it dies.
        steps("steps-lapsed-wakes", [work_in(&[SEND]), wake_begin_and_die()], &[After(Lapsed(IN_STEPS))]),
        steps("steps-resume", [work_in(&BOTH), resume(&BOTH)], &[After(Paid)]),
        steps("steps-resume-two", [resume(&BOTH), resume(&BOTH)], &[After(Paid)]),
        steps("steps-resume-sweep", [resume(&[PAY]), expire(), sweep()], &[After(Paid)]),
        // A resumer does not even try an expired operation: another call would find the key in flight.
        steps("steps-resume-expired", [resume(&BOTH), work_in(&BOTH)], &[After(PaidAndExpired)]),
        steps("steps-in-doubt", [work_in(&[SEND]), operate(ResolveStep)], &[After(InDoubt)]),
        steps("steps-in-doubt-step-release", [work_in(&[SEND]), operate(ReleaseStep)], &[After(InDoubt)]),
        steps("steps-in-doubt-release", [work_in(&[SEND]), operate(Release)], &[After(InDoubt)]),
        leases(
            "reconcile-noted",
            [reconcile(AT_MOST_ONCE, false), reconcile(AT_MOST_ONCE, false)],
            &[After(Noted(AT_MOST_ONCE))],
        ),
        leases(
            "reconcile-noted-effect",
            [reconcile(AT_MOST_ONCE, true), reconcile(AT_MOST_ONCE, false)],
            &[After(Noted(AT_MOST_ONCE))],
        ),
        // Reconcilers, whose next probe decides.
        leases("reconcile-no-trace", [reconcile(AT_MOST_ONCE, false), owns_once()], &[After(Probed(AT_MOST_ONCE))]),
        leases("reconcile-effect", [reconcile(AT_MOST_ONCE, true), owns_once()], &[After(Probed(AT_MOST_ONCE))]),
        leases("reconcile-new", [owns_and_stores(Completes), lapse(), reconcile(AT_MOST_ONCE, false)], &[]),
        leases("reconcile-new-renews", [owns_and_stores(Renews), lapse(), reconcile(AT_MOST_ONCE, false)], &[]),
        leases("reconcile-new-unbegun", [owns_and_stores(Completes), reconcile(AT_MOST_ONCE, false)], &[Leaves(0)]),
        leases(
            "reconcile-two",
            [reconcile(AT_MOST_ONCE, true), reconcile(AT_MOST_ONCE, false)],
            &[After(Probed(AT_MOST_ONCE))],
        ),
        leases("reconcile-wakes", [reconcile(AT_MOST_ONCE, false), wake_and_die()], &[After(Probed(AT_MOST_ONCE))]),
        leases(
            "reconcile-effect-wakes",
            [reconcile(AT_MOST_ONCE, true), wake_and_die()],
            &[After(Probed(AT_MOST_ONCE))],
        ),
        leases("reconcile-releases", [reconcile(AT_MOST_ONCE, true), operate(Release)], &[After(Probed(AT_MOST_ONCE))]),
        leases(
            "reconcile-resolves",
            [reconcile(AT_MOST_ONCE, false), operate(Resolve)],
            &[After(Probed(AT_MOST_ONCE))],
        ),
        leases(
            "reconcile-expires",
            [reconcile(AT_MOST_ONCE, false), expire(), sweep()],
            &[After(Probed(AT_MOST_ONCE))],
        ),
        steps("reconcile-step", [reconcile(IN_STEPS, false), work_in(&[SEND])], &[After(Probed(IN_STEPS))]),
        steps("reconcile-step-resolve", [reconcile(IN_STEPS, false), operate(ResolveStep)], &[After(Probed(IN_STEPS))]),
        steps("reconcile-step-resume", [reconcile(IN_STEPS, true), resume(&[SEND])], &[After(Probed(IN_STEPS))]),
        // Requests through the layer.
        calls("layer", [asks(), asks()], &[]),
        calls("layer-select-first", [asks_first(), asks_first()], &[]),
        calls("layer-select-first-other-caller", [asks_first(), run(replay_first)], &[]),
        calls("layer-fails", [request(Fails, REJECT), asks()], &[]),
        calls("layer-undoes", [request(Undoes, REJECT), request(Undoes, REJECT)], &[Unlike]),
        calls("layer-commits-inside", [request(Commits, REJECT), asks()], &[]),
        calls("layer-rolls-back-inside", [request(RollsBack, REJECT), asks()], &[]),
        calls("layer-caller", [asks(), call(AsRequest, Keeps, WAIT)], &[]),
        calls("layer-other-caller", [asks(), wait()], &[]),
        calls("layer-kills", [asks(), asks()], &[Kills(0)]),
        calls("layer-completed-sweep", [asks(), expire(), sweep()], &[]),
        calls("layer-expired", [wait(), asks()], &[After(Expired)]),
        calls("layer-expired-forget", [asks(), operate(Forget)], &[After(Expired), GivesUp]),
        calls("layer-expired-sweep", [asks(), sweep()], &[After(Expired), GivesUp]),
        calls("layer-without-key", [request_without_key(), asks()], &[Most(2)]),
        leases("layer-leased", [request_leased(AT_LEAST_ONCE), request_leased(AT_LEAST_ONCE)], &[Most(1)]),
        leases("layer-leased-once", [request_leased(AT_MOST_ONCE), lapse(), request_leased(AT_MOST_ONCE)], &[Most(1)]),
        // Marks.
        calls("mark-two", [marks(), marks()], &[Inside]),
        calls("mark-regrets", [mark(LONG, Regrets), marks()], &[]),
        calls("mark-reject", [marks(), mark(OnDuplicate::Reject, Keeps)], &[]),
        calls("mark-expired", [marks(), marks()], &[After(ExpiredMark)]),
        calls("mark-expired-sweep", [marks(), sweep()], &[After(ExpiredMark)]),
        batches("batch-overlap", [batch("ab"), batch("ba")], &[Inside]),
        batches("batch-three", [batch("ab"), batch("bc"), batch("ca")], &[Patient]),
        // The last round has two statements, and the owner may end between them.
        batches("batch-regrets", [mark_many("ab", LONG, Regrets), batch("ab")], &[GivesUp]),
        batches(
            "batch-expired",
            [batch("ab"), batch("ba")],
            &[After(ExpiredEvent('a')), After(ExpiredEvent('b')), Inside],
        ),
        batches(
            "batch-expired-sweep",
            [batch("ab"), sweep()],
            &[After(ExpiredEvent('a')), After(ExpiredEvent('b')), Inside],
        ),
    ];
    let inside: Vec<_> =
        scenarios.iter().filter(|scenario| scenario.has(Inside)).cloned().map(Scenario::inside).collect();
    scenarios.into_iter().chain(inside).collect()
}
