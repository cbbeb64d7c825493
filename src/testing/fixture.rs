//! Records as if somebody had been here before.

use std::time::Duration;

use serde::Serialize;
use sqlx::{PgConnection, PgExecutor};

use crate::lease::Policy;
use crate::{Body, DEFAULT_RETENTION, Error, Fingerprint, Key, Mode, record};

/// A record that an earlier call has completed with this response a minute ago: the next call with the same body replays.
///
/// It is [`Fixture::completed`], written; whatever stood under the key before is replaced.
///
/// # Errors
///
/// [`Error::InvalidBody`] and [`Error::Unencodable`] for what cannot be stored, and the database's.
pub async fn completed<B, T>(conn: &mut PgConnection, key: &Key, body: &B, response: &T) -> Result<(), Error>
where
    B: Body + ?Sized,
    T: Serialize + ?Sized,
{
    Fixture::completed(key, body, response)?.write(conn).await
}

/// A completed record whose retention has ended a moment ago, and which no sweep has met yet: the next call performs.
///
/// # Errors
///
/// As [`completed`].
pub async fn expired<B, T>(conn: &mut PgConnection, key: &Key, body: &B, response: &T) -> Result<(), Error>
where
    B: Body + ?Sized,
    T: Serialize + ?Sized,
{
    Fixture::completed(key, body, response)?.expired().write(conn).await
}

/// A record in a state and of an age: begin with the state, change what matters to the test, and [`write`](Self::write) it.
///
/// By default it was claimed a minute ago, for the first time, and is remembered for 24 hours.
///
/// ```no_run
/// # use pg_idempotency::{Key, lease::Policy, testing::Fixture};
/// # use std::time::Duration;
/// # async fn f(pool: sqlx::PgPool) -> Result<(), pg_idempotency::Error> {
/// let key = Key::new("rides", "sms.arrived", "ride-7")?;
/// let policy = Policy::AtMostOnce { lease: Duration::from_secs(40) };
///
/// // The worker that sent the text died an hour ago, and it was its second try: indeterminate.
/// Fixture::lapsed(&key, "your car is here", policy)?
///     .with_age(Duration::from_secs(3600))
///     .with_attempt(2)
///     .with_last_error("the gateway closed the connection")
///     .write(&pool)
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is written before `write`"]
pub struct Fixture {
    key: Key,
    mode: Mode,
    /// A mark has none.
    fingerprint: Option<Fingerprint>,
    attempt: u32,
    age: Duration,
    retention: Duration,
    expired: bool,
    deadline: Deadline,
    completed: bool,
    response: record::Response,
    last_error: Option<String>,
}

/// What `lease_until` is to be.
#[derive(Clone, Copy, Debug)]
enum Deadline {
    None,
    In(Duration),
    Past,
    Released,
}

/// Long enough that the claim is not taken for this transaction's own, far shorter than any retention.
const AGE: Duration = Duration::from_secs(60);

impl Fixture {
    /// Completed with this response: the next call with the same body replays. In transaction mode; see
    /// [`with_mode`](Self::with_mode).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`] and [`Error::Unencodable`] for what cannot be stored.
    pub fn completed<B, T>(key: &Key, body: &B, response: &T) -> Result<Self, Error>
    where
        B: Body + ?Sized,
        T: Serialize + ?Sized,
    {
        let response = record::Response { body: Some(encode(response)?), ..record::Response::default() };
        Ok(Self { completed: true, response, ..Self::unfinished(key, Mode::Transaction, Some(body.fingerprint()?)) })
    }

    /// Completed with an HTTP response, which the layer replays to the same request. `key` is the key that the layer makes of
    /// it: the scope of your function, the method and route, and the `Idempotency-Key`.
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
    /// It is a record of [`IdempotencyLayer::transactional`](crate::http::IdempotencyLayer::transactional); see
    /// [`with_mode`](Self::with_mode) for the other. It fits a layer that compares bodies byte by byte, replays the headers
    /// that are replayed anyway, and seals nothing. For others let the service itself answer the first request.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`], at present for no request: a body counts byte by byte.
    #[cfg(feature = "http")]
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn answered<B, R>(key: &Key, request: &http::Request<B>, response: &http::Response<R>) -> Result<Self, Error>
    where
        B: AsRef<[u8]>,
        R: AsRef<[u8]>,
    {
        let fingerprint = crate::http::plain_fingerprint(request)?;
        let response = crate::http::plain_response(response);
        Ok(Self { completed: true, response, ..Self::unfinished(key, Mode::Transaction, Some(fingerprint)) })
    }

