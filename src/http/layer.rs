//! The constructors and the settings of the layer, with their defaults.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Method, Response, StatusCode};
use sqlx::PgPool;

use super::body::HeldBytes;
use super::places::{Bounds, Runs};
use super::rejection::{Denied, Once, Rejection, Seldom, problem};
use super::replay::{NEVER_REPLAYED, to_record};
use super::request::{Compared, FingerprintChoice, NEVER_STORED, STORED, matched_operation};
use crate::fingerprint::Pointer;
use crate::key::MAX_PART_BYTES;
use crate::lease::{Finding, LeaseOptions};
use crate::limits::{LARGEST_RESPONSE, RETENTION, check_wait, is_in};
use crate::session::ANSWER_TIME;
use crate::{Error, Idempotency, Mode, OnDuplicate};

/// The default of the `request_limit` and of the `response_limit`, in bytes. Two copies of a body are in memory during
/// a run. If requests are stored, a third copy is in memory until the claim.
const BODY_LIMIT: usize = 1024 * 1024;
/// The default number of runs for each connection of the pool. A run should wait for its connection for at most 3
/// seconds. In this time, a connection serves about 30 transactions of 100 ms each. A run behind these
/// transactions would wait, keep its body in memory even if its client hangs up, and then fail.
const RUNS_PER_CONNECTION: usize = 32;
/// The default time for a handler. Common proxies and load balancers give up after a minute, so no client waits any
/// more after this time. Work that takes longer on purpose belongs in a queue.
const RUN_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// The largest size of the name of a service, in bytes. At least 190 bytes of an operation remain for its method and
/// its route.
const LONGEST_SERVICE: usize = 64;

/// The longest wait for a place. The pool's `acquire_timeout` may be unlimited, but the deadline for a place must be a
/// finite time. A wait for another request with the same key is at most an hour, so it is shorter than this time.
const LONGEST_PLACE_TIME: Duration = Duration::from_secs(24 * 3600);

const SERVICE_OR_OPERATION: &str = "the name of a service is only for the default operation; let the function \
                                    IdempotencyLayer::operation put the name into its texts";

type ScopeOf = dyn Fn(&Parts) -> Result<String, Denied> + Send + Sync;
type KeyOf = dyn Fn(&Parts, &Bytes) -> Result<Option<String>, Denied> + Send + Sync;
type OperationOf = dyn Fn(&Parts) -> Option<String> + Send + Sync;
type ResponseOf = dyn Fn(&Rejection) -> Response<Bytes> + Send + Sync;

/// Makes the requests that pass through this layer idempotent. The [module](super) describes the behaviour. A clone of
/// a layer is cheap.
#[derive(Clone)]
#[must_use = "a setter returns the layer with the setting"]
pub struct IdempotencyLayer {
    pub(super) pool: PgPool,
    pub(super) mode: LayerMode,
    // The key.
    pub(super) methods: Vec<Method>,
    pub(super) scope: Arc<ScopeOf>,
    /// Names the operation. `None` stands for the method and the route that axum has matched.
    pub(super) operation: Option<Arc<OperationOf>>,
    /// The name of the service, in front of the method and the route.
    pub(super) service: Option<Arc<str>>,
    pub(super) key_from: Option<Arc<KeyOf>>,
    pub(super) key_required: bool,
    pub(super) shortest_key: usize,
    pub(super) fingerprint: FingerprintChoice,
    // The response.
    pub(super) stored_errors: Vec<StatusCode>,
    /// The headers of a response that a replay repeats, beside those that describe the result.
    pub(super) replayed_headers: Vec<HeaderName>,
    /// The headers of a request that are stored with the request.
    pub(super) stored_request_headers: Vec<HeaderName>,
    pub(super) rejection: Arc<ResponseOf>,
    // The bounds.
    pub(super) held: HeldBytes,
    pub(super) request_limit: usize,
    pub(super) response_limit: usize,
    pub(super) lines: Arc<Seldom>,
    /// The warnings of keys that are indeterminate although no handler has begun.
    pub(super) lost_keys: Arc<Once>,
    pub(super) runs: Runs,
    pub(super) max_runs: usize,
    pub(super) max_runs_of_one_scope: Option<usize>,
    pub(super) run_timeout: Duration,
}

