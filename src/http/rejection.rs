//! The answers that a request does not get from its handler: a rejection of the layer, or a refusal of the service.

use std::collections::{HashMap, HashSet};
use std::error::Error as StdError;
#[cfg(feature = "axum")]
use std::sync::LazyLock;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;

use super::body::Broken;
use super::request::MalformedKey;
use crate::claim::RETRY_AFTER;
use crate::{Error, InvalidBody, InvalidKey, InvalidRequest, KeyPart, observe};

const WAITS: &str = "a request met an operation that waits for an operator";

/// The reason why the layer refused a request. **The refused request had no effect**, unless the variant says
/// otherwise.
///
/// The response has the rejection in its extensions, for your logs and metrics. The text of a rejection is for the
/// client. The `source()` of `unavailable` and `misconfigured` is for the service. The documentation of each variant
/// begins with its [`kind`](Self::kind) and its status. A retry may succeed after `broken-body`, and after a rejection
/// with `Retry-After`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// `missing-key`, 400: the request has no key, but the layer requires a key.
    #[error("this operation requires an Idempotency-Key: a new one for each operation, the same one for each retry")]
    MissingKey,
    /// `malformed-key`, 400: there are several keys, or the key cannot be used. A key also cannot be used if its
    /// [operation](super::IdempotencyLayer::operation) is invalid. The operation may contain a part of the path, which
    /// the client has chosen. The text of the rejection gives the reason.
    #[error("{0}")]
    MalformedKey(String),
    /// `body-too-large`, 413: the request body is over its limit.
    #[error("the body is larger than {}; send less",
        limit.map_or_else(|| "the service takes".to_owned(), |limit| format!("{limit} bytes")))]
    #[non_exhaustive]
    BodyTooLarge {
        /// The largest body that the layer accepts, in bytes. `None` if an outer layer has a smaller limit.
        limit: Option<usize>,
    },
    /// `broken-body`, 400: the request body ended early, or came too slowly.
    #[error("the body could not be read to its end; nothing was done, send it again")]
    BrokenBody,
    /// `invalid-body`, 400: the request body could not be decoded, for example because an outer layer could not
    /// decompress it.
    #[error("the body could not be decoded; nothing was done, correct it")]
    UndecodableBody,
    /// `invalid-body`, 400: the layer compares bodies as JSON, and the body is not JSON.
    #[error("{0}")]
    InvalidBody(InvalidBody),
    /// `key-reused`, 422: an earlier request had this key and was different.
    #[error(
        "this Idempotency-Key was sent with a different request before; send that request again, or use a new key for \
         another operation"
    )]
    KeyReused,
    /// `in-flight`, 409 with `Retry-After`: the first request is not finished.
    #[error("the first request with this Idempotency-Key is not finished; ask again with the same key")]
    #[non_exhaustive]
    InFlight {
        /// The time after which to send the request again.
        retry_after: Duration,
    },
    /// `indeterminate`, 409: the first request began and never finished, so it is unknown whether it took effect. An
    /// operator or a reconciler has to settle the key.
    #[error(
        "the first request with this Idempotency-Key began and never finished, and it is unknown whether it took \
         effect; do not use another key, ask the service's support, and send the same request again when the support \
         has settled the key"
    )]
    #[non_exhaustive]
    Indeterminate {
        /// The fencing token of the claim, by which `unsettled` and the log name the claim.
        token: i64,
        /// The names of all steps in doubt, if the operation is in steps.
        steps: Vec<String>,
    },
    /// `exhausted`, 409: the operation has used up its attempts.
    #[error(
        "the operation was attempted {attempts} times without an answer, which is the limit; ask the service's \
         support, and send the same request again when the support has settled the key"
    )]
    #[non_exhaustive]
    Exhausted {
        /// The number of attempts.
        attempts: u32,
        /// The fencing token of the last claim.
        token: i64,
    },
    /// `not-replayable`, 409: the operation is done, but its response was not stored. The response was too large, was a
    /// stream, or contained a secret.
    #[error("the operation was completed before, and its response{} was not stored; look up its result",
        status.map(|status| format!(" ({status})")).unwrap_or_default())]
    #[non_exhaustive]
    NotReplayable {
        /// The status of the first response, if it is known.
        status: Option<StatusCode>,
    },
    /// `unavailable`, 503 with `Retry-After`: the database is unreachable, the connection or the lease was lost, or the
    /// transaction lost against a concurrent transaction. **If the connection was lost at COMMIT, it is unknown whether
    /// the operation took effect. A retry with the same key gets the answer.** Under a lease, the effect may have
    /// happened although no answer is stored. A retry may then perform the operation again, or be `indeterminate`.
    #[error("the service cannot process this request at the moment; ask again with the same key")]
    Unavailable(#[source] Arc<Error>),
    /// `overloaded`, 503 with `Retry-After`: no place became free in time, because the limit of all runs was reached.
    /// Another reason is that all requests that upload or wait [hold too many bytes](super#runs). No handler began.
    #[error("too many requests are in progress; ask again with the same key")]
    #[non_exhaustive]
    Overloaded {
        /// The limit of [all runs](super::IdempotencyLayer::max_runs), even if there were too many bytes.
        limit: usize,
    },
    /// `too-many-requests`, 429 with `Retry-After`: no place became free in time, because the limit of the runs of this
    /// scope was reached, but not the limit of all runs. All requests without a key count as one scope. Another reason
    /// is that the requests of this scope that upload or wait [hold too many bytes](super#runs). No handler began.
    #[error("too many requests of this scope are in progress; ask again with the same key")]
    #[non_exhaustive]
    TooManyRequests {
        /// The limit of [the runs of one scope](super::IdempotencyLayer::max_runs_of_one_scope), even if there were too
        /// many bytes.
        limit: usize,
    },
    /// `timed-out`, 503 with `Retry-After`: the handler took too long and was dropped. In a transactional layer, the
    /// writes of the handler are undone. **Effects outside the database, or under a lease, remain.**
    #[error("the operation took too long and was stopped; ask again with the same key")]
    #[non_exhaustive]
    TimedOut {
        /// [The limit](super::IdempotencyLayer::run_timeout).
        limit: Duration,
    },
    /// `misconfigured`, 500: a mistake of the service, or an error of the database that a retry would get again. The
    /// source is an [`Error`](crate::Error), or an error of the layer. The service's log has the source, which
    /// describes what to do. The layer has committed nothing. **Effects outside the layer's transaction, or under a
    /// lease, remain.**
    #[error("the service failed in a way that a retry does not fix; do not repeat the operation under another key")]
    Misconfigured(#[source] Arc<dyn StdError + Send + Sync>),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Mistake {
    #[error(
        "the request has no matched route to name its operation; add the layer by axum's Router::route_layer, with the \
         feature axum, or name the operation by IdempotencyLayer::operation"
    )]
    NoOperation,
    /// The resumed request has another key here than in its record, so its effect would have another downstream key.
    /// So nothing was performed.
    #[error(
        "a resumed request has another key here, of the operation {found:?}, than its record, of the operation \
         {recorded:?}; if the operations differ, name that of the record with IdempotencyLayer::operation; otherwise \
         the scope or the value differs: let `decide` put the same identity into the request as your authentication \
         does"
    )]
    ResumedUnderAnotherKey { recorded: String, found: String },
    /// One router may have two `IdempotencyLayer`s, for example. Nothing was performed.
    #[error("two IdempotencyLayers cover this request; give each layer a Router of its own, and merge the routers")]
    CoveredTwice,
    #[error("the handler answered and still holds its IdempotentTx; drop it before the response is returned")]
    TransactionKept,
    #[error(
        "the handler succeeded without its IdempotentTx, so its effects would not commit with the key; let it take the \
         IdempotentTx, even if it has no effects in this database"
    )]
    TransactionNotTaken,
    /// The writes of the handler's first call are still in the transaction.
    #[error(
        "the IdempotentTx was given back and taken again, but the layer lends it once; put the code that retries \
         outside the layer"
    )]
    TransactionTakenAgain,
    #[error("the response could not be read to its end: {0}")]
    BrokenResponse(String),
    /// A gRPC call that fails has the status 200.
    #[error("the layer cannot judge a gRPC response; call ensure_idempotent in the method, without the layer")]
    Grpc,
}

