//! Why the layer answered a request instead of the handler.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

use super::key_header::MalformedKey;
use crate::claim::RETRY_AFTER;
use crate::error::sqlstate;
use crate::{Error, InvalidBody, observe};

/// Why the layer refused a request. **The request performed nothing**, unless the variant says otherwise.
///
/// The response has it in its extensions, for your logs and metrics, and the function of
/// [`with_rejection`](super::IdempotencyLayer::with_rejection) receives it. Its text is for the client. Its `source()`,
/// which `unavailable` and `misconfigured` have, is for the service.
///
/// | [`kind`](Self::kind) | status | may a retry succeed? | what happened |
/// |---|---|---|---|
/// | `missing-key` | 400 | no | the key is required here |
/// | `malformed-key` | 400 | no | see [`MalformedKey`] |
/// | `body-too-large` | 413 | no | the request body is over its limit |
/// | `broken-body` | 400 | yes | the request body ended early |
/// | `invalid-body` | 400 | no | the fingerprint covers the body as JSON, and the body is not JSON |
/// | `key-reused` | 422 | no | an earlier request had this key and was different |
/// | `in-flight` | 409, `Retry-After` | yes | the first request is not finished |
/// | `indeterminate` | 409 | no | the outcome of the first request is unknown; an operator has to find out |
/// | `exhausted` | 409 | no | the operation has failed as often as it may |
/// | `not-replayable` | 409 | no | the operation is done, and its response was not stored |
/// | `unavailable` | 503, `Retry-After` | yes | the database is unreachable, the connection was lost (also at COMMIT), the lease was lost, or a concurrent transaction won |
/// | `overloaded` | 503, `Retry-After` | yes | the number of [runs](super::IdempotencyLayer::with_max_runs) is at its limit |
/// | `timed-out` | 503, `Retry-After` | yes | the handler took [too long](super::IdempotencyLayer::with_run_timeout) and was dropped |
/// | `misconfigured` | 500 | no | a mistake of the service, or an error of the database that a retry would meet again (a deferred constraint, a missing privilege, a missing table); the service's log has the details |
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// The request has no key, and one is required.
    #[error("this operation requires an Idempotency-Key: a new one for each operation, the same one for each retry")]
    MissingKey,
    /// The key is malformed.
    #[error(transparent)]
    MalformedKey(#[from] MalformedKey),
    /// The request body is too large.
    #[error("the body is larger than {limit} bytes; send less")]
    #[non_exhaustive]
    BodyTooLarge {
        /// The largest body that the layer accepts, in bytes.
        limit: usize,
    },
    /// The request body ended early.
    #[error("the body could not be read to its end; nothing was done, send it again")]
    BrokenBody,
    /// The request body is not JSON, or has no canonical form.
    #[error("{0}")]
    InvalidBody(InvalidBody),
    /// An earlier request had this key and was different.
    #[error("this Idempotency-Key was sent with a different request before; use a new key for a new operation")]
    KeyReused,
    /// The first request is not finished.
    #[error("the first request with this Idempotency-Key is not finished; ask again with the same key")]
    #[non_exhaustive]
    InFlight {
        /// When to ask again.
        retry_after: Duration,
    },
    /// The first request began and never finished, so it is unknown whether it took effect.
    #[error(
        "the first request with this Idempotency-Key began and never finished, and it is unknown whether it took effect; do \
         not repeat it under another key before that is known"
    )]
    #[non_exhaustive]
    Indeterminate {
        /// The fencing token of its claim, by which an operator settles it.
        token: i64,
    },
    /// The operation has failed as often as it may.
    #[error("the operation failed {attempts} times, which is the limit; it is not tried again")]
    #[non_exhaustive]
    Exhausted {
        /// The number of attempts.
        attempts: u32,
        /// The fencing token of the last claim.
        token: i64,
    },
    /// The operation is done, and its response was not stored: it was too large, a stream, or a secret.
    #[error("the operation was completed before, and its response{} was not stored; look up its result",
        status.map(|status| format!(" ({status})")).unwrap_or_default())]
    #[non_exhaustive]
    NotReplayable {
        /// The status of the first response, if it is known.
        status: Option<StatusCode>,
    },
    /// The database is unreachable, the connection or the lease was lost, or the transaction lost against a concurrent
    /// one. A retry may succeed. **If the connection was lost at COMMIT, it is unknown whether the operation took
    /// effect; a retry with the same key gives the answer.**
    #[error("the service cannot process this request at the moment; ask again with the same key")]
    Unavailable(#[source] Arc<Error>),
    /// The number of runs is at its limit. Nothing began.
    #[error("too many requests are in progress; ask again with the same key")]
    #[non_exhaustive]
    Overloaded {
        /// [The limit](super::IdempotencyLayer::with_max_runs).
        limit: usize,
    },
    /// The handler took too long and was dropped. In a transactional layer its writes are undone. **Effects outside the
    /// database, or under a lease, remain.**
    #[error("the operation took too long and was stopped; ask again with the same key")]
    #[non_exhaustive]
    TimedOut {
        /// [The limit](super::IdempotencyLayer::with_run_timeout).
        limit: Duration,
    },
    /// A mistake of the service, or an error of the database that a retry would meet again. The layer has committed
    /// nothing. **Effects outside the layer's transaction, or under a lease, remain.**
    #[error("the service failed in a way that a retry does not fix; do not repeat the operation under another key")]
    Misconfigured(#[source] Arc<Misconfigured>),
}

impl Rejection {
    /// The last part of the problem's `type`. It is stable.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.kind_and_status().0
    }

    /// The status that the draft demands, or the one that HTTP suggests where the draft is silent.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.kind_and_status().1
    }

    fn kind_and_status(&self) -> (&'static str, StatusCode) {
        match self {
            Self::MissingKey => ("missing-key", StatusCode::BAD_REQUEST),
            Self::MalformedKey(_) => ("malformed-key", StatusCode::BAD_REQUEST),
            Self::BodyTooLarge { .. } => ("body-too-large", StatusCode::PAYLOAD_TOO_LARGE),
            Self::BrokenBody => ("broken-body", StatusCode::BAD_REQUEST),
            Self::InvalidBody(_) => ("invalid-body", StatusCode::BAD_REQUEST),
            Self::KeyReused => ("key-reused", StatusCode::UNPROCESSABLE_ENTITY),
            Self::InFlight { .. } => ("in-flight", StatusCode::CONFLICT),
            Self::Indeterminate { .. } => ("indeterminate", StatusCode::CONFLICT),
            Self::Exhausted { .. } => ("exhausted", StatusCode::CONFLICT),
            Self::NotReplayable { .. } => ("not-replayable", StatusCode::CONFLICT),
            Self::Unavailable(_) => ("unavailable", StatusCode::SERVICE_UNAVAILABLE),
            Self::Overloaded { .. } => ("overloaded", StatusCode::SERVICE_UNAVAILABLE),
            Self::TimedOut { .. } => ("timed-out", StatusCode::SERVICE_UNAVAILABLE),
            Self::Misconfigured(_) => ("misconfigured", StatusCode::INTERNAL_SERVER_ERROR),
        }
    }

    /// Whether the same request, with the same key, may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::BrokenBody) || self.retry_after().is_some()
    }

    /// When to ask again: the value of `Retry-After`, for rejections that have one.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::InFlight { retry_after } => Some(*retry_after),
            Self::Unavailable(_) | Self::Overloaded { .. } | Self::TimedOut { .. } => Some(RETRY_AFTER),
            _ => None,
        }
    }

    /// The rejection for an error of this crate's own statements. There is no `From`: the handler judges its own
    /// errors.
    pub(crate) fn of(error: Error) -> Self {
        match error {
            Error::KeyReused { .. } => Self::KeyReused,
            Error::InFlight { retry_after } => Self::InFlight { retry_after },
            Error::Indeterminate { token, .. } => Self::Indeterminate { token },
            Error::Exhausted { attempts, token, .. } => Self::Exhausted { attempts, token },
            Error::Undecodable { .. } => Self::NotReplayable { status: None },
            Error::InvalidBody { source } => Self::InvalidBody(source),
            error if error.is_transient() => Self::Unavailable(Arc::new(error)),
            // A client that obeys `Retry-After` would ask forever, and the handler would run each time.
            Error::Database(_) => Misconfigured::DatabaseRefused(error).into(),
            _ => Misconfigured::Refused(error).into(),
        }
    }

    /// The rejection for an error of a statement that follows the handler's.
    pub(super) fn of_completion(error: Error) -> Self {
        match &error {
            Error::Database(source) if sqlstate(source).as_deref() == Some("25P02") => {
                Misconfigured::TransactionAborted(error).into()
            }
            _ => Self::of(error),
        }
    }

    /// The outcome of a transactional run that ended in this rejection, for its metrics and its span.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::KeyReused => "key_reused",
            Self::InFlight { .. } => "in_flight",
            Self::Indeterminate { .. } => "indeterminate",
            Self::NotReplayable { .. } => observe::REPLAYED,
            Self::Misconfigured(mistake) if matches!(**mistake, Misconfigured::Refused(Error::OtherMode { .. })) => {
                "other_mode"
            }
            _ => observe::FAILED,
        }
    }
}

