//! Many at once.

use std::future::{Future, poll_fn};
use std::task::Poll;

use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::time::timeout;

use super::gate::PATIENCE;
use crate::Error;

/// Makes the same call so many times at once, on a pool of so many connections, all of them open before the first call begins;
/// gives what each of them answered.
///
/// The pool is the race's own, to the same database: the five connections of `#[sqlx::test]` would make most of the calls
/// queue, and race against nobody.
///
/// ```no_run
/// # use pg_idempotency::{Error, Idempotency, Key, testing::{assert_performed_once, race}};
/// # async fn f(pool: sqlx::PgPool, key: Key) -> Result<(), Error> {
/// let answers = race(&pool, 20, async |pool| {
///     Idempotency::new().run(pool, &key, "tea", async |_| -> Result<i32, Error> { Ok(17) }).await
/// })
/// .await?;
/// assert_eq!(assert_performed_once(answers), 17);
/// # Ok(()) }
/// ```
///
/// All calls run in the task of the caller, and wait for the database beside each other; one that blocks its thread blocks
/// all.
///
/// # Errors
///
/// The database's, where it has not so many connections to give.
pub async fn race<T>(pool: &PgPool, calls: u32, call: impl AsyncFn(&PgPool) -> T) -> Result<Vec<T>, Error> {
    let options = PgPoolOptions::new().max_connections(calls.max(1)).acquire_timeout(PATIENCE);
    let wide = options.connect_with(pool.connect_options().as_ref().clone()).await?;
    let mut open = Vec::new();
    for _ in 0..calls {
        open.push(wide.acquire().await?);
    }
    drop(open);

    let answers = all((0..calls).map(|_| call(&wide))).await;
    // A run that outlives its call, as those of the HTTP layer may, holds a connection; to close waits for it.
    let _ = timeout(PATIENCE, wide.close()).await;
    Ok(answers)
}

/// Polls all of them until the last is ready; the answers are in the order of the calls.
async fn all<F: Future>(calls: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut calls: Vec<_> = calls.map(|call| (Box::pin(call), None)).collect();
    poll_fn(|context| {
        let mut pending = false;
        for (call, answer) in calls.iter_mut().filter(|(_, answer)| answer.is_none()) {
            match call.as_mut().poll(context) {
                Poll::Ready(ready) => *answer = Some(ready),
                Poll::Pending => pending = true,
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    calls.into_iter().filter_map(|(_, answer)| answer).collect()
}
