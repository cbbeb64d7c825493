//! The layer: its constructors, its settings and their defaults.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Method, Response, StatusCode};
use sqlx::PgPool;

use super::body::HeldBytes;
use super::places::{Bounds, Places, Runs};
use super::rejection::{Denied, Rejection, Seldom, problem};
use super::replay::{NEVER_REPLAYED, REPLAYED, Rebuild, Replay, to_record};
use super::request::{Compared, FingerprintChoice, NEVER_STORED, STORED, matched_operation};
use crate::fingerprint::Pointer;
use crate::lease::{Finding, LeaseOptions};
use crate::limits::{RETENTION, check_wait, is_in};
use crate::session::ANSWER_TIME;
use crate::{Error, Idempotency, Mode, OnDuplicate};

/// The default limit of a body. Two copies of a body are in memory during a run. If requests are stored, there is a
/// third copy until the claim.
const BODY_LIMIT: usize = 1024 * 1024;
/// The default number of runs for each connection of the pool. A connection serves about 30 transactions of 150 ms each
/// in the 5 seconds for which it should wait. A run further back in the queue would wait, keep its body in memory even
/// if its client hangs up, and then fail.
const RUNS_PER_CONNECTION: usize = 32;
/// The default time for a handler. Common proxies and load balancers give up after a minute, so no client waits any
/// more. Work that takes longer on purpose belongs into a queue.
const RUN_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// The longest wait for a place if the pool waits for ever, because a deadline must be a finite time. No wait for
/// another request is longer.
const LONGEST_PLACE_TIME: Duration = Duration::from_secs(24 * 3600);

type ScopeOf = dyn Fn(&Parts) -> Result<String, Denied> + Send + Sync;
type KeyOf = dyn Fn(&Parts, &Bytes) -> Result<Option<String>, Denied> + Send + Sync;
type OperationOf = dyn Fn(&Parts) -> Option<String> + Send + Sync;
type ResponseOf = dyn Fn(&Rejection) -> Response<Bytes> + Send + Sync;

/// Makes the requests that pass through it idempotent. The [module](super) describes the behaviour, and the guide's
/// page `settings` lists all settings. A clone is cheap.
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

impl IdempotencyLayer {
    /// A layer for effects in this database. Key, effects and response commit in one transaction, before the first byte
    /// is sent. The handler takes this transaction as [`IdempotentTx`](super::IdempotentTx), even if it has no effects
    /// in this database. Writes by another connection are outside of it, and happen each time the handler runs.
    ///
    /// `options` are those of a call. Over HTTP the default for a duplicate is [`Reject`](crate::OnDuplicate::Reject),
    /// because any client may send one. A request that [waits](crate::OnDuplicate::Wait) polls, and holds no connection
    /// between two polls. **Tell your clients the retention**: a retry that comes later is performed.
    ///
    /// `scope` returns the tenant, account or user of the request **from the authenticated identity**, which a layer
    /// further out has put into the request's extensions. Never use an unauthenticated part of the request. An error of
    /// `scope` is the response.
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

    /// A layer for effects outside this database. The key is claimed under a lease, which is renewed while the handler
    /// runs. The response is stored afterwards. The [policy](crate::lease) of the options decides what happens if the
    /// process dies in between. `scope` is as for a [transactional layer](Self::transactional).
    ///
    /// With [`store_request`](LeaseOptions::store_request), a [`RequestResumer`](super::RequestResumer) finishes the
    /// requests whose clients do not come back.
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
}