impl From<Mistake> for Rejection {
    fn from(mistake: Mistake) -> Self {
        Self::Misconfigured(Arc::new(mistake))
    }
}

impl From<MalformedKey> for Rejection {
    fn from(malformed: MalformedKey) -> Self {
        Self::MalformedKey(malformed.to_string())
    }
}

impl Rejection {
    /// The last part of the problem's `type`, after `urn:pg-idempotency:problem:`. This name is stable.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.kind_and_status().0
    }

    /// The status that the draft demands, or the status that HTTP suggests where the draft demands no status.
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
            Self::UndecodableBody | Self::InvalidBody(_) => ("invalid-body", StatusCode::BAD_REQUEST),
            Self::KeyReused => ("key-reused", StatusCode::UNPROCESSABLE_ENTITY),
            Self::InFlight { .. } => ("in-flight", StatusCode::CONFLICT),
            Self::Indeterminate { .. } => ("indeterminate", StatusCode::CONFLICT),
            Self::Exhausted { .. } => ("exhausted", StatusCode::CONFLICT),
            Self::NotReplayable { .. } => ("not-replayable", StatusCode::CONFLICT),
            Self::Unavailable(_) => ("unavailable", StatusCode::SERVICE_UNAVAILABLE),
            Self::Overloaded { .. } => ("overloaded", StatusCode::SERVICE_UNAVAILABLE),
            // A load balancer takes a host with several 5xx out of service, and one account must not cause this.
            Self::TooManyRequests { .. } => ("too-many-requests", StatusCode::TOO_MANY_REQUESTS),
            Self::TimedOut { .. } => ("timed-out", StatusCode::SERVICE_UNAVAILABLE),
            Self::Misconfigured(_) => ("misconfigured", StatusCode::INTERNAL_SERVER_ERROR),
        }
    }

    /// Whether the same request, with the same key, may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::BrokenBody) || self.retry_after().is_some()
    }

    /// The time after which to send the request again, as in `Retry-After`. `None` if there is no such header.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::InFlight { retry_after } => Some(*retry_after),
            Self::Unavailable(_) | Self::Overloaded { .. } | Self::TooManyRequests { .. } | Self::TimedOut { .. } => {
                Some(RETRY_AFTER)
            }
            _ => None,
        }
    }

    /// The rejection for an error of the crate's own statements. There is no `From<Error>` for this conversion, because
    /// a handler judges its own errors.
    pub(crate) fn of(error: Error) -> Self {
        match error {
            Error::KeyReused { .. } => Self::KeyReused,
            Error::InFlight { retry_after } => Self::InFlight { retry_after },
            Error::Indeterminate { token, steps, .. } => Self::Indeterminate { token, steps },
            Error::Exhausted { attempts, token, .. } => Self::Exhausted { attempts, token },
            Error::Undecodable { .. } => Self::NotReplayable { status: None },
            Error::InvalidRequest(InvalidRequest::Body(source)) => Self::InvalidBody(source),
            error if error.is_transient() => Self::Unavailable(Arc::new(error)),
            // This rejection has no `Retry-After`. Otherwise a client would retry for ever, and the handler would run
            // each time.
            error => Self::misconfigured(error),
        }
    }

    pub(super) fn misconfigured(error: Error) -> Self {
        Self::Misconfigured(Arc::new(error))
    }

    pub(crate) fn of_key(invalid: InvalidKey) -> Self {
        match invalid.part() {
            // The operation may contain a part of the path, which the client has chosen.
            KeyPart::Value | KeyPart::Operation => MalformedKey::from(invalid).into(),
            KeyPart::Scope => Self::misconfigured(invalid.into()),
        }
    }

    pub(super) fn of_body(broken: &Broken) -> Self {
        match broken {
            broken if broken.is_over_a_limit() => Self::BodyTooLarge { limit: None },
            broken if broken.is_final() => Self::UndecodableBody,
            _ => Self::BrokenBody,
        }
    }

    /// The rejection for an error of a statement that comes after the handler's statements.
    pub(super) fn of_completion(error: Error) -> Self {
        // The claim could still write in this transaction. So if the transaction has become read only, the handler has
        // changed it.
        if error.is_write_in_read_only() { Self::misconfigured(error) } else { Self::of(error) }
    }

    /// The outcome of a transactional run, or of a request without a run, for the metrics and the span.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::KeyReused => "key_reused",
            Self::InFlight { .. } => "in_flight",
            Self::Indeterminate { .. } => "indeterminate",
            Self::NotReplayable { .. } => observe::REPLAYED,
            Self::Misconfigured(error) if matches!(error.downcast_ref(), Some(Error::OtherMode { .. })) => "other_mode",
            Self::TimedOut { .. } => observe::FAILED,
            Self::Overloaded { .. } => observe::OVERLOADED,
            Self::TooManyRequests { .. } => observe::TOO_MANY_REQUESTS,
            _ => observe::ERROR,
        }
    }

    /// Logs a rejection that a person has to know about. Leaves the line out if a line of the same kind was written in
    /// the last minute. The line names the operation, because a span at the level `debug` may be off.
    pub(super) fn log(&self, operation: Option<&str>, lines: &Seldom) {
        let kind = match self {
            Self::Unavailable(error) => error.to_string(),
            Self::Misconfigured(error) => error.to_string(),
            // The metrics count each rejection of these kinds, and `unsettled` lists the tokens.
            Self::TimedOut { .. } | Self::Indeterminate { .. } | Self::Exhausted { .. } => self.kind().to_owned(),
            _ => return,
        };
        let Some(left_out) = lines.due(operation, &kind) else { return };
        match self {
            Self::Unavailable(error) => {
                let error = &**error as &dyn StdError;
                tracing::warn!(operation, left_out, error, "a request could not be made idempotent, and was refused");
            }
            Self::Misconfigured(error) => {
                let error = &**error as &dyn StdError;
                tracing::error!(operation, left_out, error, "a request met a mistake in the service's set-up");
            }
            Self::TimedOut { limit } => {
                tracing::warn!(operation, left_out, ?limit, "a handler ran into the layer's time-out, and was dropped");
            }
            Self::Indeterminate { token, steps } => {
                let steps = (!steps.is_empty()).then(|| tracing::field::debug(steps));
                tracing::warn!(operation, left_out, token, steps, kind, "{WAITS}");
            }
            Self::Exhausted { token, .. } => tracing::warn!(operation, left_out, token, kind, "{WAITS}"),
            _ => {}
        }
    }
}

