//! The options of a reconciler, its loop, and the results of its visits.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::pin::pin;
use std::time::Duration;

use sqlx::PgPool;

use super::finding::{Finding, InDoubt};
use super::options::{LeaseOptions, Policy};
use crate::background::{Next, Passes, caught};
use crate::limits::{RETENTION, in_range, is_in};
use crate::route::has_names;
use crate::{Error, Misuse};

/// The default interval and time-out. A search costs one statement on a small index.
const DEFAULT_TIME: Duration = Duration::from_secs(10);
/// A provider that loses one answer in a hundred loses three in a row once in a million.
const LOOKS: u32 = 3;
/// With a quiet time of two minutes, the distances of ten looks add up to 17 hours.
const MOST_LOOKS: u32 = 10;

/// Settles operations at most once, and steps at most once, of which nobody knows whether they took effect. It asks the
/// other service with a function of yours.
///
/// **First ask whether the other service takes an idempotency key.** If it does, use at least once: nothing is in doubt
/// for as long as it remembers the key. The reconciler is for services that do not: mail, SMS, banks, printers,
/// warehouses. The guide's page `settle` draws when it looks, and names the risk that remains.
///
/// ```no_run
/// # use std::time::Duration;
/// # use pg_idempotency::lease::{Finding, InDoubt, LeaseOptions, Policy, Reconciler};
/// # struct Gateway;
/// # impl Gateway { async fn find(&self, _: &str) -> std::io::Result<Option<String>> { Ok(None) } }
/// # async fn f(pool: sqlx::PgPool, gateway: &'static Gateway, shutdown: impl Future<Output = ()> + Send + 'static) -> anyhow::Result<()> {
/// let policy = Policy::AtMostOnce { lease: Duration::from_secs(40) };
/// let leasing = LeaseOptions::new(policy).store_request(true);
/// // No request of a dead process takes effect later than two minutes after its lease has lapsed.
/// let reconciler = Reconciler::new(leasing, "sms.arrived", Duration::from_secs(120))?;
/// tokio::spawn(async move {
///     reconciler.run(&pool, shutdown, async |asked: &InDoubt| {
///         Ok::<_, anyhow::Error>(match gateway.find(asked.downstream_key()).await? {
///             Some(receipt) => Finding::took_effect(&receipt)?, // stored: every retry gets it
///             None => Finding::NoTrace,                         // after three such looks: released
///         })
///     }).await
/// });
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Reconciler {
    pub(super) leasing: LeaseOptions,
    pub(super) operation: String,
    pub(super) quiet: Duration,
    pub(super) distance: Duration,
    pub(super) looks: u32,
    pub(super) most_looks: u32,
    pub(super) give_up_after: Option<Duration>,
    pub(super) time_out: Duration,
    pub(super) dry_run: bool,
    interval: Duration,
}

/// What a visit did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Visit {
    /// Nothing is due.
    Nothing,
    /// It found operations that no reconciler had seen since they are in doubt. They are remembered, and asked for
    /// after the quiet time.
    Noted,
    /// It asked, and asks again later.
    Undecided,
    /// It took effect, and its answer is stored.
    Resolved,
    /// It left no trace at enough looks, and is released.
    Released,
    /// It is left to a person.
    GivenUp,
    /// Somebody else has decided meanwhile, or the owner is alive again.
    Overtaken,
    /// It took effect, but somebody has released it meanwhile. **The effect may happen twice.** Nothing was changed.
    Contradicted,
}

impl Visit {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Noted => "noted",
            Self::Undecided => "undecided",
            Self::Resolved => "resolved",
            Self::Released => "released",
            Self::GivenUp => "given_up",
            Self::Overtaken => "overtaken",
            Self::Contradicted => "contradicted",
        }
    }
}