impl IdempotencyLayer {
    /// A layer for effects in this database. The key, the effects and the response commit in one transaction, before
    /// the first byte is sent. The handler must take this transaction as [`IdempotentTx`](super::IdempotentTx), even if
    /// it has no effects in this database. Writes by another connection are outside the transaction, and happen each
    /// time the handler runs.
    ///
    /// The `options` apply to each request as they apply to a call of [`Idempotency::run`]. Over HTTP, the default for
    /// a duplicate is [`Reject`](crate::OnDuplicate::Reject), because any client may send a duplicate. A request that
    /// [waits](crate::OnDuplicate::Wait) polls, and holds no connection between two polls. **Tell your clients the
    /// retention**, because a retry after the retention performs the operation again.
    ///
    /// `scope` returns the tenant, account or user of the request **from the authenticated identity**. An outer layer
    /// has put this identity into the request's extensions. Never use an unauthenticated part of the request as the
    /// scope. If `scope` returns an error, this error is the response. A scope follows the rules for a part of a
    /// [`Key`](crate::Key). Any other text is a mistake of the service, for which the layer answers 500.
    ///
    /// # Panics
    ///
    /// Panics if the options contradict each other, for example if the wait is not shorter than the retention.
    #[track_caller]
    pub fn transactional(
        pool: PgPool,
        options: Idempotency,
        scope: impl Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
    ) -> Self {
        Self::new(pool, LayerMode::Transactional(options), Arc::new(scope))
    }

    /// A layer for effects outside this database. The layer claims the key under a lease, and renews the lease while
    /// the handler runs. After the handler has returned, the layer stores the response. If the process dies between the
    /// claim and the response, the [policy](crate::lease) of the options decides what happens. `scope` is the same
    /// function as for a [transactional layer](Self::transactional).
    ///
    /// With [`store_request`](LeaseOptions::store_request), a [`RequestResumer`](super::RequestResumer) finishes the
    /// requests whose clients do not come back.
    ///
    /// # Panics
    ///
    /// Panics if the options contradict each other, in the same cases as for a [transactional
    /// layer](Self::transactional). Also panics if the retention is shorter than twice the lease.
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
        // The options are checked here, because axum applies the layer only at the first connection.
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
            service: None,
            key_from: None,
            key_required: true,
            shortest_key: 0,
            fingerprint: FingerprintChoice::default(),
            stored_errors: Vec::new(),
            replayed_headers: Vec::new(),
            stored_request_headers: STORED.to_vec(),
            rejection: Arc::new(problem),
            held: HeldBytes::default(),
            request_limit: BODY_LIMIT,
            response_limit: BODY_LIMIT,
            lines: Arc::default(),
            lost_keys: Arc::default(),
            runs: Runs::default(),
            max_runs: connections.saturating_mul(RUNS_PER_CONNECTION),
            max_runs_of_one_scope: None,
            run_timeout: RUN_TIMEOUT,
        }
    }
}

