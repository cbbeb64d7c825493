//! The loop that resumes the operations of callers who never come back.

use std::fmt::Display;
use std::pin::pin;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgPool;

use super::handle::Lease;
use super::options::LeaseOptions;
use super::resume::Resumed;
use crate::Error;
use crate::background::{Next, Passes, caught};
use crate::limits::is_in;
use crate::observe::Failure;

/// A search costs one statement on a small index. Callers have waited for longer already.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);
/// As for the janitor.
pub(crate) const INTERVALS: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(24 * 60 * 60);

/// Finishes the operations whose callers never come back.
///
/// ```no_run
/// # use std::num::NonZeroU32;
/// # use std::time::Duration;
/// # use pg_idempotency::Error;
/// # use pg_idempotency::lease::{Lease, LeaseOptions, Policy, Resumer};
/// # async fn ride(_: &Lease, _: String) -> Result<String, Error> { Ok(String::new()) }
/// # async fn f(pool: sqlx::PgPool, shutdown: impl Future<Output = ()> + Send + 'static) -> anyhow::Result<()> {
/// let leasing = LeaseOptions::new(Policy::InSteps { lease: Duration::from_secs(40) })
///     .store_request(true)
///     .max_attempts(NonZeroU32::new(10).expect("ten"));
/// let resumer = Resumer::new(leasing, "create_ride")?;
/// tokio::spawn(async move {
///     resumer.run(&pool, shutdown, async |lease: &Lease, body: String| ride(lease, body).await).await
/// });
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Resumer {
    leasing: LeaseOptions,
    operation: String,
    interval: Duration,
}

impl Resumer {
    /// A resumer for the operations of one name. The callers and the resumer use the same options.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] under `AtMostOnce`, or without [`LeaseOptions::max_attempts`].
    pub fn new(leasing: LeaseOptions, operation: &str) -> Result<Self, Error> {
        leasing.resumable_attempts()?;
        Ok(Self { leasing, operation: operation.to_owned(), interval: INTERVAL })
    }

    /// Sets the pause after a search that found nothing. The default is 10 seconds.
    ///
    /// # Panics
    ///
    /// Under 100 ms or over a day.
    #[must_use]
    #[track_caller]
    pub fn interval(self, interval: Duration) -> Self {
        assert!(is_in(&INTERVALS, interval), "the interval of a resumer must be between 100 ms and a day");
        Self { interval, ..self }
    }

    /// Resumes one operation after the other until `shutdown` is ready. Then it finishes the operation in progress, and
    /// ends. Run one in each process of a fleet, or one for all: several share the work.
    ///
    /// It logs errors and panics, and goes on: after an operation that failed with the next one, and after an error of
    /// the database or a panic at first after a second. A panic of the work ends its attempt as an error does.
    ///
    /// # Cancellation
    ///
    /// The operation in progress lapses, as after a crash.
    pub async fn run<B, T, E, W>(self, pool: &PgPool, shutdown: impl Future<Output = ()> + Send, work: W)
    where
        B: DeserializeOwned,
        T: Serialize + DeserializeOwned,
        E: From<Error> + Display,
        W: AsyncFnOnce(&Lease, B) -> Result<T, E> + Clone,
    {
        let (operation, shutdown) = (self.operation.as_str(), pin!(shutdown));
        let what = "a search for operations to resume";
        let mut passes = Passes::of(what, Some(operation), self.interval, shutdown);
        while passes.next().await {
            let pass = async {
                Ok(match self.leasing.resume(pool, operation, &mut passes.shutdown, work.clone()).await? {
                    Resumed::Nothing => Next::LATER,
                    Resumed::Completed(_) => Next::AtOnce,
                    Resumed::Failed(Failure::Panicked(_)) => {
                        tracing::error!(operation, "a resumed operation panicked, and its next attempt comes later");
                        Next::AfterError
                    }
                    Resumed::Failed(failure) => {
                        tracing::warn!(
                            operation,
                            error = %format_args!("{:#}", failure.into_callers()),
                            "a resumed operation failed, and its next attempt comes later"
                        );
                        Next::AtOnce
                    }
                })
            };
            let ended = caught(pass).await;
            passes.ended(ended);
        }
    }
}
