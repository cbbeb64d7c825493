//! Waits that end. A wait for the server ends even if the network drops all packets. A wait for another call holds no
//! connection.
//!
//! sqlx sets no TCP keepalive. If a connection vanishes silently, a statement on this connection waits for a quarter of
//! an hour, until TCP gives up. If TCP has acknowledged the statement, the wait has no end.

use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::runtime;
use tokio::time::{Instant, sleep, sleep_until};

use crate::Error;
use crate::background::jittered;

/// The longest wait for a claim, or for a completion with its COMMIT. A server that takes longer counts as lost. A
/// shorter limit would leave more sessions behind on a server whose COMMIT waits for a standby.
pub(crate) const ANSWER_TIME: Duration = Duration::from_secs(30);

/// Runs a function of [`operator`](crate::operator), [`migrate`](crate::migrate()) or [`protect`](crate::protect()),
/// for at most `limit`. After that time, `bounded` closes the connection of the function, and returns
/// [`Error::Unanswered`]. After this error, it is unknown whether a decision was made.
///
/// Without `bounded`, these functions wait without a limit, because the time to read a whole table is not known in
/// advance. If the network vanishes silently, TCP may never notice. `tokio::time::timeout` also ends such a wait, but
/// the connection then keeps its place in the pool.
///
/// `bounded` closes the connections that `work` owns. A connection or a transaction that `work` only borrows stays
/// open, and keeps the statements that `work` has sent. So move the connection into `work`, or drop the connection
/// after [`Error::Unanswered`].
///
/// ```no_run
/// # use std::time::Duration;
/// # use pg_idempotency::{Error, operator};
/// # async fn f(pool: &sqlx::PgPool) -> Result<(), Error> {
/// let stats = operator::bounded(Duration::from_secs(10), operator::stats(pool)).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// The errors of `work`, and [`Error::Unanswered`].
///
/// # Cancellation
///
/// If the future is dropped, `work` is dropped.
pub fn bounded<R, E: From<Error>>(
    limit: Duration,
    work: impl Future<Output = Result<R, E>>,
) -> impl Future<Output = Result<R, E>> {
    let bounded = or_closed(limit, work);
    async { bounded.await.unwrap_or_else(|| Err(Error::Unanswered.into())) }
}

/// Does the same as [`bounded`], for any work. Returns `None` if the work takes longer than `limit`.
pub(crate) fn or_closed<R>(limit: Duration, work: impl Future<Output = R>) -> impl Future<Output = Option<R>> {
    // The timer is made inside a future, because the timer needs a runtime.
    ended_or_closed(async move { sleep(limit).await }, work)
}

/// Runs `work`. If `end` is ready first, closes the connections of the work and returns `None`.
pub(crate) fn ended_or_closed<R>(
    end: impl Future<Output = ()>,
    work: impl Future<Output = R>,
) -> impl Future<Output = Option<R>> {
    // The work is boxed before the first await. Otherwise the caller's future would reserve space for several copies of
    // `work`.
    let mut work = Box::pin(work);
    async move {
        let mut end = pin!(end);
        // The work is polled first, so that a result that is ready in time counts.
        let ended = poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(result) => Poll::Ready(Some(result)),
            Poll::Pending => end.as_mut().poll(context).map(|()| None),
        })
        .await;
        if ended.is_none() {
            outside_the_pool(|| drop(work));
        }
        ended
    }
}

/// Calls `drop_them`, and closes the connections of a pool that `drop_them` drops.
///
/// When a connection is dropped, sqlx spawns a task, which pings the server and returns the connection to the pool. On
/// a vanished connection, this ping has no end, and the connection would keep its place in the pool. A connection
/// inside a future cannot be taken out, closed or detached. But sqlx spawns the task on the current runtime. In this
/// function, the current runtime never runs, so the task is dropped together with the connection. The drop closes the
/// socket and frees the place in the pool, without sending or awaiting anything.
fn outside_the_pool(drop_them: impl FnOnce()) {
    match runtime::Builder::new_current_thread().build() {
        Ok(never_run) => {
            let entered = never_run.enter();
            drop_them();
            drop(entered);
            // Dropping the runtime inside another runtime would panic.
            never_run.shutdown_background();
        }
        Err(_) => drop_them(),
    }
}

/// The pauses between two polls, from the first pause to the longest. A person does not notice such a pause, and the
/// database has few polls to answer.
const PAUSES: Range<Duration> = Duration::from_millis(50)..Duration::from_millis(500);

/// How a call waits for another call without holding a connection. The waiting call tries to claim the key, gives its
/// connection back, pauses, and tries again.
pub(crate) trait Polls {
    /// Pauses, and returns whether the call should try again.
    fn pause(&mut self) -> impl Future<Output = bool> + Send;
}

/// The pauses of one call that polls. Each pause is twice as long as the pause before it, up to the longest pause.
pub(crate) struct Pauses(Duration);

pub(crate) struct PollsUntil {
    deadline: Instant,
    pauses: Pauses,
}

impl Default for Pauses {
    fn default() -> Self {
        Self(PAUSES.start)
    }
}

impl Pauses {
    pub(crate) fn next(&mut self) -> Duration {
        let pause = jittered(self.0);
        self.0 = (self.0 * 2).min(PAUSES.end);
        pause
    }
}

impl PollsUntil {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self { deadline, pauses: Pauses::default() }
    }
}

impl Polls for PollsUntil {
    async fn pause(&mut self) -> bool {
        if Instant::now() >= self.deadline {
            return false;
        }
        sleep_until((Instant::now() + self.pauses.next()).min(self.deadline)).await;
        true
    }
}