/// The settings for the methods, the key and the stored headers of a request.
impl IdempotencyLayer {
    /// Sets the methods that the layer covers. The layer passes on requests with other methods unchanged. The default
    /// is POST and PATCH. HTTP defines PUT, DELETE and the safe methods as idempotent (RFC 9110, section 9.2.2), so
    /// your handlers must make these methods idempotent.
    ///
    /// axum answers HEAD by the handler of GET. If you cover GET, also cover HEAD, or give HEAD a route of its own.
    /// Otherwise the handler finds no transaction or lease for a HEAD request, and the answer is a 500. A GET and a
    /// HEAD with one key are two operations.
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        Self { methods: methods.into_iter().collect(), ..self }
    }

    /// Sets whether the layer accepts requests without a key, and runs the handler for each of them. The default is
    /// `false`. A transactional layer also gives these requests a transaction. Before the handler runs, the layer reads
    /// the body of each request to the end, up to the [`request_limit`](Self::request_limit). So set the
    /// `request_limit` to the limit of the route, and leave routes that stream a body outside the layer.
    pub fn optional_key(self, optional: bool) -> Self {
        Self { key_required: !optional, ..self }
    }

    /// Sets the smallest number of characters in the value of a key. The default is no minimum. The answer to a key
    /// below the minimum is a 400 `malformed-key`, and nothing is done. A client that numbers its requests may repeat a
    /// short key by mistake, and get the answer to another request, or a 422. A minimum of 8 refuses most numbers, and
    /// no UUID.
    ///
    /// The minimum applies to the header and to [`key_from`](Self::key_from). **A key below the minimum is refused even
    /// if the request is a retry of an earlier request.** A client that gets this refusal might send a new key, and so
    /// repeat the operation. So set the minimum before clients send keys. A stored request is resumed and settled even
    /// if its key is below the minimum.
    ///
    /// # Panics
    ///
    /// Panics if the minimum is over 255, because no [`Key`](crate::Key) has such a value.
    #[track_caller]
    pub fn shortest_key(self, characters: usize) -> Self {
        assert!(characters <= MAX_PART_BYTES, "the smallest number of characters of a key must be at most 255");
        Self { shortest_key: characters, ..self }
    }

    /// Takes the value of the key from another header or from a field of the body, instead of from `Idempotency-Key`.
    /// `Ok(None)` means that the key is missing. If the function returns an error, this error is the response. The
    /// layer does not add a key from this function to any response.
    ///
    /// **Do not use a header that a proxy writes, such as `X-Request-Id`.** A proxy gives each retry of the client
    /// another value, so each retry would be performed again. Refuse a header with several lines, because
    /// `HeaderMap::get` returns the first of them.
    pub fn key_from(
        self,
        value: impl Fn(&Parts, &Bytes) -> Result<Option<String>, Denied> + Send + Sync + 'static,
    ) -> Self {
        Self { key_from: Some(Arc::new(value)), ..self }
    }

    /// Names the operation by a function of the request. By default, the operation consists of the method and the route
    /// that axum has matched, without the names of its parameters. An example is `POST /payments/{}`. In a route with a
    /// wildcard, `{*}` stands for the rest of the path. Return a similar template, because with real ids, every payment
    /// would be an operation of its own, with its own time series in the metrics. If you use the path, decode its
    /// percent-encoding. Otherwise `/a` and `/%61` would be two operations.
    ///
    /// If the function returns `None`, the answer is a 500 `misconfigured`. If the function returns a text
    /// that a [`Key`](crate::Key) refuses, the answer is a 400 `malformed-key`.
    ///
    /// **The operation is a part of the key. If the operation changes, a retry of an earlier request is performed
    /// again.** A new name of a parameter does not change the operation. The operation changes if the route gets
    /// another prefix, another method, or a `{*rest}` instead of a parameter. The operation also changes when a route
    /// is split or merged. If a change of the service would change the operation, let this function return the old text
    /// until the retention has passed. Also keep the [`RequestResumer`](super::RequestResumer) of the old operation.
    ///
    /// **The database is the name space of operations.** If services share a database, put the name of the service into
    /// each text.
    ///
    /// # Panics
    ///
    /// Panics if the layer has a [`service`](Self::service), whose name is only for the default operation.
    #[track_caller]
    pub fn operation(self, operation: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        assert!(self.service.is_none(), "{SERVICE_OR_OPERATION}");
        Self { operation: Some(Arc::new(operation)), ..self }
    }

    /// Names the service, and puts this name before the default [operation](Self::operation):
    /// `layer.service("billing")` gives `billing POST /events` instead of `POST /events`. Name each service whose
    /// database has other services.
    ///
    /// **The database is the name space of operations.** Without a name, the routes `POST /events` of two services are
    /// one operation. If a client sends one key to both services, the second service replays the answer of the first
    /// service, and does nothing. A [`RequestResumer`](super::RequestResumer) or a
    /// [`Reconciler`](crate::lease::Reconciler) of one service also finds the requests of the other service.
    ///
    /// The name is a part of the operation in every record, log and metric. The functions of
    /// [`operator`](crate::operator) and a `Reconciler` take the operation with the name, which
    /// [`recorded_operation`](Self::recorded_operation) returns. A `RequestResumer` takes the operation without the
    /// name. The operation may have 255 bytes, including the name. A longer operation is refused as `malformed-key`.
    ///
    /// **Set the name before the service claims its first key.** A name changes the key of each operation, its lock and
    /// its downstream key. If a running service got a name, it would perform the retry of each earlier request again.
    /// Such a service names its old operations with [`operation`](Self::operation) instead, until the retention of
    /// their last key has passed. It also keeps a `RequestResumer` for them.
    ///
    /// # Panics
    ///
    /// Panics if the name is empty, is longer than 64 bytes, or has a character other than visible ASCII, such as white
    /// space. Also panics if the layer has a function [`operation`](Self::operation).
    #[track_caller]
    pub fn service(self, name: &str) -> Self {
        let is_word = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic());
        assert!(is_word, "the name of a service must be a word of visible ASCII, without white space: {name:?}");
        assert!(name.len() <= LONGEST_SERVICE, "the name of a service must have at most {LONGEST_SERVICE} bytes");
        assert!(self.operation.is_none(), "{SERVICE_OR_OPERATION}");
        Self { service: Some(name.into()), ..self }
    }

    /// Returns an operation of this layer as its records have it: with the name of the [`service`](Self::service), if
    /// the layer has one. Pass this text to a [`Reconciler`](crate::lease::Reconciler), to
    /// [`unsettled`](crate::operator::unsettled), or to a [`Key`](crate::Key) for an operator.
    #[must_use]
    pub fn recorded_operation(&self, operation: &str) -> String {
        self.service.as_ref().map_or_else(|| operation.to_owned(), |name| [name, " ", operation].concat())
    }

    /// Also stores this header with a [stored request](crate::lease::LeaseOptions::store_request), in plain text. A
    /// resumed request has only its stored headers. So name each header that the handler or
    /// [`key_from`](Self::key_from) needs. `Content-Type`, `Content-Encoding`, `Idempotency-Key` and the headers of the
    /// fingerprint are always stored.
    ///
    /// # Panics
    ///
    /// Panics for `Authorization`, `Cookie` and `Proxy-Authorization`. These three headers are not stored, even if they
    /// are headers of the fingerprint.
    #[track_caller]
    pub fn store_header(mut self, name: HeaderName) -> Self {
        assert!(
            !NEVER_STORED.contains(&name),
            "the header {name} must not be stored: it proves who the client is, now"
        );
        self.stored_request_headers.push(name);
        self
    }
}

