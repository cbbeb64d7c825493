//! The layer: its constructors and their defaults. The setters are in the folder.

mod setters;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Method, Response, StatusCode};
use sqlx::PgPool;

use super::fingerprint_choice::FingerprintChoice;
use super::held_bytes::HeldBytes;
use super::places::{Bounds, Places};
use super::rebuild::Rebuild;
use super::rejection::{Denied, Rejection, problem};
use super::replay::REPLAYED;
use super::seldom::Seldom;
use super::stored_request::STORED;
use crate::lease::LeaseOptions;
use crate::limits::check_wait;
use crate::route::without_names;
use crate::session::ANSWER;
use crate::{Error, Idempotency, Mode, OnDuplicate};

/// The default limit of a body. Two copies of it are in memory during a run, and a third one until the claim, if
/// requests are stored.
const BODY_LIMIT: usize = 1024 * 1024;
/// The default number of runs for each connection of the pool. A connection serves about 30 transactions of 150 ms each
/// in the 5 seconds for which it should wait. A run further back in the queue would wait, keep its body in memory also
/// if its client hangs up, and fail all the same.
const RUNS_PER_CONNECTION: usize = 32;
/// The default time for a handler. Common proxies and load balancers give up after a minute, so no client has waited
/// for the answer for a while. Work that takes longer on purpose belongs into a queue.
const RUN_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// A bound for a pool that waits for ever, so that the deadline is a time. It is longer than any wait for another
/// request.
const LONGEST_PLACE_TIME: Duration = Duration::from_secs(24 * 3600);

type ScopeOf = dyn Fn(&Parts) -> Result<String, Denied> + Send + Sync;
type KeyOf = dyn Fn(&Parts, &Bytes) -> Result<Option<String>, Denied> + Send + Sync;
type OperationOf = dyn Fn(&Parts) -> Option<String> + Send + Sync;
type ResponseOf = dyn Fn(&Rejection) -> Response<Bytes> + Send + Sync;

/// Makes the requests that pass through it idempotent. The [module documentation](super) describes the behaviour.
///
/// It is cheap to clone.
#[derive(Clone)]
#[must_use = "a setter returns the layer with the setting"]
pub struct IdempotencyLayer {
    pub(super) pool: PgPool,
    pub(super) mode: LayerMode,
    // The key.
    pub(super) methods: Vec<Method>,
    pub(super) scope: Arc<ScopeOf>,
    /// `None`: the method, and the route that axum has matched.
    pub(super) operation: Option<Arc<OperationOf>>,
    /// Where the value of the key comes from, if not from the header.
    pub(super) key_from: Option<Arc<KeyOf>>,
    pub(super) key_required: bool,
    pub(super) shortest_key: usize,
    pub(super) fingerprint: FingerprintChoice,
    // The response.
    pub(super) stored_errors: Vec<StatusCode>,
    pub(super) replayed_headers: Vec<HeaderName>,
    pub(super) replay: Option<Arc<dyn Rebuild>>,
    /// Of a request that is stored.
    pub(super) stored_headers: Vec<HeaderName>,
    pub(super) rejection: Arc<ResponseOf>,
    // The bounds.
    pub(super) held: HeldBytes,
    pub(super) request_limit: usize,
    pub(super) response_limit: usize,
    pub(super) lines: Arc<Seldom>,
    pub(super) places: Places,
    pub(super) max_runs: usize,
    pub(super) max_runs_of_one_scope: Option<usize>,
    pub(super) run_timeout: Duration,
}

/// How a layer protects an operation from a second run.
#[derive(Clone, Copy, Debug)]
pub(super) enum LayerMode {
    Transactional(Idempotency),
    Leased(LeaseOptions),
}

impl LayerMode {
    /// The mode of the records.
    pub(super) fn of_records(self) -> Mode {
        match self {
            Self::Transactional(_) => Mode::Transaction,
            Self::Leased(options) => options.mode(),
        }
    }

    /// Refuses options that contradict each other.
    fn check(self) -> Result<(), Error> {
        match self {
            Self::Transactional(options) => check_wait(options.on_duplicate, options.retention),
            Self::Leased(options) => options.check(),
        }
    }

    /// How long a request waits for another one with its key. Zero: not at all.
    pub(super) fn wait(self) -> Duration {
        match self {
            Self::Transactional(Idempotency { on_duplicate: Some(OnDuplicate::Wait(limit)), .. }) => limit,
            Self::Transactional(_) => Duration::ZERO,
            Self::Leased(options) => options.wait(),
        }
    }
}

