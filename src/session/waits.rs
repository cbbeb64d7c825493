//! Waits that end: for the server, also if the network drops all packets, and for another call, without a connection.
//!
//! sqlx sets no TCP keepalive. If a connection vanishes without a word, a statement on it waits until TCP gives up,
//! which takes a quarter of an hour. If TCP has acknowledged the statement, the wait has no end.

use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::runtime;
use tokio::time::{Instant, sleep, sleep_until};

use crate::Error;
use crate::background::jittered;

/// The longest wait for a claim, or for a completion with its COMMIT. A server that takes longer for one of them is as
/// good as away. A shorter limit would leave more sessions behind on a server whose COMMIT waits for a standby.
pub(crate) const ANSWER_TIME: Duration = Duration::from_secs(30);

/// Runs one of the functions of [`operator`](crate::operator), or of [`migrate`](crate::migrate()) and
/// [`protect`](crate::protect()), for at most `limit`. After that it closes their connection, and returns
/// [`Error::Unanswered`]: it is unknown whether a decision was made.
///
/// The functions themselves wait without a limit, because the time to read a whole table is not known in advance. If a
/// network vanishes without a word, TCP may never notice. `tokio::time::timeout` ends that wait, too, but the
/// connection then keeps its place in the pool.
///
/// It closes the connections that `work` owns. A connection or a transaction that `work` only borrows stays open, with
/// whatever `work` has sent: move it into `work`, or drop it after [`Error::Unanswered`].
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
/// Those of `work`, and [`Error::Unanswered`].
///
/// # Cancellation
///
/// As `work`.
pub fn bounded<R, E: From<Error>>(
    limit: Duration,
    work: impl Future<Output = Result<R, E>>,
) -> impl Future<Output = Result<R, E>> {
    let bounded = or_closed(limit, work);
    async { bounded.await.unwrap_or_else(|| Err(Error::Unanswered.into())) }
}

/// As [`bounded`], for any work. `None` if the time is over.
pub(crate) fn or_closed<R>(limit: Duration, work: impl Future<Output = R>) -> impl Future<Output = Option<R>> {
    // Asynchronous, because the timer needs a runtime.
    ended_or_closed(async move { sleep(limit).await }, work)
}

/// Runs `work` until `end` is ready, and closes the connections of the work then. `None` if `end` was first.
pub(crate) fn ended_or_closed<R>(
    end: impl Future<Output = ()>,
    work: impl Future<Output = R>,
) -> impl Future<Output = Option<R>> {
    // Boxed before the first await: otherwise the caller's future would have room for the work several times.
    let mut work = Box::pin(work);
    async move {
        let mut end = pin!(end);
        // The work first: what has ended in time counts.
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

/// Calls `drop_them`, which drops connections of a pool, and closes these connections.
///
/// When a connection is dropped, sqlx spawns a task, which pings the server and returns the connection to the pool. On
/// a vanished connection this ping has no end, and the connection would keep its place in the pool. A connection inside
/// a future cannot be taken out, closed or detached. But the task is spawned on the current runtime. Here this is a
/// runtime that never runs, so the task is dropped with its connection: the socket is closed, no word is sent, nothing
/// is awaited, and the place is free.
fn outside_the_pool(drop_them: impl FnOnce()) {
    match runtime::Builder::new_current_thread().build() {
        Ok(never_run) => {
            let entered = never_run.enter();
            drop_them();
            drop(entered);
            // Dropping it would panic inside another runtime.
            never_run.shutdown_background();
        }
        Err(_) => drop_them(),
    }
}

/// The pause between two polls. A person does not notice this pause, and the database has few polls to answer.
const PAUSES: Range<Duration> = Duration::from_millis(50)..Duration::from_millis(500);

/// How a call waits for another one without a connection: it asks, gives the connection back, pauses, and asks again.
pub(crate) trait Polls {
    /// Pauses, and returns whether to ask again.
    fn rest(&mut self) -> impl Future<Output = bool> + Send;
}

/// The pauses of one call that polls. Each is twice as long as the one before.
pub(crate) struct Pauses(Duration);

/// Polls until a deadline.
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
    async fn rest(&mut self) -> bool {
        if Instant::now() >= self.deadline {
            return false;
        }
        sleep_until((Instant::now() + self.pauses.next()).min(self.deadline)).await;
        true
    }
}