impl Reconciler {
    /// A reconciler for the operations of one name. The callers and the reconciler use the same options. The operations
    /// of an HTTP layer without `operation` have no names of parameters, as in `POST /accounts/{}/text`: a `{name}` is
    /// logged as a warning, because a reconciler does not know the layer.
    ///
    /// `quiet` is the longest time after the lapse of a lease in which a request of its **dead** process can still take
    /// effect: the time-out of the HTTP client, the retries of proxies, the queue of the provider. There is no default,
    /// because only the service knows this time. It begins one lease after the first visit, because the lease may have
    /// lapsed only by a jump of the server's clock.
    ///
    /// # Errors
    ///
    /// [`Misuse`] under [`AtLeastOnce`](Policy::AtLeastOnce), or without [`LeaseOptions::store_request`], or for a
    /// quiet time under a millisecond or over half of the retention, or if settings of `leasing` contradict each other.
    pub fn new(leasing: LeaseOptions, operation: &str, quiet: Duration) -> Result<Self, Error> {
        leasing.check()?;
        if matches!(leasing.policy, Policy::AtLeastOnce { .. }) {
            let problem = "under Policy::AtLeastOnce nothing is in doubt; run a Resumer";
            return Err(Misuse::options(problem));
        }
        if !leasing.stored_request {
            // The search needs the index of the stored requests.
            let problem = "the claims do not store their requests; set LeaseOptions::store_request";
            return Err(Misuse::options(problem));
        }
        if has_names(operation) {
            tracing::warn!(
                operation,
                "the operation of a reconciler names a parameter; a layer without IdempotencyLayer::operation leaves \
                 the names out, as in POST /accounts/{{}}/pay, and this reconciler then finds nothing"
            );
        }
        let longest = Self::longest_time(&leasing);
        Ok(Self {
            leasing,
            operation: operation.to_owned(),
            quiet: in_range("quiet time", quiet, Self::distances(&leasing))?,
            distance: quiet,
            looks: LOOKS,
            most_looks: MOST_LOOKS,
            give_up_after: None,
            time_out: DEFAULT_TIME.min(longest),
            dry_run: false,
            interval: DEFAULT_TIME.min(longest),
        })
    }

    /// Each look remembers the record for the retention, and the next one must come before its end.
    pub(super) const fn distances(leasing: &LeaseOptions) -> RangeInclusive<Duration> {
        Duration::from_millis(1)..=leasing.retention.checked_div(2).expect("two is not zero")
    }

    /// A killed owner's record is remembered for one lease after the lapse, and the first visit must come before its
    /// end.
    fn longest_time(leasing: &LeaseOptions) -> Duration {
        leasing.policy.lease() / 2
    }

    /// How many looks in a row have to find no trace before the operation is released, and after how many looks it is
    /// left to a person if it is not settled. `Unknown`, a panic or a time-out begins the row anew. The defaults are 3
    /// and 10.
    ///
    /// # Panics
    ///
    /// Unless `no_trace` is between 2 and `most`. One look is not enough, because the first request may take effect
    /// after it.
    #[must_use]
    #[track_caller]
    pub fn looks(self, no_trace: u32, most: u32) -> Self {
        assert!(
            (2..=most).contains(&no_trace),
            "the looks without a trace must be at least 2, and at most as many as all looks"
        );
        Self { looks: no_trace, most_looks: most, ..self }
    }

    /// The distance between the first two looks. It doubles after each look, up to half of the retention. The default
    /// is the quiet time.
    ///
    /// [`run`](Self::run) refuses a distance over half of the retention.
    ///
    /// # Panics
    ///
    /// Under a millisecond or over ten years.
    #[must_use]
    #[track_caller]
    pub fn distance(self, distance: Duration) -> Self {
        assert!(is_in(&RETENTION, distance), "a distance must be between a millisecond and ten years");
        Self { distance, ..self }
    }

