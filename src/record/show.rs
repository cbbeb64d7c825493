//! Records as an operator sees them.

use std::num::NonZeroU32;
use std::time::Duration;

use chrono::{DateTime, Datelike as _, Utc};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row as _};

use super::probes::ShownProbes;
use super::resume::ShownRequest;
use super::statement::{self, Pages, Record, known_mode, may_be_retried, probes_count, readable, state, steps_hash};
use super::step::ShownStep;
use crate::state::{State, Version};
use crate::{Error, Key, Mode};

/// One record without its response, which may be large and is confidential.
///
/// These methods settle the record as it was shown: [`resolve`](Self::resolve), [`release`](Self::release),
/// [`grant`](Self::grant), [`forget`](Self::forget), and [`step`](Self::step) for a step in doubt. If the record has
/// changed since it was shown, these methods change nothing, and return
/// [`SettleError::Changed`](crate::SettleError::Changed).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shown {
    /// The key.
    pub key: Key,
    /// The mode.
    pub mode: Mode,
    /// The state.
    pub state: State,
    /// The fencing token of the last claim of the record, or of the last decision about the record.
    pub token: i64,
    /// The number of claims of the record. A claim that ended before its work began does not count.
    pub attempt: u32,
    /// The number of the attempt that an operator [permits](Self::grant), even if the service's limit is smaller.
    pub granted_attempt: Option<u32>,
    /// When the record was last claimed.
    pub claimed_at: DateTime<Utc>,
    /// When the operation was completed.
    pub completed_at: Option<DateTime<Utc>>,
    /// When the retention ends. Until this moment, retries of an unsettled operation are refused. **After this moment,
    /// a retry is performed.** If the column is `infinity`, this field is the end of the year 9999.
    pub expires_at: DateTime<Utc>,
    /// The rest of the retention. Zero if the retention has ended.
    pub retention_left: Duration,
    /// When the lease ends, or when it ended. `None` without a lease, and after the claim is released.
    pub lease_until: Option<DateTime<Utc>>,
    /// The rest of a live lease.
    pub lease_left: Option<Duration>,
    /// The size of the stored response.
    pub response_bytes: Option<u64>,
    /// The key under which the next service saw the operation: see
    /// [`Lease::downstream_key`](crate::lease::Lease::downstream_key). With this key, look up at that service whether
    /// the operation took effect. `None` outside lease mode. Also `None` for an operation in steps, because only the
    /// steps call other services: see [`downstream_key_of_step`](Self::downstream_key_of_step).
    pub downstream_key: Option<String>,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
    /// The steps of an unfinished operation in steps, the earliest first, without their results.
    pub steps: Vec<ShownStep>,
    /// The probes of a [`Reconciler`](crate::lease::Reconciler) since the operation came into doubt.
    pub probes: Vec<ShownProbes>,
    /// Whether a resumer may finish the operation, because its request is stored and its policy is not `AtMostOnce`.
    pub resumable: bool,
    /// The stored request without its body, if a leased HTTP layer has stored it.
    pub request: Option<ShownRequest>,
    fingerprint: Option<Vec<u8>>,
    /// The names of the steps in doubt. A decision uses this private field instead of `steps`, because a caller can
    /// change the public field `steps`.
    pub(super) in_doubt: Vec<String>,
    pub(super) version: Version,
}

impl Shown {
    /// The version of the record when it was shown. The errors [`Indeterminate`](crate::Error::Indeterminate) and
    /// [`Exhausted`](crate::Error::Exhausted), which ask for a decision, contain the version at the time of the error.
    #[must_use]
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Whether a service with this [limit](crate::lease::LeaseOptions::max_attempts) refuses the next attempt as
    /// [exhausted](crate::Error::Exhausted). Such an operation waits for an operator, who can permit one more attempt
    /// with [`grant`](Self::grant).
    #[must_use]
    pub fn is_exhausted(&self, max_attempts: NonZeroU32) -> bool {
        self.mode.is_leased()
            && matches!(self.state, State::Released | State::Lapsed)
            && are_used_up(self.attempt, max_attempts, self.granted_attempt)
    }

    /// The downstream key of the step with this name. If the step was begun, the other service saw the step under this
    /// key. The key is also valid for a step that has stored nothing, such as an at-least-once step during which the
    /// process died. `None` if the operation is not in steps.
    #[must_use]
    pub fn downstream_key_of_step(&self, name: &str) -> Option<String> {
        (self.mode == Mode::InSteps).then(|| self.downstream(Some(name)))
    }

    /// The downstream key of the step, or of the operation if `step` is `None`.
    pub(crate) fn downstream(&self, step: Option<&str>) -> String {
        self.key.downstream(self.fingerprint.as_deref().unwrap_or_default(), step.unwrap_or_default())
    }

