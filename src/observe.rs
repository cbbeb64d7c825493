//! Metrics, spans and logs never contain the value or the scope of a key. A log may contain the text of an error, so
//! the text of an error never contains the value or the scope of a key. The value may be a secret. The value or the
//! scope in a label would create a time series for each client.

use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use tracing::Span;
use tracing::instrument::{Instrument as _, Instrumented};

use crate::error::Failure;
use crate::{Error, Key, Mode, Outcome};

/// Makes the span of one call. `call_span` is a macro, because the name of a span is part of its static metadata.
macro_rules! call_span {
    ($name:literal, $mode:expr, $key:expr) => {
        tracing::debug_span!(
            target: "pg_idempotency",
            $name,
            mode = $mode.as_str(),
            operation = $key.operation(),
            outcome = tracing::field::Empty,
            token = tracing::field::Empty
        )
    };
}
pub(crate) use call_span;

/// Runs a call that has its span, and records the outcome when the call has ended. If the future is dropped, the
/// outcome stays empty. The caller attaches the span before it pins the call, so that a dropped call logs in its span.
///
/// The function keeps the span, and does not read the current span at the end, because the current span belongs to the
/// caller if the call's span is disabled.
///
/// The functions of this file take pinned calls. An async function that takes a future by value keeps space for it
/// twice, and a call would grow by a factor of three.
pub(crate) async fn spanned<R, E>(
    call: Pin<&mut Instrumented<impl Future<Output = Result<R, E>>>>,
    outcome: impl FnOnce(&Result<R, E>) -> &'static str,
) -> Result<R, E> {
    let span = call.span().clone();
    let result = call.await;
    span.record("outcome", outcome(&result));
    result
}

/// Does the same as [`spanned`], and also counts the outcome. A lease that was [claimed](CLAIMED) is counted later,
/// when its work ends.
pub(crate) async fn counted<R, E>(
    mode: Mode,
    operation: &str,
    call: Pin<&mut Instrumented<impl Future<Output = Result<R, E>>>>,
    ended: impl Fn(&Result<R, E>) -> &'static str,
) -> Result<R, E> {
    let result = spanned(call, &ended).await;
    match ended(&result) {
        CLAIMED => {}
        ended => outcome(mode, operation, ended),
    }
    result
}

/// Measures a claim that was won or lost. The time includes the wait for a connection and for another owner.
pub(crate) async fn timed_claim<R>(mode: Mode, operation: &str, claim: Pin<&mut impl Future<Output = R>>) -> R {
    let started = Instant::now();
    let ended = claim.await;
    claimed(mode, operation, started.elapsed());
    ended
}

pub(crate) async fn timed_work<R>(mode: Mode, operation: &str, work: Pin<&mut impl Future<Output = R>>) -> R {
    let started = Instant::now();
    let ended = work.await;
    performed(mode, operation, started.elapsed());
    ended
}

/// Adds a field to the span of the call: the token of the record that the call has claimed or replays. By this token, a
/// reader of the logs finds the call that did the work of a replay.
pub(crate) fn token(token: i64) {
    // If the call's span is disabled, the current span belongs to the caller, and may have a field of this name.
    let span = Span::current();
    if span.metadata().is_some_and(|metadata| metadata.target() == "pg_idempotency") {
        span.record("token", token);
    }
}

/// Runs a call in transaction mode. Records the call's span, and the metrics of its claim, of `perform` and of its
/// outcome. The outcome is counted last, after the crate's own COMMIT.
pub(crate) async fn observed<T, E, C>(span: Span, key: &Key, call: C) -> Result<Outcome<T>, E>
where
    E: From<Error>,
    C: AsyncFnOnce(&mut Watch<'_>) -> Result<Outcome<T>, Failure<E>>,
{
    let (mode, operation) = (Mode::Transaction, key.operation());
    let mut watch = Watch { operation, started: Instant::now(), claimed: None, performed: None };
    let ended = |result: &Result<_, _>| result.as_ref().map_or_else(Failure::outcome, Outcome::outcome);
    let result = counted(mode, operation, pin!(call(&mut watch).instrument(span)), ended).await;
    watch.claimed.get_or_insert_with(|| watch.started.elapsed());
    result.map_err(Failure::into_callers)
}

/// The times of one call. The drop of a `Watch` records the times, so that a call also counts if its future is dropped.
pub(crate) struct Watch<'k> {
    operation: &'k str,
    started: Instant,
    claimed: Option<Duration>,
    performed: Option<Duration>,
}

impl Watch<'_> {
    /// Measures `perform`, and the time before `perform`, which is the time of the claim.
    pub(crate) async fn perform<T, E>(
        &mut self,
        work: Pin<&mut impl Future<Output = Result<T, E>>>,
    ) -> Result<T, Failure<E>> {
        let started = Instant::now();
        self.claimed = Some(started - self.started);
        let performed = work.await;
        self.performed = Some(started.elapsed());
        performed.map_err(Failure::Perform)
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if let Some(took) = self.claimed {
            claimed(Mode::Transaction, self.operation, took);
        }
        if let Some(took) = self.performed {
            performed(Mode::Transaction, self.operation, took);
        }
    }
}