/// The settings of the fingerprint.
///
/// **A change of these settings never causes a wrong replay.** But until the key expires, a retry of an earlier request
/// gets a 500 `misconfigured`. So deploy such a change when you expect few retries, or under another
/// [operation](Self::operation).
impl IdempotencyLayer {
    /// Compares bodies as canonical JSON instead of byte by byte, for clients that build the request anew for each
    /// retry. A body that is not JSON is refused with a 400. A body without a [canonical
    /// form](crate::Fingerprint::of_json) is compared byte by byte, including its ignored parts.
    ///
    /// `ignored` are JSON pointers (RFC 6901) to parts of the body that are not compared. Use `ignored` if clients put
    /// a timestamp or the number of the attempt into each body:
    /// `layer.canonical_json(["/sent_at", "/client/attempt"])`. A body without these parts is also accepted. **Ignore
    /// only parts on which the handler does not act.** Two requests that differ only in ignored parts are the same, so
    /// the second request gets the response of the first.
    ///
    /// # Panics
    ///
    /// Panics if a text is not a JSON pointer, or is the empty pointer, which points to the whole body.
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

    /// Adds this header, with all its lines, to the fingerprint. Add a header by which the handler selects an account,
    /// a currency or a language. Do not add a header that a client or a proxy changes with each attempt, such as a
    /// trace or a date. Some proxies also change `Host`. If the header is `Host`, the authority of the URI is also in
    /// the fingerprint, because HTTP/2 sends the host there. An authority that equals the header is not added.
    pub fn fingerprint_header(mut self, name: HeaderName) -> Self {
        self.fingerprint.add_header(name);
        self
    }
}