/// What is wrong with the service. The client sees a 500 `misconfigured` and none of this text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Misconfigured {
    /// Nothing names the operation of the request.
    #[error(
        "the request has no matched route to name its operation; add the layer by axum's Router::route_layer, with the \
         feature axum, or name the operation: with_route, with_operation"
    )]
    NoOperation,
    /// The handler answered while it, or a task that it spawned, still held the transaction.
    #[error("the handler answered and still holds its IdempotentTx; drop it before the response is returned")]
    TransactionKept,
    /// The handler answered below 400 without having taken the transaction, so its effects would not commit together
    /// with the key. Let it take its [`IdempotentTx`](super::IdempotentTx). If it has no effects in this database, use
    /// [`with_optional_transaction`](super::IdempotencyLayer::with_optional_transaction).
    #[error(
        "the handler succeeded without its IdempotentTx, so its effects would not commit with the key; let it take the \
         IdempotentTx, or use with_optional_transaction for handlers without effects in this database"
    )]
    TransactionNotTaken,
    /// The handler gave the transaction back and asked for it again. Something inside the layer calls the handler a
    /// second time, and the writes of the first call are still in the transaction. Put the code that retries outside
    /// the layer.
    #[error(
        "the IdempotentTx was given back and asked for again, but it is lent once; put the code that retries outside the \
         layer"
    )]
    TransactionTakenAgain,
    /// A statement of the handler failed, and the handler still answered with a success.
    #[error("a statement of the handler failed, but the handler answered with a success; let it answer with an error")]
    TransactionAborted(#[source] Error),
    /// The body of the handler's response failed.
    #[error("the handler's response could not be read to its end: {0}")]
    BrokenResponse(String),
    /// A gRPC response did not reach its status, which comes last, within a second or within 4 MiB (or the [limit for
    /// responses](super::IdempotencyLayer::with_response_limit), if that is larger). Nothing is committed, because the
    /// call may still fail. Long streams do not belong behind the layer.
    #[error(
        "the gRPC response did not reach its status in time, or within the limit, so the call may still fail; keep long \
         streams away from the layer"
    )]
    GrpcStatusTooLate,
    /// The response could not be sealed.
    #[error("the response could not be sealed")]
    Unsealable(#[source] crate::BoxError),
    /// The database refused a statement of this crate or the COMMIT, and would refuse it again: a deferred constraint,
    /// a missing privilege (42501), a key with characters outside the database's encoding (22P05).
    #[error("the database refused a statement or the commit, and would refuse it again")]
    DatabaseRefused(#[source] Error),
    /// Any other error of this crate: the table is missing, or the stored fingerprint is of an unknown version or
    /// choice.
    #[error(transparent)]
    Refused(#[from] Error),
}

impl From<Misconfigured> for Rejection {
    fn from(misconfigured: Misconfigured) -> Self {
        Self::Misconfigured(Arc::new(misconfigured))
    }
}