    pub(super) fn of(row: &PgRow, key: Key) -> sqlx::Result<Self> {
        let mode = known_mode(row)?;
        let fingerprint: Option<Vec<u8>> = row.try_get("fingerprint")?;
        let downstream_key = |step: &str| key.downstream(fingerprint.as_deref().unwrap_or_default(), step);
        let lease_seconds_left: Option<f64> = row.try_get("lease_seconds_left")?;
        let response_bytes: Option<i32> = row.try_get("response_bytes")?;
        let completed_at: Option<DateTime<Utc>> = row.try_get("completed_at")?;
        let steps = ShownStep::all(row, downstream_key)?;
        let state = statement::state_of(row)?;
        let version = Version::of(row, completed_at.is_some())?;
        Ok(Self {
            mode,
            state,
            token: row.try_get("token")?,
            attempt: row.try_get::<i32, _>("attempt")?.unsigned_abs(),
            granted_attempt: row.try_get::<Option<i32>, _>("granted_attempt")?.map(i32::unsigned_abs),
            claimed_at: row.try_get("claimed_at")?,
            completed_at,
            expires_at: row.try_get("expires_at")?,
            // The number of seconds is negative if the retention has ended.
            retention_left: Duration::try_from_secs_f64(row.try_get("seconds_left")?).unwrap_or_default(),
            // The lease of a released claim has ended at -infinity, which is readable as the first day of year 1.
            lease_until: version.lease_until.filter(|until| until.year() > 1),
            lease_left: lease_seconds_left.and_then(|left| Duration::try_from_secs_f64(left).ok()),
            response_bytes: response_bytes.map(|bytes| u64::from(bytes.unsigned_abs())),
            downstream_key: (mode.is_leased() && mode != Mode::InSteps).then(|| downstream_key("")),
            last_error: row.try_get("last_error")?,
            in_doubt: steps.iter().filter(|step| step.in_doubt).map(|step| step.name.clone()).collect(),
            steps,
            probes: ShownProbes::read(row).unwrap_or_else(|error| {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(
                    operation = key.operation(),
                    error,
                    "the probes of a record do not decode, and are not shown"
                );
                Vec::new()
            }),
            resumable: row.try_get("resumable")?,
            version,
            request: row
                .try_get::<Option<&[u8]>, _>("request_head")?
                .and_then(ShownRequest::read)
                .map(|(head, _)| head),
            fingerprint,
            key,
        })
    }
}

/// Whether another attempt is forbidden: the service's limit is reached, and no operator has granted one more.
pub(crate) fn are_used_up(attempts: u32, most: NonZeroU32, granted_attempt: Option<u32>) -> bool {
    attempts >= most.get().max(granted_attempt.unwrap_or_default())
}

/// The columns of [`Shown`], except for those of the key.
macro_rules! shown {
    () => {
        concat! {
            "
                mode, fingerprint, token, attempt, granted_attempt, last_error,
                ", readable!("claimed_at"), " as claimed_at, ", readable!("completed_at"), " as completed_at,
                ", readable!("expires_at"), " as expires_at,
                steps::text as steps, ", steps_hash!(), " as steps_hash,
                request is not null and mode <> 'at_most_once' as resumable,
                ", readable!("lease_until"), " as lease_until,
                case when ", probes_count!(), " then probes::text end as probes,
                -- Without the body. JSON begins with a byte above these.
                case when pg_catalog.octet_length(request) > 3
                        and pg_catalog.get_byte(pg_catalog.substr(request, 1, 1), 0) < 9
                    then pg_catalog.substr(request, 1, 3 + 256 * pg_catalog.get_byte(pg_catalog.substr(request, 2, 1), 0)
                        + pg_catalog.get_byte(pg_catalog.substr(request, 3, 1), 0))
                end as request_head,
                pg_catalog.octet_length(response_body) as response_bytes,
                extract(epoch from (", readable!("expires_at"), ") - pg_catalog.statement_timestamp())::float8 as seconds_left,
                case when lease_until > pg_catalog.statement_timestamp()
                    then extract(epoch from (", readable!("lease_until"), ") - pg_catalog.statement_timestamp())::float8
                end as lease_seconds_left,
                ", state!(), " as state"
        }
    };
}

pub(super) use shown;

