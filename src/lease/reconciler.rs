//! A reconciler: its options, its loop, its questions to the service's look-up, and the results of its visits.

use std::fmt;
use std::pin::pin;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgPool;

use super::options::{LeaseOptions, Policy};
use super::step::fits_a_step;
use crate::background::{Next, Passes, caught};
use crate::limits::{RETENTION, in_range, is_in};
use crate::outcome::{Response, encode, unquoted};
use crate::route::has_names;
use crate::{Error, Key, Misuse};

/// The default interval. A search costs one statement on a small index.
const INTERVAL: Duration = Duration::from_secs(10);
/// A look-up that lasts longer hangs.
const TIME_OUT: Duration = Duration::from_secs(60);
/// A provider that loses one answer in a hundred loses three in a row once in a million.
const NO_TRACE: u32 = 3;
/// With a quiet time of two minutes, the distances of ten probes add up to 17 hours.
const MOST_PROBES: u32 = 10;

/// Settles operations under [`AtMostOnce`](Policy::AtMostOnce), and at-most-once steps, whose outcome is unknown: it
/// asks the other service with a function of yours.
///
/// **First ask whether the other service takes an idempotency key.** If it does, use
/// [`AtLeastOnce`](Policy::AtLeastOnce): nothing is in doubt for as long as that service remembers the key. The
/// reconciler is for services that do not take one: mail, SMS, banks, printers, warehouses. The guide's page `settle`
/// draws when the probes come, and names the risk that remains.
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
///         Ok::<_, anyhow::Error>(match gateway.find(&asked.downstream_key).await? {
///             Some(receipt) => Finding::took_effect(&receipt)?, // stored: every retry gets it
///             None => Finding::NoTrace,                         // after three such probes: released
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
    pub(super) no_trace: u32,
    pub(super) most_probes: u32,
    pub(super) time_out: Duration,
    interval: Duration,
}

/// The question to the look-up: did this operation, or this step of it, take effect?
#[non_exhaustive]
pub struct InDoubt {
    /// The key.
    pub key: Key,
    /// The key under which the other service saw the operation
    /// ([`Lease::downstream_key`](super::Lease::downstream_key)), or the step
    /// ([`Step::downstream_key`](super::Step::downstream_key)).
    pub downstream_key: String,
    /// The name of the step. `None` for an operation without steps.
    pub step: Option<String>,
    /// How many times the operation was attempted.
    pub attempt: u32,
    /// When the last attempt was claimed, by the database's clock.
    pub claimed_at: DateTime<Utc>,
    pub(crate) request: Vec<u8>,
}

impl InDoubt {
    /// The stored request of a call of the library. The request of a leased layer is not JSON: see
    /// `InDoubt::http_request`.
    ///
    /// # Errors
    ///
    /// [`Error::Undecodable`]. Its text quotes nothing of the request, which may be confidential.
    pub fn request<B: DeserializeOwned>(&self) -> Result<B, Error> {
        serde_json::from_slice(&self.request).map_err(|error| {
            let source = unquoted(&error);
            Error::Undecodable { step: None, source: source.into() }
        })
    }
}

/// The stored request is left out, because it is confidential.
impl fmt::Debug for InDoubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, step, attempt, .. } = self;
        f.debug_struct("InDoubt")
            .field("key", key)
            .field("step", step)
            .field("attempt", attempt)
            .finish_non_exhaustive()
    }
}

/// The answer of a look-up.
#[derive(Debug)]
#[non_exhaustive]
pub enum Finding {
    /// The operation took effect. The answer is stored at once, and every retry gets it.
    TookEffect(Effect),
    /// The other service has no trace of the operation. A request may still be on its way, so only several probes
    /// without a trace release the operation.
    NoTrace,
    /// The other service does not know yet. It is asked again later, and the probes without a trace are counted anew.
    Unknown,
}

impl Finding {
    /// The operation took effect: `answer` is what the work, or the step, would have returned. Its type must be the
    /// same.
    ///
    /// # Errors
    ///
    /// [`Error::Unencodable`] if a retry could not decode the answer.
    pub fn took_effect<T: Serialize + DeserializeOwned>(answer: &T) -> Result<Self, Error> {
        Ok(Self::TookEffect(Effect(encode(answer)?)))
    }

    #[cfg(feature = "http")]
    pub(crate) fn of_response(response: Response) -> Self {
        Self::TookEffect(Effect(response))
    }
}

