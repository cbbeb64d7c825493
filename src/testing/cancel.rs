//! Dropping a future before it is ready.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

/// Polls a future at most `polls` times, then drops it. `None` means that it was dropped.
///
/// A client that hangs up, a `timeout` and a `select!` all drop a call at one of its polls. To cover every such point,
/// try 0, 1, 2 … polls until the call completes, and check each time that nothing is half done:
///
/// ```no_run
/// # use pg_idempotency::{Error, Key, testing::cancel_after};
/// # async fn place_order(_: &sqlx::PgPool, _: &Key) -> Result<i32, Error> { Ok(17) }
/// # async fn f(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// for polls in 0.. {
///     let key = Key::new("user:1", "POST /orders", format!("after {polls} polls"))?;
///     let cancelled = cancel_after(polls, place_order(&pool, &key)).await.transpose()?.is_none();
///     // Whether the first call performed or not, the retry finds the order or makes it.
///     place_order(&pool, &key).await?;
///     if !cancelled {
///         break;
///     }
/// }
/// # Ok(()) }
/// ```
///
/// ```
/// # use pg_idempotency::testing::cancel_after;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let call = || async {
///     tokio::task::yield_now().await;
///     "done"
/// };
/// assert_eq!(cancel_after(1, call()).await, None);
/// assert_eq!(cancel_after(2, call()).await, Some("done"));
/// # }
/// ```
pub async fn cancel_after<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut polled = 0;
    poll_fn(move |context| {
        if polled == polls {
            return Poll::Ready(None);
        }
        polled += 1;
        let result = future.as_mut().poll(context).map(Some);
        // This was the last poll. A future that has not ended is dropped at once, without waiting for it to be
        // woken.
        if result.is_pending() && polled == polls {
            return Poll::Ready(None);
        }
        result
    })
    .await
}
