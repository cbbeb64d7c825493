//! Records that an earlier call would have left.

use std::collections::BTreeMap;

use serde::Serialize;
use sqlx::PgExecutor;

use crate::lease::Policy;
use crate::outcome::to_json;
use crate::record::{LeaseState, Record, Staged};
use crate::response::Response;
use crate::{Body, Deployment, Error, Fingerprint, Key, Mode, NotResumable};

/// A record in the state that a test needs. Begin with the state, change the details that matter to the test, and
/// [`write`](Self::write) it. [`age`](super::age()) then makes it older.
///
/// It was claimed a minute ago, by default for the first time, and its retention is 24 hours.
///
/// ```no_run
/// # use pg_idempotency::{Key, lease::Policy, testing::{self, Fixture}};
/// # use std::time::Duration;
/// # async fn f(pool: sqlx::PgPool) -> Result<(), pg_idempotency::Error> {
/// let key = Key::new("rides", "sms.arrived", "ride-7")?;
/// let policy = Policy::AtMostOnce { lease: Duration::from_secs(40) };
///
/// // The worker that sent the text died an hour ago, in its second attempt: indeterminate.
/// Fixture::lapsed(&key, "your car is here", policy)?
///     .with_attempt(2)
///     .with_last_error("the gateway closed the connection")
///     .write(&pool)
///     .await?;
/// testing::age(&pool, &key, Duration::from_secs(3600)).await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a fixture does nothing until it is written"]
pub struct Fixture {
    key: Key,
    record: Staged,
}

impl Fixture {
    /// Completed with this response: the next call with the same body replays. The mode is transaction mode. To change
    /// it, see [`with_mode`](Self::with_mode).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`] and [`Error::Unencodable`] for a body or response that cannot be stored.
    pub fn completed<B, T>(key: &Key, body: &B, response: &T) -> Result<Self, Error>
    where
        B: Body + ?Sized,
        T: Serialize + ?Sized,
    {
        let response = Response { body: Some(to_json(response)?), ..Response::default() };
        Ok(Self::unfinished(key, Mode::Transaction, Some(body.fingerprint()?)).completed_with(response))
    }

    /// Completed with an HTTP response, which the layer replays to the same request. `key` is the key that the layer
    /// makes of the request: the scope from your function, the method and route, and the `Idempotency-Key`.
    ///
    /// ```no_run
    /// # use pg_idempotency::{Key, testing::Fixture};
    /// # async fn f(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// let key = Key::new("user:1", "POST /orders/{shop}", "abc")?;
    /// let request = http::Request::post("/orders/7").header("content-type", "application/json").body(r#"{"what":"tea"}"#)?;
    /// let response = http::Response::builder().status(201).header("location", "/orders/7/1").body("{\"id\":1}")?;
    /// Fixture::answered(&key, &request, &response)?.write(&pool).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// It is a record of [`IdempotencyLayer::transactional`](crate::http::IdempotencyLayer::transactional); for a
    /// leased layer see [`with_mode`](Self::with_mode). It fits a layer that compares bodies byte by byte, replays the
    /// default headers, and does not seal (encrypt) responses. For other layers let the service itself answer the first
    /// request.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`]. At present this function returns no error, because bodies are compared byte by byte.
    #[cfg(feature = "http")]
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn answered<B, R>(key: &Key, request: &http::Request<B>, response: &http::Response<R>) -> Result<Self, Error>
    where
        B: AsRef<[u8]>,
        R: AsRef<[u8]>,
    {
        let fingerprint = crate::http::plain_fingerprint(request);
        let response = crate::http::plain_response(response);
        Ok(Self::unfinished(key, Mode::Transaction, Some(fingerprint)).completed_with(response))
    }

    /// Claimed under a lease that is live for its whole length from now: the next call gets [`Error::InFlight`], or
    /// waits.
    ///
    /// For a call in flight in transaction mode, which is an open transaction, see [`in_flight`](super::in_flight()).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`].
    pub fn leased<B: Body + ?Sized>(key: &Key, body: &B, policy: Policy) -> Result<Self, Error> {
        let lease = LeaseState::Live(policy.lease());
        Ok(Self::unfinished(key, policy.mode(), Some(body.fingerprint()?)).under(lease))
    }

    /// Claimed under a lease that lapsed a moment ago, as a process that died leaves it. Under
    /// [`AtLeastOnce`](Policy::AtLeastOnce) and [`InSteps`](Policy::InSteps) the next call takes it over; under
    /// [`AtMostOnce`](Policy::AtMostOnce) it is indeterminate. For what an earlier attempt has stored, see
    /// [`with_step`](Self::with_step), [`with_step_in_doubt`](Self::with_step_in_doubt) and
    /// [`with_stored_request`](Self::with_stored_request).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`].
    pub fn lapsed<B: Body + ?Sized>(key: &Key, body: &B, policy: Policy) -> Result<Self, Error> {
        Ok(Self::leased(key, body, policy)?.under(LeaseState::Lapsed))
    }

