//! Why a request was answered by the layer and not by the handler.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

use super::header::MalformedKey;
use crate::error::sqlstate;
use crate::{Error, InvalidBody};

/// When nothing says how long it will take.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Why a request was refused. **Nothing was performed by this request**, except where it says otherwise.
///
/// It is in the extensions of the response, for logs and metrics of your own, and goes to the hook of
/// [`with_rejection`](super::IdempotencyLayer::with_rejection). Its text is for the client; its `source()`, of
/// `unavailable` and `misconfigured`, for the service.
///
/// | [`kind`](Self::kind) | status | retry the same request | what happened |
/// |---|---|---|---|
/// | `missing-key` | 400 | no | the header is required here |
/// | `malformed-key` | 400 | no | see [`MalformedKey`] |
/// | `body-too-large` | 413 | no | over the limit for request bodies |
/// | `broken-body` | 400 | yes | the body ended before its time |
/// | `invalid-body` | 400 | no | no JSON where the fingerprint is to be of canonical JSON |
/// | `key-reused` | 422 | no | the key came with another request before |
/// | `in-flight` | 409, `Retry-After` | yes | the first request is not finished |
/// | `indeterminate` | 409 | no | the first request's outcome is unknown; somebody has to look |
/// | `exhausted` | 409 | no | it failed as often as it may |
/// | `not-replayable` | 409 | no | done, and its response was not kept |
/// | `unavailable` | 503, `Retry-After` | yes | the database is away, the connection was lost (also at COMMIT), the lease was lost, or a concurrent transaction won: ask again |
/// | `overloaded` | 503, `Retry-After` | yes | there are as many [runs](super::IdempotencyLayer::with_max_runs) as there may be |
/// | `timed-out` | 503, `Retry-After` | yes | the handler took [too long](super::IdempotencyLayer::with_run_timeout) and was dropped |
/// | `misconfigured` | 500 | no | a mistake of the service's, or an error of the database that would come again (a deferred constraint, a missing privilege, a missing table): its log says which |
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// No key, where one is required.
    #[error("this operation needs an Idempotency-Key: a new one for each operation, the same with each retry")]
    MissingKey,
    /// A key that is none.
    #[error(transparent)]
    MalformedKey(#[from] MalformedKey),
    /// The request's body is too large.
    #[error("the body is over {limit} bytes; send less")]
    #[non_exhaustive]
    BodyTooLarge {
        /// What is taken.
        limit: usize,
    },
    /// The request's body ended before its time.
    #[error("the body could not be read to its end; nothing was done, send it again")]
    BrokenBody,
    /// The body has no canonical JSON.
    #[error("{0}")]
    InvalidBody(InvalidBody),
    /// The key came with another request before.
    #[error("this Idempotency-Key came with another request before; take a new key for a new operation")]
    KeyReused,
    /// The first request is not finished.
    #[error("the first request with this Idempotency-Key is not finished; ask again with the same key")]
    #[non_exhaustive]
    InFlight {
        /// When to ask again.
        retry_after: Duration,
    },
    /// The first request was begun and never finished, and nobody knows whether it took effect.
    #[error(
        "the first request with this Idempotency-Key was begun and never finished, and whether it took effect is \
         unknown; do not repeat it under another key before somebody has found out"
    )]
    #[non_exhaustive]
    Indeterminate {
        /// The fencing token of its claim: what an operator settles it by.
        token: i64,
    },
    /// The operation failed as often as it may.
    #[error("the operation failed {attempts} times, which is the limit; it is not tried again")]
    #[non_exhaustive]
    Exhausted {
        /// How often.
        attempts: u32,
        /// The fencing token of the last claim.
        token: i64,
    },
    /// Done, and the response was not kept: too large, a stream, or a secret.
    #[error("the operation was done before, and its response{} was not kept; look up what it made",
        status.map(|status| format!(" ({status})")).unwrap_or_default())]
    #[non_exhaustive]
    NotReplayable {
        /// The first response's status, where it is known.
        status: Option<StatusCode>,
    },
    /// The database could not be asked, or the connection was lost, or the transaction lost against a concurrent one: asking
    /// again may help. **Where the COMMIT's answer was lost, whether the operation took effect is open; asking again with the
    /// same key tells.**
    #[error("out of order for now; ask again with the same key")]
    Unavailable(#[source] Arc<Error>),
    /// There are as many runs as there may be, or more. Nothing was begun.
    #[error("too many requests are under way; ask again with the same key")]
    #[non_exhaustive]
    Overloaded {
        /// [How many there may be](super::IdempotencyLayer::with_max_runs).
        limit: usize,
    },
    /// The handler took too long and was dropped. In transactional mode nothing is left of it; **what it did outside, or under
    /// a lease, stays**.
    #[error("the operation took too long and was given up; ask again with the same key")]
    #[non_exhaustive]
    TimedOut {
        /// [How long it may take](super::IdempotencyLayer::with_run_timeout).
        limit: Duration,
    },
    /// A mistake of the service's, or an error of the database that a repeat would meet again. The layer has committed
    /// nothing; **what the handler did outside of its transaction, or under a lease, stays**.
    #[error("the service failed in a way that asking again does not mend; do not repeat it under another key")]
    Misconfigured(#[source] Arc<Misconfigured>),
}

/// What is wrong with the service.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Misconfigured {
    /// Nobody says which operation it is.
    #[error(
        "the request has no matched route to name its operation by; add the layer by axum's Router::route_layer, with \
         the feature axum, or name the operation: with_route, with_operation"
    )]
    NoOperation,
    /// The handler's answer came while it, or what it spawned, still had the transaction.
    #[error("the handler answered and still holds its IdempotentTx; drop it before the response is returned")]
    TransactionKept,
    /// The handler succeeded, below 400, and has not taken the transaction: what it did is not a part of it, and would not
    /// commit together with the key. Let it take its [`IdempotentTx`](super::IdempotentTx), or, where it has no effects in
    /// this database, [say so](super::IdempotencyLayer::with_optional_transaction).
    #[error(
        "the handler succeeded without its IdempotentTx, so its effects would not commit with the key; let it take it, or \
         say with_optional_transaction for handlers without effects in this database"
    )]
    TransactionNotTaken,
    /// The transaction was taken, given back, and asked for again: something inside of the layer calls the handler a second
    /// time, whose first attempt's writes are still in the transaction. Put what retries outside of the layer.
    #[error(
        "the IdempotentTx was given back and asked for again; it is lent once, so put what retries outside of the layer"
    )]
    TransactionTakenAgain,
    /// A statement of the handler's failed, and the handler answered with a success all the same.
    #[error("a statement of the handler failed, and it answered with a success; let it answer with an error")]
    TransactionAborted(#[source] Error),
    /// The body of the handler's response failed.
    #[error("the handler's response could not be read to its end: {0}")]
    BrokenResponse(String),
    /// A gRPC response has not come to its status, which is at its end, within a second or within 4 MiB (or the [limit for
    /// responses](super::IdempotencyLayer::with_response_limit), if that is more). Nothing is committed, because the call may
    /// still fail. Long streams do not belong behind the layer.
    #[error(
        "the gRPC response did not come to its status in time, or within the limit, so nobody knows whether the call fails; \
         keep long streams away from the layer"
    )]
    GrpcStatusTooLate,
    /// The response could not be sealed.
    #[error("the response could not be sealed")]
    Unsealable(#[source] crate::BoxError),
    /// The database refuses a statement of the crate's or the COMMIT, and would refuse it again: a deferred constraint, a
    /// missing privilege (42501), a key that its encoding does not have (22P05).
    #[error("the database refused a statement or the commit, and would refuse it again")]
    DatabaseRefused(#[source] Error),
    /// Anything else that the crate refuses: the table is missing, the fingerprint is of another version or choice.
    #[error(transparent)]
    Refused(#[from] Error),
}

impl Rejection {
    /// The last part of the problem's `type`. Stable.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::MissingKey => "missing-key",
            Self::MalformedKey(_) => "malformed-key",
            Self::BodyTooLarge { .. } => "body-too-large",
            Self::BrokenBody => "broken-body",
            Self::InvalidBody(_) => "invalid-body",
            Self::KeyReused => "key-reused",
            Self::InFlight { .. } => "in-flight",
            Self::Indeterminate { .. } => "indeterminate",
            Self::Exhausted { .. } => "exhausted",
            Self::NotReplayable { .. } => "not-replayable",
            Self::Unavailable(_) => "unavailable",
            Self::Overloaded { .. } => "overloaded",
            Self::TimedOut { .. } => "timed-out",
            Self::Misconfigured(_) => "misconfigured",
        }
    }

    /// The status that the draft asks for, or HTTP where the draft is silent.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::MissingKey | Self::MalformedKey(_) | Self::BrokenBody | Self::InvalidBody(_) => {
                StatusCode::BAD_REQUEST
            }
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::InFlight { .. }
            | Self::Indeterminate { .. }
            | Self::Exhausted { .. }
            | Self::NotReplayable { .. } => StatusCode::CONFLICT,
            Self::Unavailable(_) | Self::Overloaded { .. } | Self::TimedOut { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Misconfigured(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Whether the same request, with the same key, may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::InFlight { .. }
                | Self::BrokenBody
                | Self::Unavailable(_)
                | Self::Overloaded { .. }
                | Self::TimedOut { .. }
        )
    }

    /// When to ask again, for those that are worth it.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::InFlight { retry_after } => Some(*retry_after),
            Self::Unavailable(_) | Self::Overloaded { .. } | Self::TimedOut { .. } => Some(RETRY_AFTER),
            _ => None,
        }
    }
}