    /// Also leaves an operation to a person when it has been in doubt for this time; no distance is longer than what is
    /// left of it. The default is the number of looks alone.
    ///
    /// # Panics
    ///
    /// Under a millisecond or over ten years.
    #[must_use]
    #[track_caller]
    pub fn give_up_after(self, time: Duration) -> Self {
        assert!(is_in(&RETENTION, time), "the time after which to give up must be between a millisecond and ten years");
        Self { give_up_after: Some(time), ..self }
    }

    /// How long one look-up may take. After that it is dropped, and the looks without a trace are counted anew. The
    /// default is 10 seconds, or half of the lease if that is shorter.
    ///
    /// [`run`](Self::run) refuses a time over half of the lease: the first visit of another key waits for it.
    ///
    /// # Panics
    ///
    /// Under a millisecond or over ten years.
    #[must_use]
    #[track_caller]
    pub fn time_out(self, time_out: Duration) -> Self {
        assert!(is_in(&RETENTION, time_out), "a time-out must be between a millisecond and ten years");
        Self { time_out, ..self }
    }

    /// The pause after a search that found nothing. The default is 10 seconds, or half of the lease if that is shorter.
    ///
    /// [`run`](Self::run) refuses an interval over half of the lease: **a key in doubt must be visited once before it
    /// expires**, and a killed owner leaves at least one lease for that.
    ///
    /// # Panics
    ///
    /// Under a millisecond or over ten years.
    #[must_use]
    #[track_caller]
    pub fn interval(self, interval: Duration) -> Self {
        assert!(
            is_in(&RETENTION, interval),
            "the interval of a reconciler must be between a millisecond and ten years"
        );
        Self { interval, ..self }
    }

    /// Refuses settings that contradict each other.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.leasing.check()?;
        in_range("distance", self.distance, Self::distances(&self.leasing))?;
        let times = Duration::from_millis(1)..=Self::longest_time(&self.leasing);
        in_range("time-out", self.time_out, times.clone())?;
        in_range("interval", self.interval, times)?;
        Ok(())
    }

    /// Whether to ask and log only. A dry run counts no look, settles nothing and gives nothing up, so that a service
    /// can watch it for a week and then switch it on. Its looks are at the first distance, and prolong the time for
    /// which an operation in doubt is remembered. The default is `false`.
    #[must_use]
    pub fn dry_run(self, dry_run: bool) -> Self {
        Self { dry_run, ..self }
    }

    /// Looks at one operation after the other until `shutdown` is ready. Then it ends the look in progress, and ends.
    /// Run one in each process of a fleet: several share the work.
    ///
    /// It logs errors and panics, and goes on. The look-up returns an error only if the other service has said nothing:
    /// if it knows the operation, and its answer does not load, the finding is [`Unknown`](Finding::Unknown).
    ///
    /// # Errors
    ///
    /// [`Misuse`] at once, if settings contradict each other. It also logs this.
    ///
    /// # Cancellation
    ///
    /// Safe at every point. A look that nobody stored is made again after its distance.
    pub async fn run<E, F>(
        &self,
        pool: &PgPool,
        shutdown: impl Future<Output = ()> + Send,
        look_up: F,
    ) -> Result<(), Error>
    where
        E: Display,
        F: AsyncFnOnce(&InDoubt) -> Result<Finding, E> + Clone,
    {
        self.check().inspect_err(|error| {
            // Most services spawn this future and never look at its end.
            let error = error as &dyn std::error::Error;
            tracing::error!(operation = self.operation, error, "a reconciler does not run, because of its settings");
        })?;
        let (what, shutdown) = ("a visit to an operation in doubt", pin!(shutdown));
        let mut passes = Passes::of(what, Some(&self.operation), self.interval, shutdown);
        while passes.next().await {
            let pass = async {
                Ok(match self.visit_one(pool, look_up.clone()).await? {
                    Visit::Nothing => Next::LATER,
                    _ => Next::AtOnce,
                })
            };
            let ended = caught(pass).await;
            passes.ended(ended);
        }
        Ok(())
    }
}
