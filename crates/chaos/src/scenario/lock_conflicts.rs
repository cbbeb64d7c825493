//! Transactions with two keys in any order and at any isolation level: deadlocks and serialization failures, and
//! callers who start over.

use std::sync::Arc;

use futures_util::future::join_all;
use pg_idempotency::Error;
use sqlx::{Executor as _, PgPool};

use crate::history::What;
use crate::random::Random;
use crate::stage::{Finding, Stage};
use crate::subject::{Failure, Request, ending};
use crate::world::{Least, World, pool};

const CLIENTS: u32 = 6;
const ISOLATION: &[&str] = &[
    "set transaction isolation level read committed",
    "set transaction isolation level repeatable read",
    "set transaction isolation level serializable",
];

const LEAST: Least = &[("deadlock", 1), ("serialization failure", 10)];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "lock-conflicts", LEAST).await?;
    // A deadlock is found after so long, and each costs it.
    let pool = pool(&world.options.clone().options([("deadlock_timeout", "10ms")]), CLIENTS);
    let clients = (0..CLIENTS).map(|client| {
        let (world, pool) = (world.clone(), pool.clone());
        tokio::spawn(async move {
            let name = format!("c{client}");
            let mut random = world.random(&name);
            let mut number = 0;
            while !world.is_over() {
                number += 1;
                call_two(&world, &pool, &format!("{name}/{number}"), &mut random).await;
            }
        })
    });
    for client in join_all(clients).await {
        client?;
    }
    pool.close().await;
    Finding::of(&world).await
}

/// One transaction, two calls, one end.
async fn call_two(world: &Arc<World>, pool: &PgPool, name: &str, random: &mut Random) {
    let first = Request::new(&world.choose_key(random), &format!("{name}.a"));
    let second = Request::new(&world.choose_key(random), &format!("{name}.b"));
    if first.key == second.key {
        return;
    }
    for request in [&first, &second] {
        world.history.add(&request.call, &request.key, What::Invoked);
    }
    let isolation = random.of(ISOLATION);
    let both = async {
        let mut tx = pool.begin().await?;
        tx.execute(isolation).await?;
        let one = world.subject.within(&mut tx, &first).await;
        let two = match &one {
            Ok(_) => world.subject.within(&mut tx, &second).await,
            Err(_) => Err(Failure::AskedFor),
        };
        if one.is_ok() && two.is_ok() {
            tx.commit().await?;
        } else {
            tx.rollback().await?;
        }
        Ok::<_, sqlx::Error>((one, two))
    };
    let (one, two) = match both.await {
        Ok((Ok(one), Ok(two))) => (ending(Ok(one)), ending(Ok(two))),
        Ok((one, two)) => {
            let undone = What::Refused("rolled back".to_owned());
            let end = |result: Result<_, Failure>| {
                note(world, &result);
                if result.is_ok() { undone.clone() } else { ending(result) }
            };
            (end(one), end(two))
        }
        // A serialization failure at COMMIT among them, which has undone all; anything else may not have.
        Err(error) => {
            let result = || Err(Failure::from(sqlx::Error::Protocol(error.to_string())));
            (ending(result()), ending(result()))
        }
    };
    world.history.add(&first.call, &first.key, one);
    world.history.add(&second.call, &second.key, two);
}

fn note<T>(world: &World, result: &Result<T, Failure>) {
    if let Err(Failure::Of(Error::Retryable(cause))) = result {
        let code = cause.as_database_error().and_then(|error| error.code());
        world.fault(if code.as_deref() == Some("40P01") { "deadlock" } else { "serialization failure" });
    }
}
