//! A reconciler: its options, its loop, its questions to the service's look-up, and the results of its visits.

use std::fmt;
use std::pin::pin;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgPool;

use super::memory::fits_a_step;
use super::options::{LeaseOptions, Policy};
use crate::background::{Next, Passes, caught};
use crate::limits::{RETENTION, in_range, is_in};
use crate::outcome::{StoredResponse, encode, unquoted};
use crate::route::{check_operation, has_names};
use crate::{Error, Key, Misuse};

/// The default pause after a search that found nothing. A search costs one statement on a small index.
const INTERVAL: Duration = Duration::from_secs(10);
/// The longest time of a look-up. A look-up that lasts longer is assumed to hang.
const TIME_OUT: Duration = Duration::from_secs(60);
/// By default, this many probes in a row must find no trace before an operation is released. A provider that loses one
/// answer in a hundred loses three in a row only once in a million times.
const NO_TRACE: u32 = 3;
/// The default number of probes after which an operation is left to a person. With a quiet time of two minutes, the
/// distances of ten probes add up to 17 hours.
const MOST_PROBES: u32 = 10;

/// Settles operations under [`AtMostOnce`](Policy::AtMostOnce), and at-most-once steps, if their outcome is unknown.
/// The reconciler calls a look-up function of yours, which asks the other service.
///
/// **First find out whether the other service accepts an idempotency key.** If the service accepts one, use
/// [`AtLeastOnce`](Policy::AtLeastOnce). Under `AtLeastOnce`, no operation is in doubt as long as the other
/// service remembers the key. The reconciler is for services that accept no idempotency key, such as mail, SMS, banks,
/// printers and warehouses. The guide's page `settle` shows when the probes come, and names the risk that remains.
///
/// ```no_run
/// # use std::time::Duration;
/// # use pg_idempotency::lease::{Finding, InDoubt, LeaseOptions, Policy, Reconciler};
/// # struct Gateway;
/// # impl Gateway { async fn find(&self, _: &str) -> std::io::Result<Option<String>> { Ok(None) } }
/// # async fn f(pool: sqlx::PgPool, gateway: &'static Gateway, shutdown: impl Future<Output = ()> + Send + 'static) -> anyhow::Result<()> {
/// let policy = Policy::AtMostOnce { lease: Duration::from_secs(40) };
/// let options = LeaseOptions::new(policy).store_request(true);
/// // No request of a dead process takes effect later than two minutes after its lease has lapsed.
/// let reconciler = Reconciler::new(options, "sms.arrived", Duration::from_secs(120))?;
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
    pub(super) options: LeaseOptions,
    pub(super) operation: String,
    pub(super) quiet: Duration,
    pub(super) distance: Duration,
    pub(super) no_trace: u32,
    pub(super) most_probes: u32,
    pub(super) time_out: Duration,
    interval: Duration,
}

/// The question to the look-up function: did this operation, or this step of the operation, take effect?
#[non_exhaustive]
pub struct InDoubt {
    /// The key.
    pub key: Key,
    /// The downstream key under which the other service saw the operation
    /// ([`Lease::downstream_key`](super::Lease::downstream_key)), or the step
    /// ([`Step::downstream_key`](super::Step::downstream_key)).
    pub downstream_key: String,
    /// The name of the step. `None` if the whole operation is in doubt.
    pub step: Option<String>,
    /// How many times the operation was attempted.
    pub attempt: u32,
    /// When the last attempt was claimed, by the database's clock.
    pub claimed_at: DateTime<Utc>,
    pub(crate) request: Vec<u8>,
}

impl InDoubt {
    /// Decodes the stored request of a call that was made without the HTTP layer. The requests of a leased HTTP layer
    /// are not JSON, so use `InDoubt::http_request` for them.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Undecodable`] if the request does not decode into `B`. The text of the error quotes nothing
    /// from the request, because the request may be confidential.
    pub fn request<B: DeserializeOwned>(&self) -> Result<B, Error> {
        serde_json::from_slice(&self.request).map_err(|error| {
            let source = unquoted(&error);
            Error::Undecodable { step: None, source: source.into() }
        })
    }
}

/// The output leaves out the stored request, because the request is confidential.
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
    /// The operation took effect. The answer is stored at once, and every retry gets this answer.
    TookEffect(Effect),
    /// The other service has no trace of the operation. A request may still be on its way, so only several probes
    /// without a trace release the operation.
    NoTrace,
    /// The other service does not know yet. A later probe asks again. The count of probes without a trace starts anew.
    Unknown,
}

impl Finding {
    /// Makes the finding that the operation took effect. `answer` is the value that the work or the step would have
    /// returned, and must have the same type.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Unencodable`] if a retry could not decode the answer.
    pub fn took_effect<T: Serialize + DeserializeOwned>(answer: &T) -> Result<Self, Error> {
        Ok(Self::TookEffect(Effect(encode(answer)?)))
    }

    #[cfg(feature = "http")]
    pub(crate) fn of_response(response: StoredResponse) -> Self {
        Self::TookEffect(Effect(response))
    }
}

/// An answer in the form in which it is stored: see [`Finding::took_effect`].
#[derive(Debug)]
pub struct Effect(pub(super) StoredResponse);