/// An answer that can be stored: see [`Finding::took_effect`].
#[derive(Debug)]
pub struct Effect(pub(super) Response);

impl Effect {
    /// The result of a step, as JSON text.
    pub(super) fn of_step(&self, name: &str) -> Result<String, Error> {
        if self.0.status.is_some() {
            return Err(Error::Unencodable {
                source: "the result of a step is a JSON value, and no HTTP response".into(),
            });
        }
        fits_a_step(name, self.0.body.clone().unwrap_or_default())
    }
}

/// The result of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Visit {
    /// Nothing is due.
    Nothing,
    /// The visit has found operations that no reconciler had seen since they are in doubt. They are remembered, and
    /// probed after the quiet time.
    Noted,
    /// The next probe comes later.
    Undecided,
    /// The operation or the step took effect, and its answer is stored.
    Resolved,
    /// Enough probes found no trace: the operation or the step is released.
    Released,
    /// The operation or the step is left to a person.
    GivenUp,
    /// Another decision was faster, or the owner is alive again.
    Overtaken,
    /// The operation took effect, but was released before this was known. **The effect may happen twice.** The visit
    /// has changed nothing.
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
    /// [`Misuse`] under [`AtLeastOnce`](Policy::AtLeastOnce), or without [`LeaseOptions::store_request`], or if
    /// settings of `leasing` contradict each other. Also for a quiet time under a millisecond, or over half of the time
    /// by which the retention is longer than the lease.
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
        // Each visit remembers the record for the retention. The first probe comes a lease and the quiet time later.
        let quiet =
            in_range("quiet time", quiet, Duration::from_millis(1)..=(leasing.retention - leasing.policy.lease()) / 2)?;
        // A killed owner's record is remembered for one lease after the lapse. The first visit must come before its
        // end, and may have to wait for the look-up of another key.
        let longest = leasing.policy.lease() / 2;
        Ok(Self {
            leasing,
            operation: operation.to_owned(),
            quiet,
            distance: quiet,
            no_trace: NO_TRACE,
            most_probes: MOST_PROBES,
            interval: INTERVAL.min(longest),
            time_out: TIME_OUT.min(longest),
        })
    }

    /// How many probes in a row have to find no trace before the operation is released, and after how many probes the
    /// operation is left to a person. [`Unknown`](Finding::Unknown), a panic or a time-out begins the row anew. The
    /// defaults are 3 and 10.
    ///
    /// # Panics
    ///
    /// Unless `no_trace` is between 2 and `most`. One probe is not enough, because the first request may take effect
    /// after it.
    #[must_use]
    #[track_caller]
    pub fn probes(self, no_trace: u32, most: u32) -> Self {
        assert!(
            (2..=most).contains(&no_trace),
            "the probes without a trace must be at least 2, and at most as many as all probes"
        );
        Self { no_trace, most_probes: most, ..self }
    }

    /// The distance between the first two probes. It doubles after each probe, up to half of the retention. The default
    /// is the quiet time.
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

    /// Probes one operation after the other until `shutdown` is ready. Then it ends the probe in progress, and returns.
    /// Run one in each process of a fleet: several share the work. After a search that found nothing, the reconciler
    /// pauses for 10 seconds, or for half of the lease if that is shorter.
    ///
    /// The reconciler logs errors and panics, and goes on. The look-up returns an error only if the other service has
    /// said nothing. If that service knows the operation, and its answer does not load, the finding is
    /// [`Unknown`](Finding::Unknown). A look-up may last for a minute, or for half of the lease if that is shorter.
    ///
    /// To watch a look-up before it settles anything, let it log what it finds and return `Unknown`, and set
    /// [`probes(3, u32::MAX)`](Self::probes). These probes count. So afterwards set `most` above the number that the
    /// operations in doubt have ([`ShownProbes::probes`](crate::operator::ShownProbes)), or they are left to a person.
    ///
    /// # Cancellation
    ///
    /// Safe at every point. A probe whose result was not stored is made again after its distance.
    pub async fn run<E, F>(&self, pool: &PgPool, shutdown: impl Future<Output = ()> + Send, look_up: F)
    where
        E: fmt::Display,
        F: AsyncFnOnce(&InDoubt) -> Result<Finding, E> + Clone,
    {
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
    }
}
