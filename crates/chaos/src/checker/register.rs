//! The answers to the calls of each key as a register that is written once: the call that performs writes its name, and
//! a replay reads. `stateright` searches for an order of the calls that such a register could have executed, and in
//! which each call is between its beginning and its end (linearizability). The tables are not consulted.

use std::collections::{HashMap, HashSet};

use stateright::semantics::write_once_register::{WORegister, WORegisterOp as Op, WORegisterRet as Ret};
use stateright::semantics::{ConsistencyTester as _, LinearizabilityTester};

use super::{Aftermath, by_key};
use crate::history::{Call, Moment, What};

type Done<'a> = (Op<&'a str>, Option<Ret<&'a str>>);

/// The search tries the calls in every order, so its time grows with the factorial of these two numbers.
const REPLAYS: usize = 5;
const UNKNOWN: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct Checked {
    pub(crate) violations: Vec<String>,
    pub(crate) histories: usize,
    /// The keys with too many unknown results for the search.
    pub(crate) left_out: usize,
}

/// `calls` are all calls of a world in which every key has at most one answer.
pub(crate) fn check(calls: &[Call]) -> Checked {
    let mut checked = Checked::default();
    for (key, one) in by_key(calls, &Aftermath::default()) {
        let ops = that_matter(&one.calls);
        if ops.iter().filter(|(_, (_, end))| end.is_none()).count() > UNKNOWN {
            checked.left_out += 1;
        } else if !ops.is_empty() {
            checked.histories += 1;
            if !is_linearizable(&ops) {
                checked.violations.push(format!("{key}: not linearizable as a register that is written once"));
            }
        }
    }
    checked.violations.sort();
    checked
}

/// What a call did to the register. A call that was refused did nothing, unless it had claimed the operation: then its
/// effect outside can become the answer.
fn done(call: &Call) -> Option<Done<'_>> {
    match &call.end {
        What::Performed(_) => Some((Op::Write(&call.name), Some(Ret::WriteOk))),
        What::Replayed(response) => Some((Op::Read, Some(Ret::ReadOk(Some(response))))),
        What::Unknown(_) => Some((Op::Write(&call.name), None)),
        _ => call.token.map(|_| (Op::Write(call.name.as_str()), None)),
    }
}

/// Leaves out the calls that cannot change the verdict. A write with an unknown result that no call has read may never
/// have happened. A replay is possible wherever an earlier replay of the same answer is possible, because the register
/// keeps its value.
fn that_matter<'a>(calls: &[&'a Call]) -> Vec<(&'a Call, Done<'a>)> {
    let mut ops: Vec<_> = calls.iter().filter_map(|call| Some((*call, done(call)?))).collect();
    let read: HashSet<&str> = calls.iter().filter_map(|call| call.response()).collect();
    // The search takes the first possible call. In this order it needs no second try for a good history.
    ops.sort_by_key(|(call, (op, _))| (*op == Op::Read, call.ended));
    let mut replays: HashMap<&str, usize> = HashMap::new();
    ops.retain(|(call, (_, end))| match &call.end {
        What::Replayed(response) => {
            let count = replays.entry(response).or_default();
            *count += 1;
            *count <= REPLAYS
        }
        _ => end.is_some() || read.contains(call.name.as_str()),
    });
    ops
}

/// Each call is a thread of its own. A call without a known result never returns.
fn is_linearizable(ops: &[(&Call, Done<'_>)]) -> bool {
    let mut tester = LinearizabilityTester::new(WORegister(None));
    let mut moments: Vec<(Moment, bool, usize)> = Vec::new();
    for (thread, (call, (_, end))) in ops.iter().enumerate() {
        moments.push((call.invoked, false, thread));
        moments.extend(end.iter().map(|_| (call.ended, true, thread)));
    }
    // At the same moment, the beginnings come before the ends: such calls are concurrent.
    moments.sort_by_key(|(at, returns, _)| (*at, *returns));
    moments.into_iter().all(|(_, returns, thread)| match &ops[thread].1 {
        (_, Some(end)) if returns => tester.on_return(thread, end.clone()).is_ok(),
        (op, _) => tester.on_invoke(thread, op.clone()).is_ok(),
    }) && tester.is_consistent()
}
