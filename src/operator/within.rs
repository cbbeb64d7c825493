//! A bound on the time of an operator's question or decision.

use std::time::Duration;

use crate::Error;
use crate::session::answered;

/// Runs one of the functions of this module, or of [`migrate`](crate::migrate()) and [`protect`](crate::protect()), for at
/// most `limit`. After that it closes their connection, and returns [`Error::Unanswered`]: nobody knows whether a decision
/// was made.
///
/// The functions themselves wait without a limit, because nobody can say how long it takes to read a whole table. If a
/// network vanishes without a word, TCP may never notice. `tokio::time::timeout` ends that wait, too, but the connection
/// then keeps its place in the pool.
///
/// ```no_run
/// # use std::time::Duration;
/// # use pg_idempotency::{Error, operator};
/// # async fn f(pool: &sqlx::PgPool) -> Result<(), Error> {
/// let stats = operator::within(Duration::from_secs(10), operator::stats(pool)).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// Those of `work`, and [`Error::Unanswered`].
///
/// # Cancellation
///
/// As `work`.
pub async fn within<R>(limit: Duration, work: impl Future<Output = Result<R, Error>>) -> Result<R, Error> {
    answered(limit, work).await
}