    /// Claimed under a lease that is live for its whole length yet: the next call is told [`Error::InFlight`], or waits.
    ///
    /// For a call in flight in transaction mode, which is an open transaction, see [`in_flight`](super::in_flight()).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`].
    pub fn leased<B: Body + ?Sized>(key: &Key, body: &B, policy: Policy) -> Result<Self, Error> {
        let fixture = Self::unfinished(key, policy.mode(), Some(body.fingerprint()?));
        Ok(Self { deadline: Deadline::In(policy.lease()), ..fixture })
    }

    /// Claimed under a lease whose deadline has passed a moment ago, as a process that died leaves it: at least once, the
    /// next call takes it over; at most once it is indeterminate.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`].
    pub fn lapsed<B: Body + ?Sized>(key: &Key, body: &B, policy: Policy) -> Result<Self, Error> {
        Ok(Self { deadline: Deadline::Past, ..Self::leased(key, body, policy)? })
    }

    /// Given up unperformed: the next call takes it over, as the attempt after this one's. In transaction mode; see
    /// [`with_mode`](Self::with_mode).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`].
    pub fn released<B: Body + ?Sized>(key: &Key, body: &B) -> Result<Self, Error> {
        let fixture = Self::unfinished(key, Mode::Transaction, Some(body.fingerprint()?));
        Ok(Self { deadline: Deadline::Released, ..fixture })
    }

    /// Claimed and committed, but not completed, in transaction mode: what a caller leaves who commits after an error. The
    /// next call is told [`Error::Indeterminate`]. That of lease mode is [`lapsed`](Self::lapsed) at most once.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidBody`].
    pub fn indeterminate<B: Body + ?Sized>(key: &Key, body: &B) -> Result<Self, Error> {
        Ok(Self::unfinished(key, Mode::Transaction, Some(body.fingerprint()?)))
    }

    /// A mark: the next one under the key is a [`Duplicate`](crate::dedup::Marked::Duplicate).
    pub fn marked(key: &Key) -> Self {
        Self { completed: true, ..Self::unfinished(key, Mode::Mark, None) }
    }

    fn unfinished(key: &Key, mode: Mode, fingerprint: Option<Fingerprint>) -> Self {
        Self {
            key: key.clone(),
            mode,
            fingerprint,
            attempt: 1,
            age: AGE,
            retention: DEFAULT_RETENTION,
            expired: false,
            deadline: Deadline::None,
            completed: false,
            response: record::Response::default(),
            last_error: None,
        }
    }

    /// In this mode: for what is completed or released in lease mode. Other states have the mode that they are made with,
    /// and a mode that cannot be in such a state is refused by [`write`](Self::write).
    pub fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Claimed, and completed where it is, so long ago; the retention counts from then, and one that is shorter has ended. A
    /// lease is as live or as lapsed as the state says.
    pub fn with_age(self, age: Duration) -> Self {
        Self { age, ..self }
    }

    /// Remembered for this long, counted from the claim.
    pub fn with_retention(self, retention: Duration) -> Self {
        Self { retention, ..self }
    }

    /// Past its retention, whatever that is, since a moment ago, and met by no sweep yet. A lease that is live protects it
    /// all the same.
    pub fn expired(self) -> Self {
        Self { expired: true, ..self }
    }

    /// Claimed so often.
    pub fn with_attempt(self, attempt: u32) -> Self {
        Self { attempt, ..self }
    }

    /// Why the last attempt failed.
    pub fn with_last_error(self, reason: impl Into<String>) -> Self {
        Self { last_error: Some(reason.into()), ..self }
    }

