//! The settings of a layer, with their defaults.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Method, Response, StatusCode};
use sqlx::PgPool;

use super::fingerprint_choice::FingerprintChoice;
use super::local_in_flight::LocalInFlight;
use super::rejection::{Rejection, problem};
use super::replay::REPLAYED;
use super::runs::Runs;
use crate::lease::Leasing;
use crate::limits::in_flight_within;
use crate::session::ANSWER;
use crate::{Idempotency, InFlight, InvalidDuration, Mode};

/// The default limit of a body. Two copies of it are in memory during a run.
const BODY_LIMIT: usize = 1024 * 1024;
/// The default number of runs for each connection of the pool. A connection serves about 30 transactions of a second
/// each in the 30 seconds for which sqlx waits for a connection by default. A run further back in the queue would keep
/// its body in memory, wait, and fail all the same.
const RUNS_PER_CONNECTION: usize = 32;
/// The default time for a handler. Common proxies and load balancers give up after a minute, so no client has waited
/// for the answer for a while. Work that takes longer on purpose belongs into a queue.
const RUN_TIMEOUT: Duration = Duration::from_secs(5 * 60);

pub(super) type ScopeOf = dyn Fn(&Parts) -> Result<String, Denied> + Send + Sync;
pub(super) type KeyOf = dyn Fn(&Parts, &Bytes) -> Result<Option<String>, Denied> + Send + Sync;
pub(super) type OperationOf = dyn Fn(&Parts) -> Option<String> + Send + Sync;
pub(super) type ResponseOf = dyn Fn(&Rejection) -> Response<Bytes> + Send + Sync;

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) pool: PgPool,
    pub(super) protection: Protection,
    // The key.
    pub(super) methods: Vec<Method>,
    pub(super) scope: Arc<ScopeOf>,
    pub(super) operation: Arc<OperationOf>,
    /// Where the value of the key comes from, if not from the header.
    pub(super) key_from: Option<Arc<KeyOf>>,
    pub(super) key_required: bool,
    pub(super) shortest_key: usize,
    pub(super) fingerprint: FingerprintChoice,
    // The response.
    pub(super) stored_errors: Vec<StatusCode>,
    pub(super) replayed_headers: Vec<HeaderName>,
    pub(super) rejection: Arc<ResponseOf>,
    // The bounds.
    pub(super) local: LocalInFlight,
    pub(super) request_limit: usize,
    pub(super) response_limit: usize,
    pub(super) runs: Runs,
    pub(super) max_runs: usize,
    pub(super) run_timeout: Duration,
}

impl Settings {
    /// The longest wait for the database, before and after the handler. It is not longer than the handler may take, but a
    /// busy server has a second.
    pub(super) fn answer_time(&self) -> Duration {
        self.run_timeout.clamp(Duration::from_secs(1), ANSWER)
    }

    pub(super) fn new(pool: PgPool, protection: Protection, scope: Arc<ScopeOf>) -> Self {
        let connections = usize::try_from(pool.options().get_max_connections()).unwrap_or(usize::MAX);
        Self {
            pool,
            protection,
            methods: vec![Method::POST, Method::PATCH],
            scope,
            operation: Arc::new(matched_operation),
            key_from: None,
            key_required: true,
            shortest_key: 1,
            fingerprint: FingerprintChoice::default(),
            stored_errors: Vec::new(),
            replayed_headers: REPLAYED.to_vec(),
            rejection: Arc::new(problem),
            local: LocalInFlight::default(),
            request_limit: BODY_LIMIT,
            response_limit: BODY_LIMIT,
            runs: Runs::default(),
            max_runs: connections.saturating_mul(RUNS_PER_CONNECTION),
            run_timeout: RUN_TIMEOUT,
        }
    }
}

/// How the layer protects an operation from a second run.
#[derive(Clone, Copy, Debug)]
pub(super) enum Protection {
    Transactional(Idempotency),
    Leased(Leasing),
}

impl Protection {
    /// The mode of the records.
    pub(super) fn mode(self) -> Mode {
        match self {
            Self::Transactional(_) => Mode::Transaction,
            Self::Leased(options) => options.mode(),
        }
    }

    /// How long a request waits for another one with its key. Zero: not at all.
    pub(super) fn wait(self) -> Result<Duration, InvalidDuration> {
        match self {
            Self::Transactional(Idempotency { in_flight, retention, .. }) => {
                match in_flight_within(Some(in_flight.unwrap_or(InFlight::Reject)), retention)? {
                    InFlight::Reject => Ok(Duration::ZERO),
                    InFlight::Wait(limit) => Ok(limit),
                }
            }
            Self::Leased(options) => options.wait(),
        }
    }
}

/// The method, and the route that axum has matched.
fn matched_operation(parts: &Parts) -> Option<String> {
    #[cfg(feature = "axum")]
    let route = parts.extensions.get().map(axum::extract::MatchedPath::as_str);
    #[cfg(not(feature = "axum"))]
    let route: Option<&str> = None;
    Some(format!("{} {}", parts.method, route?))
}

/// A response of the service itself to a request that it does not admit, from its function for the scope or for the
/// key. A status converts into one with an empty body: `.ok_or(StatusCode::UNAUTHORIZED)?`.
// Boxed, because every successful result would have the size of a response.
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
