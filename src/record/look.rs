//! Looking at the record that is in the way of a claim.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::distributed;
use super::fragment::{claimed_here, readable, state, steps_in_doubt};
use super::statement::{self, Record, interval};
use super::step::in_doubt;
use crate::mode::UnknownMode;
use crate::response::Response;
use crate::state::State;
use crate::{Error, Mode};

/// The result of a look.
pub(crate) struct Look {
    /// When the call was made, by the database's clock.
    pub(crate) asked: DateTime<Utc>,
    /// The age of the transaction, by the server's clock.
    pub(crate) age: Duration,
    pub(crate) standing: Standing,
}

/// The obstacle that a claim has met.
#[allow(clippy::large_enum_variant, reason = "moved once for each look, which costs a round trip")]
pub(crate) enum Standing {
    Found(Found),
    /// No record is there any more, and this transaction holds the lock: claim again.
    Free,
    /// An open transaction holds the key, and its record is not committed.
    Held,
}

/// A record that was in the way of a claim.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) mode: Result<Mode, UnknownMode>,
    pub(crate) fingerprint: Option<Vec<u8>>,
    pub(crate) token: i64,
    pub(crate) attempt: i32,
    pub(crate) claimed_at: DateTime<Utc>,
    pub(crate) claimed_by_this_transaction: bool,
    /// Expired, if the retention had ended when the call was made, and no live lease protects the record.
    pub(crate) state: State,
    /// The rest of a live lease.
    pub(crate) lease_left: Option<Duration>,
    pub(crate) response: Response,
    /// The trace of its claim.
    pub(crate) trace: Option<String>,
    pub(crate) last_error: Option<String>,
    /// The names of the steps that were begun and have no result.
    pub(crate) steps_in_doubt: Vec<String>,
    /// The attempt that an operator permits.
    pub(crate) granted_attempt: Option<i32>,
}

impl Record<'_> {
    /// Looks in a snapshot of its own, because an owner may have committed since the claim's snapshot. `asked` is the
    /// time of the call as an earlier look found it. `waited` is the time since the call, by the clock of this process.
    ///
    /// A look that finds a record takes no lock, because the caller's transaction would hold the lock to its end.
    pub(crate) async fn look(
        self,
        conn: &mut PgConnection,
        asked: Option<DateTime<Utc>>,
        waited: Duration,
    ) -> Result<Look, Error> {
        if self.deployment.distributed {
            return distributed::look(self, conn, asked, waited).await;
        }
        self.query(concat! {
            "
            select
                asked.at as asked,
                pg_catalog.statement_timestamp() - pg_catalog.now() as age,
                case when record.token is null then pg_catalog.pg_try_advisory_xact_lock($4::int8) end as mine,
                mode, fingerprint, token, attempt, granted_attempt, last_error, trace, ", readable!("claimed_at"), " as claimed_at,
                ", claimed_here!("token"), " as claimed_by_this_transaction,
                case when lease_until > pg_catalog.statement_timestamp()
                    then extract(epoch from (", readable!("lease_until"), ") - pg_catalog.statement_timestamp())::float8
                end as lease_left,
                ", state!("asked.at"), " as state,
                ", steps_in_doubt!(), "::text as steps_in_doubt,
                response_status, response_headers::text as response_headers, response_body
            -- The smaller, because the clock may have jumped back: a record must not expire before its time.
            from (
                select least($5::timestamptz, pg_catalog.statement_timestamp() - $6::interval) as at
            ) as asked
            left join idempotency.record on scope = $1::text and operation = $2::text and value = $3::text
            ",
        })
        .bind(self.key.lock_id()) // $4
        .bind(asked) // $5
        .bind(interval(waited)) // $6
        .try_map(|row: PgRow| {
            let standing = match row.try_get("mine")? {
                None => Standing::Found(Found::of(&row)?),
                Some(true) => Standing::Free,
                Some(false) => Standing::Held,
            };
            Ok(Look { asked: row.try_get("asked")?, age: statement::age(&row)?, standing })
        })
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
    }
}

impl Found {
    fn of(row: &PgRow) -> sqlx::Result<Self> {
        let lease_left: Option<f64> = row.try_get("lease_left")?;
        Ok(Self {
            mode: Mode::from_column(row.try_get("mode")?),
            fingerprint: row.try_get("fingerprint")?,
            token: row.try_get("token")?,
            attempt: row.try_get("attempt")?,
            claimed_at: row.try_get("claimed_at")?,
            claimed_by_this_transaction: row.try_get("claimed_by_this_transaction")?,
            state: statement::state(row)?,
            lease_left: lease_left.map(|left| Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX)),
            response: Response::of(row)?,
            trace: row.try_get("trace")?,
            last_error: row.try_get("last_error")?,
            steps_in_doubt: in_doubt(row)?,
            granted_attempt: row.try_get("granted_attempt")?,
        })
    }
}