/// Which requests have a key, and which key it is.
impl IdempotencyLayer {
    /// The methods that the layer covers. It passes on all others unchanged. The default is POST and PATCH. HTTP
    /// defines the other methods as idempotent (RFC 9110, section 9.2.2), and your handlers must make them so.
    ///
    /// axum answers HEAD by the handler of GET. If you cover GET, also cover HEAD, or route it by itself. Otherwise the
    /// handler finds no transaction or lease at a HEAD, and the answer is a 500. GET and HEAD with one key are two
    /// operations.
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        Self { methods: methods.into_iter().collect(), ..self }
    }

    /// Whether requests without a key are performed, each time. The default is `false`. A transactional layer gives
    /// them a transaction, too. Their bodies are read to the end before the handler runs, up to the
    /// [limit](Self::request_limit). So set this limit to the route's, and leave routes that stream a body outside the
    /// layer.
    pub fn optional_key(self, optional: bool) -> Self {
        Self { key_required: !optional, ..self }
    }

    /// The fewest characters that the value of a key may have. The default is no minimum. The answer to a shorter key
    /// is a 400 `malformed-key`, and nothing is done. A client that counts its requests repeats short keys by mistake,
    /// and then gets the answer to another request, or a 422. A minimum of 8 refuses most counters, and no UUID.
    ///
    /// The minimum applies to the header and to [`key_from`](Self::key_from). **A retry of an earlier request with a
    /// shorter key is refused, too**, and its client may use a new key and so repeat the operation. So set the minimum
    /// before clients send keys. A stored request is resumed and settled under any key.
    pub fn shortest_key(self, characters: usize) -> Self {
        Self { shortest_key: characters, ..self }
    }

    /// Takes the value of the key from another place than `Idempotency-Key`: from another header, or from a field of
    /// the body. `Ok(None)` means that the key is missing. An error of the function is the response. No response echoes
    /// such a key.
    pub fn key_from(
        self,
        value: impl Fn(&Parts, &Bytes) -> Result<Option<String>, Denied> + Send + Sync + 'static,
    ) -> Self {
        Self { key_from: Some(Arc::new(value)), ..self }
    }

    /// Names the operation by a function of the request. The default is the method and the route that axum has matched,
    /// without the names of its parameters: `POST /payments/{}`, and `{*}` for the rest of a path. Return such a
    /// template: with real ids, every payment would be an operation and a time series of its own. If you do use the
    /// path, decode its percent-encoding, because `/a` and `/%61` would be two operations.
    ///
    /// The answer to `None` is a 500 `misconfigured`. The answer to a text that a [`Key`](crate::Key) refuses is a 400
    /// `malformed-key`.
    ///
    /// **The operation is a part of the key: if it changes, a retry of an earlier request is performed again.** Another
    /// name of a parameter changes nothing. Another prefix or method changes the operation, and so does a route that is
    /// split, merged, or gets a `{*rest}` instead of a parameter. When you make such a change, let this function return
    /// the old text until the retention has passed, and keep the [`RequestResumer`](super::RequestResumer) of the old
    /// operation.
    pub fn operation(self, operation: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self { operation: Some(Arc::new(operation)), ..self }
    }
}

/// The fingerprint.
impl IdempotencyLayer {
    /// Compares bodies as canonical JSON instead of byte by byte, for clients that build the request anew for each
    /// retry. A body that is not JSON is refused with a 400. A body without a [canonical
    /// form](crate::Fingerprint::of_json) is compared byte by byte, also in the ignored parts.
    ///
    /// `ignored` are JSON pointers (RFC 6901) to parts that do not count, for clients that put a timestamp or the
    /// number of the attempt into each body: `layer.canonical_json(["/sent_at", "/client/attempt"])`. The body need not
    /// have these parts. **Ignore only parts on which the handler does not act**: two requests that differ only in them
    /// are the same, and the second one gets the response of the first.
    ///
    /// # Panics
    ///
    /// For a text that is not a JSON pointer, and for the empty pointer, which is the whole body.
    #[track_caller]
    pub fn canonical_json<'p>(mut self, ignored: impl IntoIterator<Item = &'p str>) -> Self {
        let parse = |text: &str| {
            Pointer::parse(text).unwrap_or_else(|| {
                panic!("{text:?} is not a JSON pointer to a part of the body (RFC 6901); write /name or /outer/inner")
            })
        };
        let ignored = ignored.into_iter().map(parse).collect();
        self.fingerprint.compared = Compared::Json { ignored };
        self
    }

    /// Also stores this header with a [stored request](crate::lease::LeaseOptions::store_request), in plain text. A
    /// resumed request has only stored headers, so name each header by which the handler or
    /// [`key_from`](Self::key_from) decides. `Content-Type`, `Content-Encoding`, `Idempotency-Key` and the headers of
    /// the fingerprint are always stored.
    ///
    /// # Panics
    ///
    /// For `Authorization`, `Cookie` and `Proxy-Authorization`. They are not stored as headers of the fingerprint
    /// either.
    #[track_caller]
    pub fn store_header(mut self, name: HeaderName) -> Self {
        assert!(
            !NEVER_STORED.contains(&name),
            "the header {name} must not be stored: it proves who the client is, now"
        );
        self.stored_headers.push(name);
        self
    }

    /// Adds this header, with all its lines, to the fingerprint. Use a header by which the handler selects an account,
    /// a currency or a language. Do not use one that a client changes with each attempt, such as a trace or a date. For
    /// `Host`, the authority of the URI counts, too, as HTTP/2 sends it, unless the header says the same.
    pub fn fingerprint_header(mut self, name: HeaderName) -> Self {
        self.fingerprint.add_header(name);
        self
    }
}