impl IdempotencyLayer {
    /// A layer for effects in this database. Key, effects and response commit in one transaction, which the handler
    /// takes as [`IdempotentTx`](super::IdempotentTx), before the first byte is sent. Writes by another connection are
    /// not a part of it, and happen as often as the handler runs. A handler without effects in this database takes the
    /// transaction, too.
    ///
    /// `options` are those of a call: retention, deployment, round trips, and what to do about a concurrent duplicate.
    /// Over HTTP the default for a duplicate is [`Reject`](crate::OnDuplicate::Reject), because anybody may send one. A
    /// request that [waits](crate::OnDuplicate::Wait) polls, and holds no connection between two polls. **Tell your
    /// clients the retention**: a retry that comes later is performed.
    ///
    /// `scope` returns the tenant, account or user of the request. It must come **from the authenticated identity**,
    /// which a layer further out has put into the request's extensions, and never from an unauthenticated part of the
    /// request. If `scope` returns an error, that is the response.
    ///
    /// # Panics
    ///
    /// If the options contradict each other, for example if their wait is not shorter than their retention.
    #[track_caller]
    pub fn transactional(
        pool: PgPool,
        options: Idempotency,
        scope: impl Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
    ) -> Self {
        Self::new(pool, LayerMode::Transactional(options), Arc::new(scope))
    }

    /// A layer for effects outside this database. The key is claimed under a lease, which renews itself while the
    /// handler runs, and the response is stored afterwards. The [policy](crate::lease) of the options decides what
    /// happens if the handler dies in between. `scope` is as for a [transactional layer](Self::transactional).
    ///
    /// With [`store_request`](LeaseOptions::store_request), a [`RequestResumer`](super::RequestResumer) finishes
    /// the requests whose clients do not come back.
    ///
    /// # Panics
    ///
    /// If the options contradict each other, as for a [transactional layer](Self::transactional), or if their retention
    /// is shorter than twice their lease.
    #[track_caller]
    pub fn leased(
        pool: PgPool,
        options: LeaseOptions,
        scope: impl Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
    ) -> Self {
        Self::new(pool, LayerMode::Leased(options), Arc::new(scope))
    }

    #[track_caller]
    fn new(pool: PgPool, mode: LayerMode, scope: Arc<ScopeOf>) -> Self {
        // Not when the layer is applied: axum does that at the first connection.
        if let Err(contradiction) = mode.check() {
            panic!("the layer cannot serve: {contradiction}");
        }
        let connections = connections(&pool);
        Self {
            pool,
            mode,
            methods: vec![Method::POST, Method::PATCH],
            scope,
            operation: None,
            key_from: None,
            key_required: true,
            shortest_key: 0,
            fingerprint: FingerprintChoice::default(),
            stored_errors: Vec::new(),
            replayed_headers: REPLAYED.to_vec(),
            replay: None,
            stored_headers: STORED.to_vec(),
            rejection: Arc::new(problem),
            held: HeldBytes::default(),
            request_limit: BODY_LIMIT,
            response_limit: BODY_LIMIT,
            lines: Arc::default(),
            places: Places::default(),
            max_runs: connections.saturating_mul(RUNS_PER_CONNECTION),
            max_runs_of_one_scope: None,
            run_timeout: RUN_TIMEOUT,
        }
    }

    /// The operation of a request. `None` if nothing names it.
    pub(super) fn operation_of(&self, parts: &Parts) -> Option<String> {
        self.operation.as_ref().map_or_else(|| matched_operation(parts), |named| named(parts))
    }

    /// How long a request waits for a place among the runs: as long as for a connection.
    pub(super) fn place_time(&self) -> Duration {
        self.pool.options().get_acquire_timeout().min(LONGEST_PLACE_TIME)
    }

    pub(super) fn bounds(&self) -> Bounds {
        let (all, connections) = (self.max_runs, connections(&self.pool));
        let of_one_scope = self.max_runs_of_one_scope.unwrap_or_else(|| match self.mode {
            // A run without a connection would only wait for one.
            LayerMode::Transactional(_) => seven_eighths(all.min(connections)),
            LayerMode::Leased(_) => seven_eighths(all),
        });
        // At least half of the places of the scope are left to other keys, if there are two.
        Bounds { all, of_one_scope, of_one_key: connections.min(of_one_scope / 2).max(1) }
    }

    /// How many bytes the bodies that arrive or wait may have together: those of a largest body for each place, because
    /// more requests than that would wait in vain. The half that one scope may have is at least one such body.
    pub(super) fn most_held(&self) -> usize {
        self.request_limit.saturating_mul(self.max_runs.max(2))
    }

    /// The longest wait for the database, before and after the handler. It is not longer than the handler may take, but
    /// a busy server has a second.
    pub(super) fn answer_time(&self) -> Duration {
        self.run_timeout.clamp(Duration::from_secs(1), ANSWER)
    }
}

fn connections(pool: &PgPool) -> usize {
    usize::try_from(pool.options().get_max_connections()).unwrap_or(usize::MAX)
}

/// At least one is left, if there are two, and at least one is given.
fn seven_eighths(all: usize) -> usize {
    (all - all.div_ceil(8)).max(1)
}

/// The method, and the route that axum has matched. Without the names of its parameters: who renames one would make
/// every key new, so that a retry performs again.
fn matched_operation(parts: &Parts) -> Option<String> {
    #[cfg(feature = "axum")]
    let route = parts.extensions.get().map(axum::extract::MatchedPath::as_str);
    #[cfg(not(feature = "axum"))]
    let route: Option<&str> = None;
    Some(format!("{} {}", parts.method, without_names(route?)))
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").field("mode", &self.mode).finish_non_exhaustive()
    }
}