/// The settings that decide which responses are stored, and how rejections look.
impl IdempotencyLayer {
    /// Also stores responses with these statuses, from 400 to 499, such as "card declined". By default, these responses
    /// free the key. A transactional layer undoes the handler's writes by a savepoint, which costs every request one
    /// more round trip.
    ///
    /// # Panics
    ///
    /// Panics if a status is not from 400 to 499. A success is always stored, and after a 5xx, a retry must be able to
    /// run the handler again.
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

    /// Also replays this header. The layer always replays the headers that describe the result:
    ///
    /// - its body: `Content-Digest`, `Content-Disposition`, `Content-Encoding`, `Content-Language`, `Content-Range`,
    ///   `Content-Type`, `ETag`, `Last-Modified`, `Repr-Digest`
    /// - how to treat it: `Allow`, `Cache-Control`, `Content-Security-Policy`, `Expires`, `Referrer-Policy`, `Vary`,
    ///   `X-Content-Type-Options`, `X-Frame-Options`
    /// - where it is: `Content-Location`, `Link`, `Location`, `Operation-Location`, and the `Retry-After` of a 202
    /// - the headers of htmx, such as `HX-Redirect`
    ///
    /// By default, the layer does not replay headers that answer a header of the request, or that are about the
    /// connection or the moment. An example is `Access-Control-Allow-Origin`, which answers the `Origin` of one
    /// request. A retry may have another `Origin`, and without this header a browser does not show the response to its
    /// page. So put a CORS layer outside this layer, instead of a header in the handler.
    ///
    /// # Panics
    ///
    /// Panics for `Set-Cookie`, headers of authentication, hop-by-hop headers, `Date`, `Content-Length`, and the
    /// headers that the layer adds itself.
    #[track_caller]
    pub fn replay_header(mut self, name: HeaderName) -> Self {
        assert!(
            !NEVER_REPLAYED.contains(&name),
            "the header {name} must not be replayed: it belongs to one connection, one session or one moment"
        );
        self.replayed_headers.push(name);
        self
    }

    /// Sets the function that makes a response from a rejection. The default is [`problem`](super::problem). The
    /// function may change the response of `problem`. For example, it may add a `Link` to your documentation of the
    /// key, as the draft demands.
    pub fn on_rejection(self, rejection: impl Fn(&Rejection) -> Response<Bytes> + Send + Sync + 'static) -> Self {
        Self { rejection: Arc::new(rejection), ..self }
    }
}

/// The finding for a request whose outcome is unknown.
impl IdempotencyLayer {
    /// Returns the finding that an operation of this layer took effect, for a [`Reconciler`](crate::lease::Reconciler).
    /// The `response` is the response that the handler would have sent. As with a response of the handler, the record
    /// stores the status, the replayed headers and the body of `response`. For a step, return [`Finding::took_effect`]
    /// with the result of the step instead.
    ///
    /// # Errors
    ///
    /// [`Error::Unencodable`] if the status is informational, or if the body is over the
    /// [`response_limit`](Self::response_limit). The layer does not store such a response, so no retry would get it.
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
    /// Sets the size of the largest request body, in bytes. The default is 1 MiB. This limit also decides how many
    /// [bytes](crate::http#runs) all requests that upload or wait may hold together.
    pub fn request_limit(self, bytes: usize) -> Self {
        Self { request_limit: bytes, ..self }
    }

