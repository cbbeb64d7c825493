//! Callers who commit although the call has failed or was dropped, and a `perform` that ends its transaction: none of
//! them is acknowledged, and a claim that is committed so is indeterminate for all who come later.

use futures_util::future::join_all;
use pg_idempotency::testing::cancel_after;
use pg_idempotency::{Error, Outcome};
use sqlx::PgPool;
use tokio::time::sleep;

use crate::error_checker::left_by_committed_errors;
use crate::history::What;
use crate::random::Random;
use crate::stage::{Finding, Stage};
use crate::subject::{EVERY_DOOR, Ends, Failure, Request, SAFE_TO_DROP, ending};
use crate::world::{Least, PAUSE, World, pool};

const CLIENTS: usize = 6;
/// One call in so many: the others find what it has left.
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

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "committed-errors", LEAST).await?;
    let pool = pool(&world.options, 8);
    let clients = (0..CLIENTS).map(|client| {
        let (world, pool) = (world.clone(), pool.clone());
        tokio::spawn(async move {
            let name = format!("c{client}");
            let mut random = world.random(&name);
            let mut number = 0;
            while !world.is_over() {
                number += 1;
                let mut request = Request::new(&world.choose_key(&mut random), &format!("{name}/{number}"));
                world.history.add(&request.call, &request.key, What::Invoked);
                let what = if random.one_in(MISTAKES) {
                    mistake(&world, &pool, &mut request, &mut random).await
                } else {
                    request.door = random.of(EVERY_DOOR);
                    request.fails = random.one_in(16);
                    world.subject.call(&pool, &request).await
                };
                let answered = matches!(what, What::Performed(_) | What::Replayed(_));
                world.history.add(&request.call, &request.key, what);
                if !answered {
                    sleep(PAUSE).await;
                }
            }
        })
    });
    for client in join_all(clients).await {
        client?;
    }
    pool.close().await;
    world.settle().await?;
    let left = left_by_committed_errors(&world.history.calls(), &world.aftermath().await?);
    Ok(Finding::with(&world, left.violations)
        .note(format!("{} keys indeterminate", left.indeterminate))
        .note(format!("{} effects apart, written by a perform that had ended its transaction", left.apart)))
}

/// Makes one, at random, and tells what the caller may conclude.
async fn mistake(world: &World, pool: &PgPool, request: &mut Request, random: &mut Random) -> What {
    let told = match random.below(4) {
        0 => {
            request.fails = true;
            commit_all_the_same(world, pool, request, usize::MAX).await
        }
        1 => {
            let polls = usize::try_from(random.below(MOST_POLLS)).unwrap_or_default();
            commit_all_the_same(world, pool, request, polls).await
        }
        2 => {
            request.ends = Some(random.of(ENDS));
            commit_all_the_same(world, pool, request, usize::MAX).await
        }
        _ => {
            request.ends = Some(random.of(ENDS));
            request.door = random.of(SAFE_TO_DROP);
            Some(world.subject.attempt(pool, request).await)
        }
    };
    let Some(told) = told else {
        world.fault("committed after a dropped call");
        return What::Unknown("dropped".to_owned());
    };
    match (told, request.ends) {
        (Err(Failure::AskedFor), _) => {
            world.fault("committed after an error");
            What::Unfinished
        }
        (Err(Failure::Torn | Failure::Of(Error::NotInTransaction)), Some(ends)) => {
            world.fault(match ends {
                Ends::Commit => "COMMIT in perform",
                Ends::CommitAndBegin => "COMMIT and BEGIN in perform",
                Ends::Rollback => "ROLLBACK in perform",
                Ends::DroppedBegin => "nested begin dropped in perform",
            });
            if ends.commits() { What::Unfinished } else { What::Refused("torn".to_owned()) }
        }
        (told, _) => ending(told),
    }
}

/// A call in a transaction of the caller's, who commits whatever he is told. `None` where the call was dropped.
async fn commit_all_the_same(
    world: &World,
    pool: &PgPool,
    request: &Request,
    polls: usize,
) -> Option<Result<Outcome<String>, Failure>> {
    let both = async {
        let mut tx = pool.begin().await?;
        let told = cancel_after(polls, world.subject.within(&mut tx, request)).await;
        tx.commit().await?;
        Ok::<_, sqlx::Error>(told)
    };
    match both.await {
        Ok(told) => told,
        Err(error) => Some(Err(error.into())),
    }
}