impl Effect {
    /// Returns the answer as the result of a step, in JSON text.
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
    /// No operation is due.
    Nothing,
    /// The visit has found operations that no reconciler had visited since they came into doubt. These operations are
    /// noted, and probed after the quiet time.
    Noted,
    /// The probe has settled nothing, and the next probe comes later.
    Undecided,
    /// The operation or the step took effect, and its answer is stored.
    Resolved,
    /// Enough probes found no trace, so the operation or the step is released.
    Released,
    /// The operation or the step is left to a person.
    GivenUp,
    /// Another decision was faster than this visit, or the owner is alive again.
    Overtaken,
    /// The look-up has found that the operation took effect, but the operation was already released. **The effect may
    /// happen twice.** The visit has changed nothing.
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
    /// Creates a reconciler for all operations with one name. Give the reconciler the same options as the callers. An
    /// HTTP layer without `operation` names an operation by method and route, without the names of parameters, as in
    /// `POST /accounts/{}/text`. A reconciler does not know whether its callers use such a layer, so a parameter with a
    /// name (`{name}`) is not refused, and only causes a warning in the log. If the layer has the name of a service,
    /// pass the operation that `IdempotencyLayer::recorded_operation` returns.
    ///
    /// **The database is the name space of operations**, so the reconciler also finds the operations of other services
    /// that have this name. It would ask the wrong gateway, and release operations that took effect.
    ///
    /// `quiet` is the longest time for which a request of the owner's **dead** process can still take effect after the
    /// lapse of the lease. Include the time-out of the HTTP client, the retries of proxies, and the queue of the
    /// provider. There is no default, because only the service knows this time. The quiet time begins one lease after
    /// the first visit, because a jump of the server's clock may have ended the lease too early.
    ///
    /// # Errors
    ///
    /// Returns [`Misuse`] in these cases:
    /// - The policy is [`AtLeastOnce`](Policy::AtLeastOnce).
    /// - The options do not [store the request](LeaseOptions::store_request).
    /// - The `options` contradict each other.
    /// - No [`Key`](crate::Key) can have this operation.
    /// - The quiet time is under a millisecond, or over half of the difference between retention and lease.
    pub fn new(options: LeaseOptions, operation: &str, quiet: Duration) -> Result<Self, Error> {
        options.check()?;
        if matches!(options.policy, Policy::AtLeastOnce { .. }) {
            let problem = "under Policy::AtLeastOnce nothing is in doubt; run a Resumer";
            return Err(Misuse::options(problem));
        }
        if !options.stored_request {
            // The search needs an index that contains only records with a stored request.
            let problem = "the claims do not store their requests; set LeaseOptions::store_request";
            return Err(Misuse::options(problem));
        }
        check_operation(operation)?;
        if has_names(operation) {
            tracing::warn!(
                operation,
                "the operation of a reconciler names a parameter; a layer without IdempotencyLayer::operation leaves \
                 the names out, as in POST /accounts/{{}}/pay, and this reconciler then finds nothing"
            );
        }
        // Each visit starts the retention of the record anew. Between the first visit and the first probe, one lease
        // and the quiet time pass. The sum of these two times must be shorter than the retention.
        let quiet =
            in_range("quiet time", quiet, Duration::from_millis(1)..=(options.retention - options.policy.lease()) / 2)?;
        // The record of a killed owner is remembered for one lease after the lapse. The first visit must come within
        // this time, although it may have to wait for the look-up of another key.
        let longest = options.policy.lease() / 2;
        Ok(Self {
            options,
            operation: operation.to_owned(),
            quiet,
            distance: quiet,
            no_trace: NO_TRACE,
            most_probes: MOST_PROBES,
            interval: INTERVAL.min(longest),
            time_out: TIME_OUT.min(longest),
        })
    }

    /// Sets how many probes in a row must find no trace before an operation is released. After `most` probes, an
    /// operation is left to a person. After [`Unknown`](Finding::Unknown), a panic or a time-out, the count of probes
    /// without a trace begins anew. By default, `no_trace` is 3, and `most` is 10.
    ///
    /// # Panics
    ///
    /// Panics unless `no_trace` is between 2 and `most`. One probe is not enough, because the original request may take
    /// effect after that probe.
    #[must_use]
    #[track_caller]
    pub fn probes(self, no_trace: u32, most: u32) -> Self {
        assert!(
            (2..=most).contains(&no_trace),
            "the probes without a trace must be at least 2, and at most as many as all probes"
        );
        Self { no_trace, most_probes: most, ..self }
    }

    /// Sets the time between the first two probes. This distance doubles after each probe, up to half of the retention.
    /// The default is the quiet time.
    ///
    /// # Panics
    ///
    /// Panics if the distance is shorter than a millisecond or longer than ten years.
    #[must_use]
    #[track_caller]
    pub fn distance(self, distance: Duration) -> Self {
        assert!(is_in(&RETENTION, distance), "a distance must be between a millisecond and ten years");
        Self { distance, ..self }
    }

    /// Probes one operation after the other until `shutdown` is ready. Then the reconciler finishes the probe in
    /// progress, and returns. You can run one reconciler in each process of a fleet, because several reconcilers share
    /// the work. After a search that found nothing, the reconciler pauses for 10 seconds, or for half of the lease if
    /// that is shorter.
    ///
    /// The reconciler logs errors and panics, and goes on. Let the look-up return an error only if the other service
    /// gave no answer. If that service knows the operation, but the answer of the operation cannot be loaded, return
    /// [`Unknown`](Finding::Unknown). A look-up may last for a minute, or for half of the lease if that is shorter.
    ///
    /// To watch a look-up before it settles anything, let the look-up log its findings and return `Unknown`, and set
    /// [`probes(3, u32::MAX)`](Self::probes). These probes count. So after this trial, set `most` above the
    /// number of probes that the operations in doubt already have
    /// ([`ShownProbes::probes`](crate::operator::ShownProbes)). Otherwise these operations are left to a person.
    ///
    /// # Cancellation
    ///
    /// The future may be dropped at every point. A probe whose result was not stored is repeated after the distance to
    /// the next probe.
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