/// The records that no caller will complete unless an operator settles them. The oldest claim comes first. These
/// records are listed:
///
/// - Records that are indeterminate.
/// - Records whose stored request the service has refused.
/// - Records that have reached `max_attempts`. Without a limit, no record counts as exhausted.
/// - Records that have waited for their next attempt for longer than `abandoned_for`. Without this time, no record
///   counts as abandoned.
///
/// The statement reads the whole table. An index on the columns that a completion changes would prevent heap-only
/// updates.
pub(crate) async fn unsettled(
    conn: &mut PgConnection,
    limit: u32,
    max_attempts: Option<i32>,
    abandoned_for: Option<Duration>,
) -> Result<Vec<Shown>, Error> {
    let sql = concat! {
        "
        select /* pg_idempotency: unsettled */
            scope, operation, value,", shown!(), "
        from idempotency.record
        where completed_at is null
            and expires_at > pg_catalog.statement_timestamp()
            -- A newer release's mode is for an operator with that release.
            and mode in ('transaction', 'at_least_once', 'in_steps', 'at_most_once')
            and (
                ", state!(), " = 'indeterminate'
                or (", may_be_retried!(), "
                    and request is null
                    and mode <> 'transaction'
                    and pg_catalog.starts_with(last_error, 'refused: '))
                or (", may_be_retried!(), "
                    and mode <> 'transaction'
                    and $2::int4 is not null
                    -- As are_used_up. `greatest` ignores a null.
                    and not attempt < greatest($2::int4, granted_attempt))
                or (", may_be_retried!(), "
                    and mode <> 'transaction'
                    -- A claim that never began took no effect.
                    and attempt >= 1
                    and claimed_at <= pg_catalog.statement_timestamp() - $3::interval
                    -- A lease may have been renewed for longer than that. One that was released ended at -infinity.
                    and lease_until <= pg_catalog.statement_timestamp() - $3::interval)
            )
        order by record.claimed_at, scope, operation, value
        limit $1::int8 offset $4::int8
        ",
    };
    found(conn, limit, |skipped| {
        sqlx::query(sql)
            .persistent(false)
            .bind(i64::from(limit)) // $1
            .bind(max_attempts) // $2
            .bind(abandoned_for.map(statement::interval)) // $3
            .bind(skipped) // $4
    })
    .await
}

/// The records whose value begins with `beginning`, in the order of the primary key. If `scope` or `operation` is
/// `None`, the search includes every scope or every operation.
pub(crate) async fn search(
    conn: &mut PgConnection,
    scope: Option<&str>,
    operation: Option<&str>,
    beginning: &str,
    limit: u32,
) -> Result<Vec<Shown>, Error> {
    let sql = concat! {
        "
        select /* pg_idempotency: search */
            scope, operation, value,", shown!(), "
        from idempotency.record
        where ($2::text is null or scope = $2::text)
            and ($3::text is null or operation = $3::text)
            -- The server turns the beginning of a pattern into a range of the primary key, because the collation is C.
            and value like $4::text
        -- The order of the primary key. In another order, the server would sort the whole table for an empty beginning.
        order by value, scope, operation
        limit $1::int8 offset $5::int8
        ",
    };
    let mut pattern = String::with_capacity(beginning.len() + 1);
    for character in beginning.chars() {
        if matches!(character, '\\' | '%' | '_') {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern.push('%');
    found(conn, limit, |skipped| {
        sqlx::query(sql)
            .persistent(false)
            .bind(i64::from(limit)) // $1
            .bind(scope) // $2
            .bind(operation) // $3
            .bind(&pattern) // $4
            .bind(skipped) // $5
    })
    .await
}

/// Makes the server end each further statement of the transaction after this time.
pub(crate) async fn limit_time(conn: &mut PgConnection, within: Duration) -> Result<(), Error> {
    // For the server, 0 means that the time has no limit.
    let milliseconds = i32::try_from(within.as_millis()).unwrap_or(i32::MAX).max(1);
    sqlx::query(
        "select /* pg_idempotency: limit time */ pg_catalog.set_config('statement_timeout', $1::int4::text, true)",
    )
    .persistent(false)
    .bind(milliseconds) // $1
    .execute(conn)
    .await
    .map(drop)
    .map_err(Error::of_statement)
}

/// Reads page after page, until `limit` records are found. `page` returns the statement that skips the given number of
/// rows.
async fn found<'q>(
    conn: &mut PgConnection,
    limit: u32,
    page: impl Fn(i64) -> Query<'q, Postgres, PgArguments>,
) -> Result<Vec<Shown>, Error> {
    let mut pages = Pages::of(i64::from(limit), limit as usize, 0);
    loop {
        let rows = page(pages.skipped)
            .try_map(|row: PgRow| {
                let operation: &str = row.try_get("operation")?;
                let shown = statement::stored_key(&row, operation)
                    .and_then(|key| key.map(|key| Shown::of(&row, key)).transpose());
                Ok(statement::or_left_out(operation, shown))
            })
            .fetch_all(&mut *conn)
            .await
            .map_err(Error::of_statement)?;
        if pages.end_with(rows) {
            pages.found.truncate(limit as usize);
            return Ok(pages.found);
        }
    }
}

impl Record<'_> {
    pub(crate) async fn show(self, conn: &mut PgConnection) -> Result<Option<Shown>, Error> {
        self.query(concat! {
            "
            select /* pg_idempotency: read */", shown!(), "
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
            ",
        })
        .try_map(|row| Shown::of(&row, self.key.clone()))
        .fetch_optional(conn)
        .await
        .map_err(Error::of_statement)
    }
}