/// The default response for a rejection: a problem (RFC 9457) with `type`, `title`, `status`, `detail` and `retryable`.
/// If the rejection has a [`retry_after`](Rejection::retry_after), the response has the header `Retry-After`. The
/// response has `Cache-Control: no-store`.
#[must_use]
pub fn problem(rejection: &Rejection) -> Response<Bytes> {
    let status = rejection.status();
    let body = json!({
        "type": format!("urn:pg-idempotency:problem:{}", rejection.kind()),
        "title": rejection.kind().replace('-', " "),
        "status": status.as_u16(),
        "detail": rejection.to_string(),
        "retryable": rejection.is_retryable(),
    });
    let mut response = Response::new(Bytes::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    // If the layer covers GET, a cache may store a rejection without this header, and send it to a client with another
    // key.
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Some(retry_after) = rejection.retry_after() {
        // The header counts whole seconds, and 0 would mean an immediate retry.
        let seconds = u64::try_from(retry_after.as_millis().div_ceil(1000)).unwrap_or(u64::MAX).max(1);
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

/// The response of the service to a request that it does not admit. The service's function for the scope or for the key
/// returns this value as an error. A status converts into a response with an empty body:
/// `.ok_or(StatusCode::UNAUTHORIZED)?`.
// The response is boxed, because otherwise each successful result would have the size of a response.
#[derive(Debug)]
pub struct Denied(pub(super) Box<Response<Bytes>>);

impl From<Response<Bytes>> for Denied {
    fn from(response: Response<Bytes>) -> Self {
        Self(Box::new(response))
    }
}

impl From<StatusCode> for Denied {
    fn from(status: StatusCode) -> Self {
        let mut response = Response::default();
        *response.status_mut() = status;
        response.into()
    }
}

/// The response of a handler whose extractor has failed. The text of the mistake is for the service's log.
#[cfg(feature = "axum")]
pub(super) fn cannot_have(what: &str, error: &(dyn StdError + 'static)) -> axum::response::Response {
    // If the route has no layer, any client can cause this line of the log.
    static LINES: LazyLock<Seldom> = LazyLock::new(Seldom::default);
    if let Some(left_out) = LINES.due(None, &error.to_string()) {
        tracing::error!(error, left_out, "a handler cannot have its {what}");
    }
    axum::response::IntoResponse::into_response(StatusCode::INTERNAL_SERVER_ERROR)
}

/// The log gets at most one line in this time for each operation and kind, because clients can cause these lines.
const PACE: Duration = Duration::from_secs(60);
/// The greatest number of kinds of lines, because a service may put text of its clients into its operations. Above this
/// number, all new lines have one common kind.
const KINDS: usize = 256;

/// For each kind, the time of the last line, and how many lines were left out since.
#[derive(Default)]
pub(super) struct Seldom(Mutex<HashMap<(String, String), (Instant, u64)>>);

impl Seldom {
    /// Returns how many lines of this kind were left out since the last line, or `None` if this line is left out, too.
    pub(super) fn due(&self, operation: Option<&str>, kind: &str) -> Option<u64> {
        self.due_at(operation, kind, Instant::now())
    }

    fn due_at(&self, operation: Option<&str>, kind: &str, now: Instant) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut line = (operation.unwrap_or_default().to_owned(), kind.to_owned());
        if !lines.contains_key(&line) && lines.len() >= KINDS {
            // Keeps each kind that has lines left out, because their number is still to be reported. Forgets each other
            // kind whose last line is at least `PACE` old.
            lines.retain(|_, (written, left_out)| *left_out > 0 || now.duration_since(*written) < PACE);
            if lines.len() >= KINDS {
                line = Default::default();
            }
        }
        match lines.get_mut(&line) {
            Some((written, left_out)) if now.duration_since(*written) < PACE => {
                *left_out += 1;
                None
            }
            known => {
                let left_out = known.map_or(0, |(_, left_out)| *left_out);
                lines.insert(line, (now, 0));
                Some(left_out)
            }
        }
    }
}

/// The operations that have their line in the log.
#[derive(Default)]
pub(super) struct Once(Mutex<HashSet<String>>);

impl Once {
    /// Whether this is the first line about the operation. Above the greatest number of operations, no line is due.
    pub(super) fn is_first(&self, operation: &str) -> bool {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        written.len() < KINDS && written.insert(operation.to_owned())
    }
}

#[cfg(test)]
#[path = "../../tests/unit/http/rejection.rs"]
mod tests;
