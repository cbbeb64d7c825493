//! The layer, and what it can be told.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode, Uri};
use sqlx::PgPool;
use tower_layer::Layer;

use super::choice::{Choice, Compared};
use super::denied::Denied;
use super::in_flight::InFlightHere;
use super::problem::problem;
use super::rejection::Rejection;
use super::replay::{REPLAYED, may_be_replayed};
use super::runs::Runs;
use super::seal::Seal;
use super::service::IdempotencyService;
use super::settings::{InvalidSetting, Mode, OperationFrom, ScopeOf, Settings, ValueFrom};
use crate::fingerprint::pointer::Pointer;
use crate::lease::{Leasing, Policy};
use crate::limits::{RETENTION, WAIT, within};
use crate::{DEFAULT_RETENTION, Deployment, Fingerprint, InFlight, InvalidBody, InvalidDuration, MAX_PART_BYTES};

/// The default limit of a body. Two copies of it are in memory while a request runs.
const BODY_LIMIT: usize = 1024 * 1024;
/// The longest common method, OPTIONS, and a space.
const LONGEST_METHOD: usize = 8;
/// How many runs there may be for each connection of the pool. A connection serves about 30 transactions of a second each in
/// the 30 seconds for which sqlx waits for a connection by default: a run further back in the queue would keep its body in
/// memory, wait, and fail all the same.
const RUNS_PER_CONNECTION: usize = 32;
/// How long a handler may take. Common proxies and load balancers give up after a minute, so nobody has waited for the answer
/// for a while; what takes longer on purpose is work for a queue.
const RUN_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// Makes the requests that pass through it idempotent. The [module's documentation](super) describes what it does.
///
/// Cheap to clone; add it by axum's `Router::route_layer`, by tower's `ServiceBuilder`, or by [`Layer::layer`].
#[derive(Clone)]
pub struct IdempotencyLayer {
    settings: Settings,
}

impl IdempotencyLayer {
    /// For handlers whose effects are in this database: key, effects and response commit in one transaction, which the
    /// handler takes by [`IdempotentTx`](super::IdempotentTx). What it writes elsewhere, by a pool of its own, is not a part
    /// of it, and happens as often as the handler runs. So a handler that succeeds under a key and has not taken the
    /// transaction is a [mistake](super::Misconfigured::TransactionNotTaken), a 500 and not stored, unless you [say
    /// otherwise](Self::with_optional_transaction).
    ///
    /// `scope` says whose the request is: tenant, account or user, **from the authenticated identity**, which a layer
    /// further out has put into the request's extensions; never from what the client merely says. An error of it is the
    /// response.
    #[must_use]
    pub fn transactional<F>(pool: PgPool, scope: F) -> Self
    where
        F: Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
    {
        Self::new(pool, Mode::Transactional, Arc::new(scope))
    }