    /// Sets the size of the largest response body that is stored, in bytes. The default is 1 MiB. A larger response is
    /// sent, and not stored. Under a lease, each try to store a response has a third of the lease, but at least a
    /// second and at most a minute. So a response of many megabytes needs a lease of minutes.
    ///
    /// # Panics
    ///
    /// Panics if the size is over 256 MiB. PostgreSQL refuses a body of a gigabyte, and `pg_dump` fails at half of that
    /// size.
    #[track_caller]
    pub fn response_limit(self, bytes: usize) -> Self {
        assert!(bytes <= LARGEST_RESPONSE, "a response limit must be at most 256 MiB");
        Self { response_limit: bytes, ..self }
    }

    /// Sets the greatest number of [runs](crate::http#runs) at a time. The default is 32 for each connection that the
    /// pool may have. With the recommended `acquire_timeout` of 3 seconds, each run then gets a connection in time if a
    /// transaction takes at most 90 ms. Raise the limit for a leased layer whose handlers wait for other services,
    /// because such handlers hold no connection. A request that gets no place in time is rejected as
    /// [`Overloaded`](Rejection::Overloaded), or as [`TooManyRequests`](Rejection::TooManyRequests).
    ///
    /// A replay counts as a run. A duplicate that waits for another request has a place only during a poll of the
    /// database. A layer and its clones share their places. A clone with another limit has its own places for scopes
    /// and for all requests.
    ///
    /// # Panics
    ///
    /// Panics if the number is zero.
    #[track_caller]
    pub fn max_runs(self, runs: usize) -> Self {
        assert!(runs > 0, "a layer without places would reject each request; give it one run or more");
        Self { max_runs: runs, ..self }
    }

    /// Sets the greatest number of [runs](crate::http#runs) of one scope at a time, so that no account takes the runs
    /// of other accounts. All requests without a key count as one scope. The default is seven eighths of
    /// [`max_runs`](Self::max_runs). In a transactional layer, each run needs a connection. If a transactional layer
    /// has fewer connections than `max_runs`, the default is seven eighths of the connections. If there are two or more
    /// of these runs or connections, at least one is left to other scopes. **If a transactional layer has one
    /// connection, no connection is left to other scopes.**
    ///
    /// Until its handler runs, a request of a client also needs a place among the requests with its key. A replay needs
    /// this place until the replay ends. A key has seven eighths of the places of its scope, but not more places than
    /// the pool has connections, and at least one place.
    ///
    /// # Panics
    ///
    /// Panics if the number is zero.
    #[track_caller]
    pub fn max_runs_of_one_scope(self, runs: usize) -> Self {
        assert!(runs > 0, "a scope without places would get no answer; give it one run or more");
        Self { max_runs_of_one_scope: Some(runs), ..self }
    }