    /// Released: the next call takes it over as the next attempt. The mode is transaction mode. To change it, see
    /// [`with_mode`](Self::with_mode).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`].
    pub fn released<B: Body + ?Sized>(key: &Key, body: &B) -> Result<Self, Error> {
        Ok(Self::unfinished(key, Mode::Transaction, Some(body.fingerprint()?)).under(LeaseState::Released))
    }

    /// Claimed and committed, but not completed, in transaction mode: a caller that commits after an error leaves such
    /// a record. The next call gets [`Error::Indeterminate`]. For lease mode use [`lapsed`](Self::lapsed) with
    /// [`AtMostOnce`](Policy::AtMostOnce).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`].
    pub fn indeterminate<B: Body + ?Sized>(key: &Key, body: &B) -> Result<Self, Error> {
        Ok(Self::unfinished(key, Mode::Transaction, Some(body.fingerprint()?)))
    }

    /// A mark: the next mark of the key is a [`Duplicate`](crate::mark::Marked::Duplicate).
    pub fn marked(key: &Key) -> Self {
        Self::unfinished(key, Mode::Mark, None).completed_with(Response::default())
    }

    fn unfinished(key: &Key, mode: Mode, fingerprint: Option<Fingerprint>) -> Self {
        let record = Staged {
            mode,
            fingerprint,
            attempt: 1,
            expired: false,
            lease: LeaseState::None,
            completed: false,
            response: Response::default(),
            last_error: None,
            steps: BTreeMap::new(),
            request: None,
        };
        Self { key: key.clone(), record }
    }

    fn completed_with(mut self, response: Response) -> Self {
        self.record.completed = true;
        self.record.response = response;
        self
    }

    fn under(mut self, lease: LeaseState) -> Self {
        self.record.lease = lease;
        self
    }

    /// Sets the mode, for records that were completed or released in lease mode. Other states fix the mode, and
    /// [`write`](Self::write) refuses a mode that does not fit the state.
    pub fn with_mode(mut self, mode: Mode) -> Self {
        self.record.mode = mode;
        self
    }

    /// Ends the retention a moment ago, however long it is. No sweep has deleted the record yet. A live lease still
    /// protects it.
    pub fn expired(mut self) -> Self {
        self.record.expired = true;
        self
    }

    /// Sets how many times the key was claimed. The default is 1.
    pub fn with_attempt(mut self, attempt: u32) -> Self {
        self.record.attempt = attempt;
        self
    }

    /// Sets why the last attempt failed.
    pub fn with_last_error(mut self, reason: impl Into<String>) -> Self {
        self.record.last_error = Some(reason.into());
        self
    }

    /// Adds a step whose result an earlier attempt has stored: the next attempt gets this result. For an unfinished
    /// operation under [`InSteps`](Policy::InSteps).
    ///
    /// # Errors
    ///
    /// [`Error::Unencodable`] for a result that cannot be stored.
    pub fn with_step<T: Serialize + ?Sized>(mut self, name: impl Into<String>, result: &T) -> Result<Self, Error> {
        let result =
            String::from_utf8(to_json(result)?).map_err(|error| Error::Unencodable { source: error.into() })?;
        self.record.steps.insert(name.into(), Some(result));
        Ok(self)
    }

    /// Adds an at-most-once step that an earlier attempt has begun: the next call gets [`Error::Indeterminate`] with
    /// its name. For an unfinished operation under [`InSteps`](Policy::InSteps).
    pub fn with_step_in_doubt(mut self, name: impl Into<String>) -> Self {
        self.record.steps.insert(name.into(), None);
        self
    }

    /// Stores the request, so that [`resume_one`](crate::lease::Leasing::resume_one) finds the operation. Give it the
    /// body that the fixture was made with.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`] for a body that is no JSON, and [`Error::NotResumable`] for a fingerprint.
    pub fn with_stored_request<B: Body + ?Sized>(mut self, body: &B) -> Result<Self, Error> {
        let json = body.json().ok_or(Error::NotResumable { problem: NotResumable::NoBody })?;
        self.record.request = Some(json?);
        Ok(self)
    }

    /// Writes the record, and replaces any other record of the key. It takes a pool or a connection.
    ///
    /// # Errors
    ///
    /// [`Error::ImpossibleRecord`] for a state that no call leaves behind, by the rules of `migrations/strict.sql`;
    /// errors of the database.
    pub async fn write(self, executor: impl PgExecutor<'_>) -> Result<(), Error> {
        if let Some(rule) = self.record.broken_rule() {
            return Err(Error::ImpossibleRecord { rule });
        }
        Record { key: &self.key, deployment: Deployment::new() }.stage(executor, self.record).await
    }
}