    /// For handlers that call the outside: the key is claimed under a lease that renews itself while the handler runs, and
    /// the response is stored afterwards. What becomes of a handler that dies in between is for the
    /// [`policy`](crate::lease) to say. The handler may take an [`IdempotentLease`](super::IdempotentLease).
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] for a lease under 10 ms or over 12 hours.
    pub fn leased<F>(pool: PgPool, scope: F, policy: Policy) -> Result<Self, InvalidDuration>
    where
        F: Fn(&Parts) -> Result<String, Denied> + Send + Sync + 'static,
    {
        Ok(Self::new(pool, Mode::Leased(Leasing::new(policy)?), Arc::new(scope)))
    }

    fn new(pool: PgPool, mode: Mode, scope: Arc<ScopeOf>) -> Self {
        let connections = usize::try_from(pool.options().get_max_connections()).unwrap_or(usize::MAX);
        let settings = Settings {
            pool,
            mode,
            scope,
            value: ValueFrom::Header { strict: false },
            shortest_key: 1,
            operation: OperationFrom::MatchedRoute,
            methods: vec![Method::POST, Method::PATCH],
            key_required: true,
            retention: DEFAULT_RETENTION,
            in_flight: InFlight::Reject,
            in_flight_here: InFlightHere::default(),
            transaction_required: true,
            deployment: Deployment::new(),
            select_first: false,
            fewest_round_trips: false,
            choice: Choice::default(),
            request_limit: BODY_LIMIT,
            response_limit: BODY_LIMIT,
            stored_errors: Vec::new(),
            replayed_headers: REPLAYED.to_vec(),
            no_store: false,
            seal: None,
            rejection: Arc::new(problem),
            documentation: None,
            explicit_begin: false,
            runs: Runs::default(),
            max_runs: connections.saturating_mul(RUNS_PER_CONNECTION),
            run_timeout: RUN_TIMEOUT,
        };
        Self { settings }
    }

    fn with(mut self, set: impl FnOnce(&mut Settings)) -> Self {
        set(&mut self.settings);
        self
    }

    /// Which methods are made idempotent, these and no others; the rest passes untouched. The default is POST and PATCH: HTTP
    /// defines the rest as
    /// idempotent (RFC 9110, section 9.2.2), which is for your handlers to keep.
    #[must_use]
    pub fn with_methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|settings| settings.methods = methods.into_iter().collect())
    }

    /// Lets requests without a key through, unprotected: performed as often as they come. In transactional mode they get a
    /// transaction all the same, so that the handler is one and the same.
    #[must_use]
    pub fn with_optional_key(self) -> Self {
        self.with(|settings| settings.key_required = false)
    }

    /// In transactional mode, lets handlers succeed without taking their [`IdempotentTx`](super::IdempotentTx): for routes
    /// without effects in this database, whose answers are to be replayed all the same. **A handler with effects that forgets
    /// it is not noticed then**: it is replayed, and not atomic.
    #[must_use]
    pub fn with_optional_transaction(self) -> Self {
        self.with(|settings| settings.transaction_required = false)
    }

    /// Takes the header as a quoted string (RFC 9651) only, as the draft has it. Most clients send bare words.
    #[must_use]
    pub fn with_strict_header(self) -> Self {
        self.with(|settings| settings.value = ValueFrom::Header { strict: true })
    }

    /// Takes the key's value from elsewhere than `Idempotency-Key`: another header, a field of the body. `Ok(None)` is a
    /// missing key; an error is the response.
    #[must_use]
    pub fn with_key_from<F>(self, value: F) -> Self
    where
        F: Fn(&Parts, &Bytes) -> Result<Option<String>, Denied> + Send + Sync + 'static,
    {
        self.with(|settings| settings.value = ValueFrom::Function(Arc::new(value)))
    }

    /// Refuses keys under this many bytes. Counters and dates are made up alike by two devices of one user; the 36 bytes
    /// of a UUID are not.
    #[must_use]
    pub fn with_shortest_key(self, bytes: usize) -> Self {
        self.with(|settings| settings.shortest_key = bytes)
    }

    /// Names the operation by its method and this route, where no router of axum's says which one was matched:
    /// `/payments/{id}`. A template: with the ids in it, every payment would be an operation, and a series of metrics.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::RouteTooLong`], when the service starts and not at a request.
    pub fn with_route(self, route: impl Into<String>) -> Result<Self, InvalidSetting> {
        let (route, most) = (route.into(), MAX_PART_BYTES - LONGEST_METHOD);
        if route.len() > most {
            return Err(InvalidSetting::RouteTooLong { bytes: route.len(), most });
        }
        Ok(self.with(|settings| settings.operation = OperationFrom::Route(route)))
    }

    /// Names the operation by a function of the request. `None` is a mistake of the service's, a 500.
    #[must_use]
    pub fn with_operation<F>(self, operation: F) -> Self
    where
        F: Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    {
        self.with(|settings| settings.operation = OperationFrom::Function(Arc::new(operation)))
    }

    /// How long a key is remembered. The default is 24 hours. **Tell your clients**: a repeat that comes later is performed.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::Duration`] under a millisecond, or under twice the lease, or over ten years.
    pub fn with_retention(mut self, retention: Duration) -> Result<Self, InvalidSetting> {
        match &mut self.settings.mode {
            Mode::Transactional => drop(within("retention", retention, RETENTION)?),
            Mode::Leased(leasing) => *leasing = leasing.with_retention(retention)?,
        }
        Ok(self.with(|settings| settings.retention = retention))
    }

    /// What to do about a request whose first is not finished: refuse it at once with a 409 and `Retry-After` (the default),
    /// or wait for the first one's response. It polls, and holds no connection of the pool between two polls.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::Duration`] for a wait under a millisecond or over an hour.
    pub fn with_in_flight(self, in_flight: InFlight) -> Result<Self, InvalidSetting> {
        if let InFlight::Wait(limit) = in_flight {
            within("wait", limit, WAIT)?;
        }
        Ok(self.with(|settings| settings.in_flight = in_flight))
    }

    /// After how many attempts under a lease the next one is refused.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::LeasedOnly`].
    pub fn with_max_attempts(mut self, max_attempts: NonZeroU32) -> Result<Self, InvalidSetting> {
        match &mut self.settings.mode {
            Mode::Transactional => return Err(InvalidSetting::LeasedOnly),
            Mode::Leased(leasing) => *leasing = leasing.with_max_attempts(max_attempts),
        }
        Ok(self)
    }

    /// How the database is reached: behind a pooler, for one.
    #[must_use]
    pub fn with_deployment(mut self, deployment: Deployment) -> Self {
        if let Mode::Leased(leasing) = &mut self.settings.mode {
            *leasing = leasing.with_deployment(deployment);
        }
        self.with(|settings| settings.deployment = deployment)
    }

    /// As [`Idempotency::with_select_first`](crate::Idempotency::with_select_first), in transactional mode. The look has a
    /// connection of its own from the pool, which sqlx pings first by default: a first call then takes two round trips more.
    #[must_use]
    pub fn with_select_first(self, select_first: bool) -> Self {
        self.with(|settings| settings.select_first = select_first)
    }

    /// As [`Idempotency::with_fewest_round_trips`](crate::Idempotency::with_fewest_round_trips), in transactional mode, for the
    /// COMMIT alone: one round trip fewer. The claim stays apart from the BEGIN, because the handler owns the transaction: sqlx
    /// gives a connection to nobody whose BEGIN has failed.
    #[must_use]
    pub fn with_fewest_round_trips(self, fewest_round_trips: bool) -> Self {
        self.with(|settings| settings.fewest_round_trips = fewest_round_trips)
    }

    /// Compares bodies as canonical JSON instead of byte by byte, and leaves `Content-Type` out: for clients that build the
    /// request anew for each retry. A
    /// body that is not JSON is refused with a 400. Numbers with more digits than an `f64` keeps make it compare that body
    /// byte by byte.
    ///
    /// Of this, [`with_json_without`](Self::with_json_without) and [`with_fingerprint`](Self::with_fingerprint), the last one
    /// counts.
    #[must_use]
    pub fn with_canonical_json(self) -> Self {
        self.with(|settings| settings.choice.compared = Compared::CanonicalJson)
    }

    /// As [`with_canonical_json`](Self::with_canonical_json), as if what these JSON pointers (RFC 6901) point at were not
    /// there: for clients that put a timestamp, or a number of the attempt, into each attempt's body.
    ///
    /// ```
    /// # use pg_idempotency::http::{IdempotencyLayer, InvalidSetting};
    /// # fn f(layer: IdempotencyLayer) -> Result<IdempotencyLayer, InvalidSetting> {
    /// layer.with_json_without(["/sent_at", "/client/attempt"])
    /// # }
    /// ```
    ///
    /// A pointer that points at nothing leaves out nothing. **Leave out what the handler does not act upon**: two requests
    /// that differ in nothing else are one, and the second gets the first one's response.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::NotAPointer`], also for the empty pointer, which is the whole body.
    pub fn with_json_without<P: Into<String>>(
        self,
        pointers: impl IntoIterator<Item = P>,
    ) -> Result<Self, InvalidSetting> {
        let parse = |text: String| Pointer::parse(&text).ok_or(InvalidSetting::NotAPointer(text));
        let pointers = pointers.into_iter().map(|text| parse(text.into())).collect::<Result<_, _>>()?;
        Ok(self.with(|settings| settings.choice.compared = Compared::JsonWithout(pointers)))
    }

    /// Chooses what makes two requests the same, as a whole: two requests are the same where the function gives the same
    /// [`Fingerprint`]. What it does not take does not count, neither method nor path; only the key's scope and operation
    /// count always, and [further headers](Self::with_fingerprinted_header). An error is a 400.
    ///
    /// `name` stands for the function in the fingerprint. **Give it another name with each change**: the layer cannot see what
    /// a function does, and fingerprints of two functions of the same name are compared.
    ///
    /// ```
    /// # use pg_idempotency::Fingerprint;
    /// # use pg_idempotency::http::IdempotencyLayer;
    /// # fn f(layer: IdempotencyLayer) -> IdempotencyLayer {
    /// // The upload's bytes and the account alone: each attempt signs the query anew.
    /// layer.with_fingerprint("account and bytes", |parts, body| {
    ///     let account = parts.headers.get("x-account").map(|account| account.as_bytes());
    ///     Fingerprint::of_json(&(account, Fingerprint::of_bytes(body).as_bytes()))
    /// })
    /// # }
    /// ```
    #[must_use]
    pub fn with_fingerprint<F>(self, name: impl Into<String>, function: F) -> Self
    where
        F: Fn(&Parts, &Bytes) -> Result<Fingerprint, InvalidBody> + Send + Sync + 'static,
    {
        let chosen = Compared::Function { name: name.into(), function: Arc::new(function) };
        self.with(|settings| settings.choice.compared = chosen)
    }

    /// Has this header count too, with all its lines: the same key with another value is
    /// [`KeyReused`](Rejection::KeyReused). For handlers that pick an account, a currency, a language by a header. Not for what
    /// a client sends anew with each attempt, as a trace or a date.
    #[must_use]
    pub fn with_fingerprinted_header(self, name: HeaderName) -> Self {
        self.with(|settings| settings.choice.add_header(name))
    }

    /// The largest request body. The default is 1 MiB. A larger one is a 413, and nothing is claimed.
    #[must_use]
    pub fn with_request_limit(self, bytes: usize) -> Self {
        self.with(|settings| settings.request_limit = bytes)
    }

    /// The largest response body that is stored. The default is 1 MiB. A larger one is sent and not stored: a repeat gets
    /// [`NotReplayable`](Rejection::NotReplayable).
    #[must_use]
    pub fn with_response_limit(self, bytes: usize) -> Self {
        self.with(|settings| settings.response_limit = bytes)
    }

    /// Stores responses of these statuses too, from 400 to 499, which otherwise free the key: "card declined", that every
    /// repeat should hear. In transactional mode, what the handler wrote is undone all the same, by a savepoint, at one
    /// round trip more for every request.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::StatusNotStorable`].
    pub fn with_stored_errors(self, statuses: impl IntoIterator<Item = StatusCode>) -> Result<Self, InvalidSetting> {
        let statuses: Vec<_> = statuses.into_iter().collect();
        match statuses.iter().find(|status| !status.is_client_error()) {
            Some(status) => Err(InvalidSetting::StatusNotStorable(*status)),
            None => Ok(self.with(|settings| settings.stored_errors = statuses)),
        }
    }

    /// Replays this header too.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::HeaderNotReplayable`] for `Set-Cookie`, authentication, hop-by-hop headers, `Date`,
    /// `Content-Length`.
    pub fn with_replayed_header(self, name: HeaderName) -> Result<Self, InvalidSetting> {
        if !may_be_replayed(&name) {
            return Err(InvalidSetting::HeaderNotReplayable(name));
        }
        Ok(self.with(|settings| settings.replayed_headers.push(name)))
    }

    /// Stores no response at all, for operations that answer with secrets: a repeat gets
    /// [`NotReplayable`](Rejection::NotReplayable). For single responses, see [`NoStore`](super::NoStore).
    #[must_use]
    pub fn with_no_store(self) -> Self {
        self.with(|settings| settings.no_store = true)
    }

    /// Seals bodies on their way into the table and opens them on their way out. Headers are stored as they are.
    #[must_use]
    pub fn with_seal(self, seal: impl Seal) -> Self {
        self.with(|settings| settings.seal = Some(Arc::new(seal)))
    }

    /// How a rejection becomes a response. The default is [`problem`]. [`processing`](super::processing) is ready, and so is
    /// what you write.
    #[must_use]
    pub fn with_rejection<F>(self, rejection: F) -> Self
    where
        F: Fn(&Rejection) -> Response<Bytes> + Send + Sync + 'static,
    {
        self.with(|settings| settings.rejection = Arc::new(rejection))
    }

    /// Where the API's documentation of idempotency is, for a `Link` with `rel="describedby"` in every rejection, as the draft
    /// asks for: what the key is, and how long it is remembered.
    #[must_use]
    pub fn with_documentation(self, uri: &Uri) -> Self {
        // A `Uri` is visible ASCII without angle brackets, so this does not fail.
        let link = HeaderValue::from_str(&format!("<{uri}>; rel=\"describedby\""));
        self.with(|settings| settings.documentation = link.ok())
    }

    /// Under a lease at most once: the handler says when its effect begins, by
    /// [`IdempotentLease::begin`](super::IdempotentLease::begin). What fails before frees the key, a request that an extractor
    /// refuses for one; without this it leaves the key indeterminate. **A handler that forgets to say it can repeat its effect.**
    #[must_use]
    pub fn with_explicit_begin(self) -> Self {
        self.with(|settings| settings.explicit_begin = true)
    }

    /// How many runs there may be at a time. A request beyond it is refused with a 503 and `Retry-After`
    /// ([`Rejection::Overloaded`]) before anything is spawned or claimed. The default is 32 for each connection that the pool
    /// may have: 320 for sqlx's default of 10.
    ///
    /// A run outlives its client, so limits of connections and `ConcurrencyLimit` further out do not bound it: clients that
    /// upload a body, hang up and go on with another key would leave runs without limit, each with its body. With the
    /// default, a run that waits for a connection gets it within the 30 seconds for which sqlx waits, as long as handlers take
    /// about a second. Raise it for a leased layer whose handlers wait for the outside, and hold no connection meanwhile.
    ///
    /// A replay is a run too, and so is a duplicate that waits for a request of another process. One that waits for a
    /// request of this process is none: it ends with its client.
    #[must_use]
    pub fn with_max_runs(self, runs: usize) -> Self {
        self.with(|settings| settings.max_runs = runs)
    }

    /// How long a handler may take, from its call to its response. After that it is dropped at its next await, and the
    /// answer is a 503 with `Retry-After` ([`Rejection::TimedOut`]). In transactional mode its writes are rolled back and the
    /// key is free; under a lease it is an error of the work: at least once the key is free, at most once it is
    /// indeterminate. The default is 5 minutes: without any limit, a handler that never returns would keep its connection
    /// and its key for ever, and common proxies give up after a minute. Choose it longer than a time-out further out, which
    /// answers the client and leaves the run alone.
    ///
    /// Dropping a handler does not cancel its statement: PostgreSQL ends that by its own `statement_timeout`, and the
    /// transaction and its connection are in use until then. Nor does it stop a task that the handler has spawned.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::Duration`] under a millisecond or over ten years.
    pub fn with_run_timeout(self, limit: Duration) -> Result<Self, InvalidSetting> {
        within("run time-out", limit, RETENTION)?;
        Ok(self.with(|settings| settings.run_timeout = limit))
    }

    /// Counts its runs here, together with those of other layers. [`with_max_runs`](Self::with_max_runs) then compares with
    /// the count of all.
    #[must_use]
    pub fn with_runs(self, runs: &Runs) -> Self {
        self.with(|settings| settings.runs = runs.clone())
    }

    /// The runs of this layer and its clones, to wait for at shutdown.
    #[must_use]
    pub fn runs(&self) -> Runs {
        self.settings.runs.clone()
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService { inner, settings: Arc::new(self.settings.clone()) }
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").field("mode", &self.settings.mode).finish_non_exhaustive()
    }
}