/// Records the outcome of a call in the log and in the metric `idempotency_outcomes_total`.
pub(crate) fn outcome(mode: Mode, operation: &str, outcome: &'static str) {
    tracing::debug!(mode = mode.as_str(), operation, outcome, "idempotency");
    metrics::counter!(
        "idempotency_outcomes_total",
        "mode" => mode.as_str(),
        "operation" => operation.to_owned(),
        "outcome" => outcome
    )
    .increment(1);
    if outcome == LEASE_LOST {
        metrics::counter!("idempotency_lease_lost_total").increment(1);
    }
}

pub(crate) fn performed(mode: Mode, operation: &str, took: Duration) {
    metrics::histogram!(
        "idempotency_perform_duration_seconds",
        "mode" => mode.as_str(),
        "operation" => operation.to_owned()
    )
    .record(took);
}

fn claimed(mode: Mode, operation: &str, took: Duration) {
    metrics::histogram!(
        "idempotency_claim_wait_seconds",
        "mode" => mode.as_str(),
        "operation" => operation.to_owned()
    )
    .record(took);
}

/// Counts a step that an attempt called, with the outcome of the step: performed, replayed, or in doubt. Errors after
/// which the step may be performed again are not counted. The names of steps are not labels, because a loop makes many
/// names.
pub(crate) fn step(operation: &str, outcome: &'static str) {
    tracing::debug!(operation, outcome, "step");
    metrics::counter!("idempotency_steps_total", "operation" => operation.to_owned(), "outcome" => outcome)
        .increment(1);
}

/// Counts an operation that was resumed, with its outcome.
pub(crate) fn resumed(operation: &str, outcome: &'static str) {
    tracing::debug!(operation, outcome, "resumed");
    metrics::counter!("idempotency_resumed_total", "operation" => operation.to_owned(), "outcome" => outcome)
        .increment(1);
}

/// Counts a probe of an operation in doubt, with its finding.
pub(crate) fn probed(operation: &str, finding: &'static str) {
    tracing::debug!(operation, finding, "probed");
    metrics::counter!("idempotency_probes_total", "operation" => operation.to_owned(), "finding" => finding)
        .increment(1);
}

pub(crate) fn reconciled(operation: &str, outcome: &'static str) {
    tracing::debug!(operation, outcome, "reconciled");
    metrics::counter!("idempotency_reconciled_total", "operation" => operation.to_owned(), "outcome" => outcome)
        .increment(1);
}

/// Exports the counters before the first batch, because a rate begins with the second value of a counter.
pub(crate) fn sweeps(kinds: [(&'static str, u64); 4]) {
    for (kind, _) in kinds {
        metrics::counter!("idempotency_cleanup_rows_total", "kind" => kind).increment(0);
    }
}

/// Counts the records of each kind that the janitor deleted in a batch, and the time of the batch.
pub(crate) fn swept(kinds: [(&'static str, u64); 4], took: Duration) {
    for (kind, rows) in kinds {
        metrics::counter!("idempotency_cleanup_rows_total", "kind" => kind).increment(rows);
    }
    metrics::histogram!("idempotency_cleanup_batch_duration_seconds").record(took);
}

/// Exports the time since the oldest expired record expired, or 0 if no record is expired.
pub(crate) fn oldest_expired(oldest: Option<Duration>) {
    metrics::gauge!("idempotency_oldest_expired_age_seconds").set(oldest.unwrap_or_default().as_secs_f64());
}

/// Exports the estimated number of records in each state.
pub(crate) fn records(by_state: impl IntoIterator<Item = (String, u64)>) {
    for (state, records) in by_state {
        metrics::gauge!("idempotency_records", "state" => state).set(records as f64);
    }
}

pub(crate) const PERFORMED: &str = "performed";
/// Only the span of a claim has this outcome. The metric counts the outcome of the work later.
pub(crate) const CLAIMED: &str = "claimed";
pub(crate) const REPLAYED: &str = "replayed";
/// Only steps have this outcome.
pub(crate) const IN_DOUBT: &str = "in_doubt";
/// The work failed: `perform` returned an error, or the handler answered with an error that is not stored. Many of
/// these failures are mistakes of clients.
pub(crate) const FAILED: &str = "failed";
/// An error of the database or of the schema, an answer that does not decode, or a mistake of the service.
pub(crate) const ERROR: &str = "error";
pub(crate) const EXHAUSTED: &str = "exhausted";
#[cfg(feature = "http")]
pub(crate) const REFUSED: &str = "refused";
#[cfg(feature = "http")]
pub(crate) const OVERLOADED: &str = "overloaded";
#[cfg(feature = "http")]
pub(crate) const TOO_MANY_REQUESTS: &str = "too_many_requests";
const LEASE_LOST: &str = "lease_lost";

impl<T> Outcome<T> {
    pub(crate) fn outcome(&self) -> &'static str {
        if self.is_replayed() { REPLAYED } else { PERFORMED }
    }
}

impl Error {
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::KeyReused { .. } => "key_reused",
            Self::InFlight { .. } => "in_flight",
            Self::Indeterminate { .. } => "indeterminate",
            Self::Exhausted { .. } => EXHAUSTED,
            Self::OtherMode { .. } => "other_mode",
            Self::LeaseLost => LEASE_LOST,
            _ => ERROR,
        }
    }
}

impl<E> Failure<E> {
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Crate(error) => error.outcome(),
            Self::Perform(_) | Self::Panicked(_) => FAILED,
        }
    }
}
