//! Callers that commit although the call has failed or was dropped, and a `perform` that ends its transaction. No such
//! call is acknowledged, and a claim that was committed is indeterminate for all later callers. Only here do these
//! mistakes meet other calls of the key.

use crate::callers::{Callers, Way};
use crate::checker::errors::left_by_committed_errors;
use crate::finding::Finding;
use crate::random::Random;
use crate::request::{Door, EVERY_DOOR, Ends, Request, SAFE_TO_DROP, is_over_http};
use crate::stage::Stage;
use crate::world::{Least, World, pool};

const CLIENTS: usize = 6;
/// One call in so many is a mistake. The others find what it has left.
const MISTAKES: u64 = 5;
/// A call within a transaction is polled some 8 times.
const MOST_POLLS: u64 = 12;
const ENDS: &[Ends] = &[Ends::Commit, Ends::CommitAndBegin, Ends::Rollback, Ends::DroppedBegin];

const LEAST: Least = &[
    ("committed after a dropped call", 1),
    ("committed after an error", 1),
    ("COMMIT in perform", 1),
    ("COMMIT and BEGIN in perform", 1),
    ("ROLLBACK in perform", 1),
    ("nested begin dropped in perform", 1),
];

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, LEAST).await?;
    let mut callers = Callers::start(&world, Way::Transaction(choose), pool(&world.options, 8), "c", CLIENTS);
    callers.end().await?;
    callers.settle().await?;
    let left = left_by_committed_errors(&world.history.calls(), &world.aftermath().await?);
    Ok(world
        .finding(left.violations)
        .note(format!("{} keys indeterminate", left.indeterminate))
        .note(format!("{} effects apart, written by a perform that had ended its transaction", left.apart)))
}

fn choose(random: &mut Random, request: &mut Request) {
    if !random.one_in(MISTAKES) {
        request.enter(random, EVERY_DOOR);
        return;
    }
    (request.fails, request.door) = (false, Door::Careless);
    // The layer's transaction is no caller's to commit.
    match if is_over_http(&request.key) { 3 } else { random.below(4) } {
        0 => request.fails = true,
        1 => request.polls = usize::try_from(random.below(MOST_POLLS)).ok(),
        2 => request.ends = Some(random.of(ENDS)),
        _ => {
            request.ends = Some(random.of(ENDS));
            request.enter(random, SAFE_TO_DROP);
        }
    }
}
