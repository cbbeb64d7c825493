//! Many calls of one key at a time, in transactions of the callers', half of whose owners roll back: nobody under
//! Reject waits, and what a call leaves in its transaction is the caller's `lock_timeout`, and no lock where it
//! replayed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::join_all;
use pg_idempotency::{Error, Outcome};
use sqlx::{Executor as _, PgPool};

use crate::history::What;
use crate::random::Random;
use crate::stage::{Finding, Stage};
use crate::subject::{Failure, Request, ending};
use crate::world::{World, pool};

const CLIENTS: u64 = 8;
const LEAST: &[(&str, u64)] = &[("rolled back", 20), ("slow owner", 2)];
/// Longer than the wait of a call, so that what is not put back shows.
const CALLERS: &str = "7s";
/// Of the caller's under Reject: a call that waits for an owner who sleeps fails by it.
const REJECTING: &str = "1s";
const SLEEP: &str = "select pg_sleep(2)";

/// What the transactions looked like after a call.
#[derive(Default)]
struct Left {
    replays: AtomicU64,
    replays_with_a_lock: AtomicU64,
    other_lock_timeout: AtomicU64,
    rejecting_that_waited: AtomicU64,
}

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "bounded-waits", LEAST).await?;
    let pool = pool(&world.options, u32::try_from(CLIENTS)?);
    let (left, asked) = (Arc::new(Left::default()), Arc::new(AtomicU64::new(0)));
    let clients = (0..CLIENTS).map(|client| {
        let (world, pool, left, asked) = (world.clone(), pool.clone(), left.clone(), asked.clone());
        tokio::spawn(async move {
            let name = format!("c{client}");
            let mut random = world.random(&name);
            let mut number = 0;
            while !world.is_over() {
                number += 1;
                let key = format!("k{}", asked.fetch_add(1, Ordering::Relaxed) / CLIENTS);
                let mut request = Request::new(&key, &format!("{name}/{number}"));
                request.reject = random.one_in(3);
                request.fails = random.one_in(2);
                world.history.add(&request.call, &request.key, What::Invoked);
                let what = match call(&world, &pool, &request, &left, &mut random).await {
                    Ok(result) => ending(result),
                    Err(error) => ending(Err(error.into())),
                };
                world.history.add(&request.call, &request.key, what);
            }
        })
    });
    for client in join_all(clients).await {
        client?;
    }
    pool.close().await;
    let mut finding = Finding::of(&world).await?;
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (replays, locked) = (count(&left.replays), count(&left.replays_with_a_lock));
    // A claim that got the lock just when the owner had committed keeps it; such a moment is rare.
    if locked >= 10 && locked * 5 > replays {
        finding.violations.push(format!("{locked} of {replays} replays hold an advisory lock"));
    }
    for (count, what) in [
        (count(&left.other_lock_timeout), "calls have left another lock_timeout behind"),
        (count(&left.rejecting_that_waited), "calls under Reject have waited for an owner"),
    ] {
        if count > 0 {
            finding.violations.push(format!("{count} {what}"));
        }
    }
    Ok(finding.note(format!("{locked} of {replays} replays hold an advisory lock")))
}

/// One call in a transaction, which ends as the call says.
async fn call(
    world: &World,
    pool: &PgPool,
    request: &Request,
    left: &Left,
    random: &mut Random,
) -> sqlx::Result<Result<Outcome<String>, Failure>> {
    let mut tx = pool.begin().await?;
    let callers = if request.reject { REJECTING } else { CALLERS };
    sqlx::query("select set_config('lock_timeout', $1, true)").bind(callers).execute(&mut *tx).await?;
    let result = world.subject.within(&mut tx, request).await;
    match &result {
        Err(Failure::AskedFor) => world.fault("rolled back"),
        Err(Failure::Of(Error::Database(error))) if request.reject => {
            let code = error.as_database_error().and_then(|error| error.code());
            if code.as_deref() == Some("55P03") {
                left.rejecting_that_waited.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(_) | Err(Failure::Of(Error::InFlight { .. })) => {
            let (lock_timeout, locks): (String, i64) = sqlx::query_as(
                "select current_setting('lock_timeout'),
                    (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid())",
            )
            .fetch_one(&mut *tx)
            .await?;
            left.other_lock_timeout.fetch_add(u64::from(lock_timeout != callers), Ordering::Relaxed);
            if matches!(result, Ok(Outcome::Replayed(_))) {
                left.replays.fetch_add(1, Ordering::Relaxed);
                left.replays_with_a_lock.fetch_add(u64::from(locks > 0), Ordering::Relaxed);
            }
        }
        Err(_) => {}
    }
    if matches!(result, Ok(Outcome::Performed(_))) && random.one_in(12) {
        world.fault("slow owner");
        tx.execute(SLEEP).await?;
    }
    match &result {
        Ok(_) => tx.commit().await?,
        Err(_) => tx.rollback().await?,
    }
    Ok(result)
}