    /// Writes the record, whatever stood under the key before. Takes a pool or a connection.
    ///
    /// # Errors
    ///
    /// [`Error::ImpossibleRecord`] for a state that no call leaves behind, by the rules of `migrations/strict.sql`; and the
    /// database's.
    pub async fn write(self, executor: impl PgExecutor<'_>) -> Result<(), Error> {
        if let Some(rule) = self.broken_rule() {
            return Err(Error::ImpossibleRecord { rule });
        }
        let lease = match self.deadline {
            Deadline::None | Deadline::Released => None,
            Deadline::In(lease) => Some(microseconds(lease)),
            Deadline::Past => Some(-microseconds(MOMENT)),
        };
        let remembered = match self.expired {
            true => -microseconds(MOMENT),
            false => microseconds(self.retention).saturating_sub(microseconds(self.age)),
        };
        sqlx::query(
            "
            insert into idempotency.record (
                mode, scope, operation, key, fingerprint, token, attempt,
                claimed_at, completed_at, lease_until, expires_at,
                response_status, response_headers, response_body, last_error
            )
            values (
                $1::text, $2::text, $3::text, $4::text, $5::bytea, 0, $6::int4,
                statement_timestamp() - $7::int8 * interval '1 microsecond',
                case when $8::bool then statement_timestamp() - $7::int8 * interval '1 microsecond' end,
                case when $9::bool then '-infinity'
                    else statement_timestamp() + $10::int8 * interval '1 microsecond'
                end,
                statement_timestamp() + $11::int8 * interval '1 microsecond',
                $12::int2, $13::text::jsonb, $14::bytea, $15::text
            )
            on conflict (scope, operation, key) do update
            set mode = excluded.mode, fingerprint = excluded.fingerprint, token = excluded.token,
                attempt = excluded.attempt, claimed_at = excluded.claimed_at, completed_at = excluded.completed_at,
                lease_until = excluded.lease_until, expires_at = excluded.expires_at,
                response_status = excluded.response_status, response_headers = excluded.response_headers,
                response_body = excluded.response_body, last_error = excluded.last_error
            ",
        )
        .bind(self.mode.as_str())
        .bind(self.key.scope())
        .bind(self.key.operation())
        .bind(self.key.value())
        .bind(self.fingerprint.as_ref().map(Fingerprint::as_bytes))
        .bind(i32::try_from(self.attempt).unwrap_or(i32::MAX))
        .bind(microseconds(self.age))
        .bind(self.completed)
        .bind(matches!(self.deadline, Deadline::Released))
        .bind(lease)
        .bind(remembered)
        .bind(self.response.status)
        .bind(self.response.headers)
        .bind(self.response.body)
        .bind(self.last_error)
        .execute(executor)
        .await
        .map(drop)
        .map_err(Error::of_statement)
    }

    /// The rule of `migrations/strict.sql` that this record would break. Its length is the business of [`Key`].
    fn broken_rule(&self) -> Option<&'static str> {
        let leased = matches!(self.mode, Mode::AtLeastOnce | Mode::AtMostOnce);
        let rules = [
            ("attempts_count_from_one", self.attempt >= 1),
            ("fingerprint_unless_mark", (self.mode == Mode::Mark) == self.fingerprint.is_none()),
            ("mark_is_complete", self.mode != Mode::Mark || self.completed),
            ("completed_has_no_lease", !self.completed || matches!(self.deadline, Deadline::None)),
            (
                "deadline_only_for_leases",
                match self.deadline {
                    Deadline::None => true,
                    Deadline::In(_) | Deadline::Past => leased,
                    Deadline::Released => self.mode != Mode::Mark,
                },
            ),
            ("unfinished_lease_has_a_deadline", !leased || self.completed || !matches!(self.deadline, Deadline::None)),
        ];
        rules.into_iter().find_map(|(rule, kept)| (!kept).then_some(rule))
    }
}

/// How long ago what is over has ended: PostgreSQL's clock counts microseconds, and a reader's millisecond is plenty.
const MOMENT: Duration = Duration::from_millis(1);

/// As PostgreSQL counts; years beyond its calendar are its own error.
pub(super) fn microseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

pub(super) fn encode<T: Serialize + ?Sized>(response: &T) -> Result<Vec<u8>, Error> {
    crate::outcome::to_json(response)
}
