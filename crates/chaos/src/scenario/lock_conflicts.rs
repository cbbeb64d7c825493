//! Transactions with two keys, in any order and at any isolation level: deadlocks and serialization failures. Only here do
//! transactions with several keys meet.

use sqlx::{Executor as _, PgPool};

use crate::callers::{Callers, Way};
use crate::finding::Finding;
use crate::history::What;
use crate::random::Random;
use crate::request::{Failure, ending};
use crate::stage::Stage;
use crate::subject::within;
use crate::world::{Least, World, pool};

const CLIENTS: u32 = 6;
const ISOLATION: &[&str] = &[
    "set transaction isolation level read committed",
    "set transaction isolation level repeatable read",
    "set transaction isolation level serializable",
];

const LEAST: Least = &[("deadlock", 1), ("serialization failure", 10)];

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, LEAST).await?;
    // The server finds a deadlock after this time.
    let pool = pool(&world.options.clone().options([("deadlock_timeout", "10ms")]), CLIENTS);
    let mut callers = Callers::none(&world, Way::Transaction(|_, _| ()), pool.clone());
    for client in 0..CLIENTS {
        let (world, pool) = (world.clone(), pool.clone());
        callers.spawn(async move {
            let mut random = world.random(&format!("c{client}"));
            let mut number = 0;
            while !world.is_over() {
                number += 1;
                call_two(&world, &pool, &format!("c{client}/{number}"), &mut random).await;
            }
        });
    }
    callers.finding().await
}

/// Makes two calls in one transaction.
async fn call_two(world: &World, pool: &PgPool, name: &str, random: &mut Random) {
    let first = world.request(&world.choose_key(random), &format!("{name}.a"));
    let second = world.request(&world.choose_key(random), &format!("{name}.b"));
    if first.key == second.key {
        return;
    }
    for request in [&first, &second] {
        world.invoked(&request.call, &request.key);
    }
    let isolation = random.of(ISOLATION);
    let both = async {
        let mut tx = pool.begin().await?;
        tx.execute(isolation).await?;
        let one = within(world.mutant, &mut tx, &first).await;
        let two = match &one {
            Ok(_) => within(world.mutant, &mut tx, &second).await,
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
            let end = |result: Result<_, Failure>| {
                note(world, &result);
                if result.is_ok() { What::Refused("rolled back".to_owned()) } else { ending(result) }
            };
            (end(one), end(two))
        }
        // After a serialization failure at COMMIT nothing is stored. After another error it may be.
        Err(error) => (What::Unknown(error.to_string()), What::Unknown(error.to_string())),
    };
    world.ended(&first.call, &first.key, one);
    world.ended(&second.call, &second.key, two);
}

fn note<T>(world: &World, result: &Result<T, Failure>) {
    if let Err(Failure::Of(pg_idempotency::Error::Retryable(cause))) = result {
        let code = cause.as_database_error().and_then(|error| error.code());
        world.fault(if code.as_deref() == Some("40P01") { "deadlock" } else { "serialization failure" });
    }
}