impl From<Misconfigured> for Rejection {
    fn from(misconfigured: Misconfigured) -> Self {
        Self::Misconfigured(Arc::new(misconfigured))
    }
}

impl Misconfigured {
    /// An error of the statement that comes after the handler's.
    pub(super) fn of_completion(error: Error) -> Rejection {
        match &error {
            Error::Database(source) if sqlstate(source).as_deref() == Some("25P02") => {
                Self::TransactionAborted(error).into()
            }
            _ => Rejection::of(error),
        }
    }
}

impl Rejection {
    /// Of an error of the crate's own statements. No `From`: an error of the handler's own is for the handler to judge.
    pub(crate) fn of(error: Error) -> Self {
        match error {
            Error::KeyReused { .. } => Self::KeyReused,
            Error::InFlight { retry_after } => Self::InFlight { retry_after },
            Error::Indeterminate { token, .. } => Self::Indeterminate { token },
            Error::Exhausted { attempts, token, .. } => Self::Exhausted { attempts, token },
            Error::Undecodable { .. } => Self::NotReplayable { status: None },
            Error::InvalidBody { source } => Self::InvalidBody(source),
            error if error.is_transient() => Self::Unavailable(Arc::new(error)),
            // A client that obeys `Retry-After` would ask for ever, and the handler would run each time.
            Error::Database(_) => Misconfigured::DatabaseRefused(error).into(),
            _ => Misconfigured::Refused(error).into(),
        }
    }
}
