//! Many calls at once.

use std::future::{Future, poll_fn};
use std::task::Poll;

use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::time::timeout;

use super::gate::PATIENCE;
use crate::Error;

/// Makes `calls` calls at once, and returns all answers.
///
/// The race has a pool of its own to the same database, with a connection for each call. All connections are open
/// before the first call begins. On the five connections of `#[sqlx::test]` most calls would queue instead of racing.
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
/// All calls run in the caller's task and wait for the database concurrently. A call that blocks its thread blocks all
/// others.
///
/// # Errors
///
/// Errors of the database, for instance if it has too few connections.
pub async fn race<T>(pool: &PgPool, calls: u32, call: impl AsyncFn(&PgPool) -> T) -> Result<Vec<T>, Error> {
    let options = PgPoolOptions::new().max_connections(calls.max(1)).acquire_timeout(PATIENCE);
    let wide = options.connect_with(pool.connect_options().as_ref().clone()).await?;
    let mut open = Vec::new();
    for _ in 0..calls {
        open.push(wide.acquire().await?);
    }
    drop(open);

    let answers = all((0..calls).map(|_| call(&wide))).await;
    // A run of the HTTP layer may outlive its call and hold a connection. `close` waits for it.
    let _ = timeout(PATIENCE, wide.close()).await;
    Ok(answers)
}

/// Polls all calls until the last one is ready. The answers are in the order of the calls.
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