    /// Sets how long a handler may take, from its call to its response. The default is 5 minutes. After this time, the
    /// layer drops the handler at its next await, and the answer is [`TimedOut`](Rejection::TimedOut). Choose a longer
    /// time than the time-outs of outer layers, which answer the client and do not end the run.
    ///
    /// If the layer drops a handler, neither the handler's statement nor a task that the handler has spawned stops.
    /// PostgreSQL ends the statement by `statement_timeout`, and the transaction is open until then.
    ///
    /// The layer's own statements also have limits, because a connection can vanish without an error:
    ///
    /// - In a transactional layer, a claim, a completion with its COMMIT, and a ROLLBACK may each take as long as
    ///   `limit`, but at least 1 and at most 30 seconds.
    /// - Under a lease, a claim has the length of the lease as its limit, but at least 2 and at most 30 seconds. If the
    ///   statement that stores the response fails, the layer retries this statement for the length of the lease, but at
    ///   least for 3 seconds.
    /// - In both layers, a claim may also wait for a connection, for the pool's `acquire_timeout`.
    ///
    /// If such a limit is exceeded, the answer is [`Unavailable`](Rejection::Unavailable), the request no longer holds
    /// the key in this process, and the connection is closed. **If the COMMIT was already sent, the outcome of the
    /// operation is unknown.**
    ///
    /// # Panics
    ///
    /// Panics if `limit` is under a millisecond or over ten years.
    #[track_caller]
    pub fn run_timeout(self, limit: Duration) -> Self {
        assert!(is_in(&RETENTION, limit), "a run time-out must be between a millisecond and ten years");
        Self { run_timeout: limit, ..self }
    }

    /// Returns the runs of this layer and its clones. A graceful shutdown has to wait for these runs.
    #[must_use]
    pub fn runs(&self) -> Runs {
        self.runs.clone()
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

    /// Returns how long a request waits for another request with its key. A time of zero means no wait.
    fn wait(self) -> Duration {
        match self {
            Self::Transactional(Idempotency { on_duplicate: Some(OnDuplicate::Wait(limit)), .. }) => limit,
            // Over HTTP, the default is `Reject`.
            Self::Transactional(_) => Duration::ZERO,
            Self::Leased(options) => options.wait(),
        }
    }
}

impl IdempotencyLayer {
    /// Returns the operation of a request, or `None` if neither the service nor a route names the operation.
    pub(super) fn operation_of(&self, parts: &Parts) -> Option<String> {
        match &self.operation {
            Some(named) => named(parts),
            None => matched_operation(parts).map(|matched| self.recorded_operation(&matched)),
        }
    }

    pub(super) fn bounds(&self) -> Bounds {
        let connections = connections(&self.pool);
        // A run of a transactional layer needs a connection, so the share of a scope is computed from the connections.
        let at_once = match self.mode {
            LayerMode::Transactional(_) => self.max_runs.min(connections),
            LayerMode::Leased(_) => self.max_runs,
        };
        let of_one_scope = self.max_runs_of_one_scope.unwrap_or_else(|| seven_eighths(at_once));
        Bounds {
            all: self.max_runs,
            of_one_scope,
            of_one_key: seven_eighths(of_one_scope).min(connections.max(1)),
            wait: self.mode.wait(),
            // The pool waits for a connection for the same time.
            place_time: self.pool.options().get_acquire_timeout().min(LONGEST_PLACE_TIME),
        }
    }

    /// Returns how many bytes the bodies that arrive or wait may hold together: the `request_limit` times `max_runs`.
    /// Room for more requests would not help, because these requests would wait for a place in vain. `max_runs` counts
    /// as two at least, because one scope may hold only half of the bytes, and needs room for one largest body.
    pub(super) fn most_held(&self) -> usize {
        self.request_limit.saturating_mul(self.max_runs.max(2))
    }

    /// Returns the longest wait for the database, before and after the handler. This time is the `run_timeout`, but at
    /// most [`ANSWER_TIME`]. The time is at least a second, because the server may be busy.
    pub(super) fn answer_time(&self) -> Duration {
        self.run_timeout.clamp(Duration::from_secs(1), ANSWER_TIME)
    }
}

/// If there are two places or more, at least one place is left to others. The result is at least one.
fn seven_eighths(places: usize) -> usize {
    (places - places.div_ceil(8)).max(1)
}

fn connections(pool: &PgPool) -> usize {
    usize::try_from(pool.options().get_max_connections()).unwrap_or(usize::MAX)
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").field("mode", &self.mode).finish_non_exhaustive()
    }
}