/// Which responses are stored, and how rejections look.
impl IdempotencyLayer {
    /// Also stores responses of these statuses, from 400 to 499, such as "card declined". Otherwise they free the key.
    /// A transactional layer undoes the handler's writes by a savepoint, which costs every request one round trip.
    ///
    /// # Panics
    ///
    /// For any other status. A success is always stored, and a retry must be able to repeat a 5xx.
    #[track_caller]
    pub fn store_errors(self, statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        let statuses: Vec<_> = statuses.into_iter().collect();
        for status in &statuses {
            assert!(
                status.is_client_error(),
                "responses of status {status} cannot be stored by choice; only 400 to 499 can"
            );
        }
        Self { stored_errors: statuses, ..self }
    }

    /// Also replays this header.
    ///
    /// # Panics
    ///
    /// For `Set-Cookie`, authentication, hop-by-hop headers, `Date`, `Content-Length`, and the headers that the layer
    /// adds itself.
    #[track_caller]
    pub fn replay_header(mut self, name: HeaderName) -> Self {
        assert!(
            !NEVER_REPLAYED.contains(&name),
            "the header {name} must not be replayed: it belongs to one connection, one session or one moment"
        );
        self.replayed_headers.push(name);
        self
    }

    /// Rebuilds an answer from the [reference](super::AnswerBy) in the record. Use references for answers that hold
    /// credentials, are large, or must show the present state. Stored bodies are replayed as without this setting. One
    /// layer has one type of reference. A layer without this setting answers 500 `misconfigured` to a record with a
    /// reference.
    pub fn replay(self, replay: impl Replay) -> Self {
        Self { replay: Some(Arc::new(replay)), ..self }
    }

    /// The function that makes a response of a rejection. The default is [`problem`](super::problem). The function may
    /// change the response of `problem`, for example add a `Link` to your documentation of the key, as the draft
    /// demands.
    pub fn on_rejection(self, rejection: impl Fn(&Rejection) -> Response<Bytes> + Send + Sync + 'static) -> Self {
        Self { rejection: Arc::new(rejection), ..self }
    }
}

/// Settling a request whose outcome is unknown.
impl IdempotencyLayer {
    /// The finding of a [`Reconciler`](crate::lease::Reconciler) for an operation of this layer that took effect, with
    /// the response that the handler would have sent. It is stored like the handler's response: the status, the
    /// replayed headers and the body. For a step, return [`Finding::took_effect`] with the result of the step.
    ///
    /// # Errors
    ///
    /// [`Error::Unencodable`] for an informational status, and for a body over
    /// [`response_limit`](Self::response_limit), which no retry would get.
    pub fn took_effect(&self, response: Response<impl Into<Vec<u8>>>) -> Result<Finding, Error> {
        let (parts, body) = response.into_parts();
        let body = body.into();
        if body.len() > self.response_limit || parts.status.is_informational() {
            return Err(Error::Unencodable {
                source: "the response is too large, or has an informational status".into(),
            });
        }
        Ok(Finding::of_response(to_record(&parts, Some(body), &self.replayed_headers)))
    }
}

/// The bounds of sizes and runs.
impl IdempotencyLayer {
    /// The largest request body, in bytes. The default is 1 MiB. The limit also decides how many
    /// [bytes](crate::http#runs) the requests that upload or wait may hold together.
    pub fn request_limit(self, bytes: usize) -> Self {
        Self { request_limit: bytes, ..self }
    }

    /// The largest response body that is stored, in bytes. The default is 1 MiB. A larger one is sent, and not stored.
    pub fn response_limit(self, bytes: usize) -> Self {
        Self { response_limit: bytes, ..self }
    }

    /// The greatest number of [runs](crate::http#runs) at a time. The default is 32 for each connection that the pool
    /// may have: with the 5 seconds that the crate recommends, each run gets a connection in time if a transaction
    /// takes about 150 ms. Raise the limit for a leased layer whose handlers wait for other services, because they hold
    /// no connection. A request that gets no place in time is [`Overloaded`](Rejection::Overloaded).
    ///
    /// A replay counts as a run. A duplicate that waits for another request has a place only while it asks the
    /// database. A layer and its clones share their places, but a clone with another limit has places of its own.
    pub fn max_runs(self, runs: usize) -> Self {
        Self { max_runs: runs, ..self }
    }

    /// The greatest number of [runs](crate::http#runs) of one scope at a time, so that no account takes the places of
    /// the others. The requests without a key count as one scope. The default is seven eighths of the places. For a
    /// transactional layer it is seven eighths of the pool's connections if these are fewer, because each run has a
    /// connection. Of two places or more, at least one is left to other scopes. **Of a pool of one connection, none is
    /// left.**
    ///
    /// Of these places, the requests with one key that do not perform have at most half, and at most as many as the
    /// pool has connections, but at least one.
    pub fn max_runs_of_one_scope(self, runs: usize) -> Self {
        Self { max_runs_of_one_scope: Some(runs), ..self }
    }

