//! What a call came to, for metrics (feature `metrics`) and logs. Never the key or its scope: the one may be a secret, and
//! either would make as many series as there are clients.

use std::time::Duration;

use crate::record::Batch;
use crate::{Error, Mode};

/// How a call ended, as `idempotency_outcomes_total` has it.
pub(crate) fn outcome(mode: Mode, operation: &str, outcome: &'static str) {
    tracing::debug!(mode = mode.as_str(), operation, outcome, "idempotency");
    #[cfg(feature = "metrics")]
    metrics::counter!(
        "idempotency_outcomes_total",
        "mode" => mode.as_str(),
        "operation" => operation.to_owned(),
        "outcome" => outcome
    )
    .increment(1);
    if outcome == LEASE_LOST {
        #[cfg(feature = "metrics")]
        metrics::counter!("idempotency_lease_lost_total").increment(1);
    }
}

/// A call that ended in an error of this crate.
pub(crate) fn failure(mode: Mode, operation: &str, error: &Error) {
    outcome(mode, operation, name(error));
}

/// How long `perform`, or the work of a lease, took.
pub(crate) fn performed(mode: Mode, operation: &str, took: Duration) {
    #[cfg(feature = "metrics")]
    metrics::histogram!(
        "idempotency_perform_duration_seconds",
        "mode" => mode.as_str(),
        "operation" => operation.to_owned()
    )
    .record(took);
    #[cfg(not(feature = "metrics"))]
    let _ = (mode, operation, took);
}

/// How long a claim took, won or lost: where duplicates wait, it shows here.
pub(crate) fn claimed(mode: Mode, operation: &str, took: Duration) {
    #[cfg(feature = "metrics")]
    metrics::histogram!(
        "idempotency_claim_wait_seconds",
        "mode" => mode.as_str(),
        "operation" => operation.to_owned()
    )
    .record(took);
    #[cfg(not(feature = "metrics"))]
    let _ = (mode, operation, took);
}

/// A batch that the janitor deleted.
pub(crate) fn swept(batch: &Batch, took: Duration) {
    #[cfg(feature = "metrics")]
    {
        for (kind, rows) in [("completed", batch.completed), ("unfinished", batch.unfinished), ("marks", batch.marks)] {
            metrics::counter!("idempotency_cleanup_rows_total", "kind" => kind).increment(rows);
        }
        metrics::histogram!("idempotency_cleanup_batch_duration_seconds").record(took);
    }
    #[cfg(not(feature = "metrics"))]
    let _ = (batch, took);
}

/// For how long the oldest expired record has been due; 0 where none is.
pub(crate) fn oldest_expired(oldest: Option<Duration>) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("idempotency_oldest_expired_age_seconds").set(oldest.unwrap_or_default().as_secs_f64());
    #[cfg(not(feature = "metrics"))]
    let _ = oldest;
}

/// How many records there are in each state, estimated.
#[cfg(feature = "metrics")]
pub(crate) fn records(by_state: impl IntoIterator<Item = (String, u64)>) {
    for (state, records) in by_state {
        metrics::gauge!("idempotency_records", "state" => state).set(records as f64);
    }
}

pub(crate) const PERFORMED: &str = "performed";
pub(crate) const REPLAYED: &str = "replayed";
pub(crate) const FAILED: &str = "failed";
const LEASE_LOST: &str = "lease_lost";

fn name(error: &Error) -> &'static str {
    match error {
        Error::KeyReused { .. } => "key_reused",
        Error::InFlight { .. } => "in_flight",
        Error::Indeterminate { .. } => "indeterminate",
        Error::Exhausted { .. } => "exhausted",
        Error::OtherMode { .. } => "other_mode",
        Error::LeaseLost => LEASE_LOST,
        _ => FAILED,
    }
}