    /// How long a handler may take, from its call to its response. The default is 5 minutes. After that the layer drops
    /// it at its next await, as a failure: [`TimedOut`](Rejection::TimedOut). Choose a longer time than the time-outs
    /// further out, which answer the client and leave the run alone.
    ///
    /// Dropping a handler stops neither its statement nor a task that it has spawned. PostgreSQL ends the statement by
    /// `statement_timeout`, and the transaction is open until then.
    ///
    /// The layer's own statements are bounded, too, because a connection can vanish without an error:
    ///
    /// - the claim, and the completion with its COMMIT or the ROLLBACK: each by this limit, but between 1 and 30
    ///   seconds. A claim may also wait for the pool's `acquire_timeout`.
    /// - under a lease, a claim: by the length of the lease, but between 2 and 30 seconds. If a response cannot be
    ///   stored, the layer retries the statement for the length of the lease.
    ///
    /// After that the answer is [`Unavailable`](Rejection::Unavailable), the key is free in this process, and the
    /// connection is closed. **After a COMMIT it is unknown whether the operation took effect.**
    ///
    /// # Panics
    ///
    /// If `limit` is under a millisecond or over ten years.
    #[track_caller]
    pub fn run_timeout(self, limit: Duration) -> Self {
        assert!(is_in(&RETENTION, limit), "a run time-out must be between a millisecond and ten years");
        Self { run_timeout: limit, ..self }
    }

    /// The runs of this layer and its clones. A graceful shutdown has to wait for them.
    #[must_use]
    pub fn runs(&self) -> Runs {
        self.places.runs()
    }
}

/// How a layer protects an operation from a second run.
#[derive(Clone, Copy, Debug)]
pub(super) enum LayerMode {
    Transactional(Idempotency),
    Leased(LeaseOptions),
}

impl LayerMode {
    pub(super) fn of_records(self) -> Mode {
        match self {
            Self::Transactional(_) => Mode::Transaction,
            Self::Leased(options) => options.mode(),
        }
    }

    fn check(self) -> Result<(), Error> {
        match self {
            Self::Transactional(options) => check_wait(options.on_duplicate, options.retention),
            Self::Leased(options) => options.check(),
        }
    }

    /// How long a request waits for another one with its key. Zero if the request does not wait.
    pub(super) fn wait(self) -> Duration {
        match self {
            Self::Transactional(Idempotency { on_duplicate: Some(OnDuplicate::Wait(limit)), .. }) => limit,
            Self::Transactional(_) => Duration::ZERO,
            Self::Leased(options) => options.wait(),
        }
    }
}

impl IdempotencyLayer {
    /// The operation of a request. `None` if it has no name.
    pub(super) fn operation_of(&self, parts: &Parts) -> Option<String> {
        self.operation.as_ref().map_or_else(|| matched_operation(parts), |named| named(parts))
    }

    /// How long a request waits for a place among the runs: as long as for a connection.
    pub(super) fn place_time(&self) -> Duration {
        self.pool.options().get_acquire_timeout().min(LONGEST_PLACE_TIME)
    }

    pub(super) fn bounds(&self) -> Bounds {
        let connections = connections(&self.pool);
        // A run without a connection would only wait for one.
        let at_once = match self.mode {
            LayerMode::Transactional(_) => self.max_runs.min(connections),
            LayerMode::Leased(_) => self.max_runs,
        };
        Bounds::of(self.max_runs, self.max_runs_of_one_scope, at_once, connections)
    }

    /// How many bytes the bodies that arrive or wait may have together: one largest body for each place. More requests
    /// than that would wait in vain. The half for one scope is at least one such body.
    pub(super) fn most_held(&self) -> usize {
        self.request_limit.saturating_mul(self.max_runs.max(2))
    }

    /// The longest wait for the database, before and after the handler. The limit is the `run_timeout`, but at least a
    /// second, because the server may be busy, and at most [`ANSWER_TIME`].
    pub(super) fn answer_time(&self) -> Duration {
        self.run_timeout.clamp(Duration::from_secs(1), ANSWER_TIME)
    }
}

fn connections(pool: &PgPool) -> usize {
    usize::try_from(pool.options().get_max_connections()).unwrap_or(usize::MAX)
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").field("mode", &self.mode).finish_non_exhaustive()
    }
}
