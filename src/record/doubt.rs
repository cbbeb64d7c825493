//! The operations in doubt that a reconciler visits, and what it writes into their column [`looks`](super::looks).

use std::time::Duration;

use serde_json::{Map, Value, json};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::looks::{Looks, LooksAt};
use super::show::{Shown, shown};
use super::statement::{
    self, Pages, Record, changes_a_row, interval, looks_count, readable, state, steps_hash, steps_in_doubt, stored_time,
};
use super::step;
use crate::{Deployment, Error, Mode};

/// How many operations one search finds. A reconciler that loses one to another tries the next.
const DOUBTS: i64 = 32;

/// Nobody has decided about the operation since it was seen under the token `$4`, with the lease `$5`.
macro_rules! undecided {
    () => {
        concat! {
            "where scope = $1::text and operation = $2::text and value = $3::text
                and token = $4::int8
                -- The form of stored_time.
                and lease_until = ($5::text::timestamp at time zone 'UTC')
                and completed_at is null
                and ", $crate::record::statement::no_live_lease!(), "
                and expires_at > pg_catalog.statement_timestamp()"
        }
    };
}

/// A look that is to be written.
#[derive(Clone, Copy)]
pub(crate) struct Writing<'a> {
    pub(crate) name: &'a str,
    pub(crate) n: u32,
    /// The number of the look, beside its time.
    pub(crate) number: &'a str,
    pub(crate) look: &'a LooksAt,
    pub(crate) after: Option<Duration>,
    pub(crate) retention: Duration,
}

/// An operation in doubt that is due for a visit.
#[derive(Debug)]
pub(crate) struct Doubt {
    pub(crate) shown: Shown,
    /// The end of its lease, in the form of [`stored_time`].
    lease_until: Option<String>,
    /// The names of the steps in doubt; `""` for an operation without steps.
    pub(crate) names: Vec<String>,
    /// The names in the order of jsonb, in which the looks are compared.
    in_doubt: Value,
    /// `None` before the first visit under this fence.
    pub(crate) looks: Option<Looks>,
    /// The column as it is, also if its looks do not count.
    stored: Option<String>,
    /// When the lease lapsed. `None` if it was released.
    lapsed_at: Option<f64>,
    pub(crate) now: f64,
}

impl Doubt {
    /// The operations that are due: those that nobody has visited first, then the oldest claim.
    pub(crate) async fn all(
        conn: &mut PgConnection,
        deployment: Deployment,
        operation: &str,
        mode: Mode,
    ) -> Result<Vec<Self>, Error> {
        let sql = concat! {
            "
            select /* pg_idempotency: doubts */
                scope, value,", shown!(), ",
                ", stored_time!("lease_until"), " as stored_lease_until,
                case when lease_until > '-infinity' then extract(epoch from lease_until)::float8 end as lapsed_at,
                extract(epoch from pg_catalog.statement_timestamp())::float8 as now,
                ", steps_in_doubt!(), "::text as steps_in_doubt, looks::text as stored, ", looks_count!(), " as looks_count
            from idempotency.record
            where operation = $1::text
                and request is not null
                and mode = $2::text
                and ", state!(), " = 'indeterminate'
                and (", looks_count!(), " is not true
                    or pg_catalog.jsonb_path_exists(looks, '$.of.*.next ? (@ <= $now)', pg_catalog.jsonb_build_object(
                        'now', extract(epoch from pg_catalog.statement_timestamp())
                    )))
            order by ", looks_count!(), " is true, record.claimed_at
            limit $3::int8 offset $4::int8
            ",
        };
        let mut pages = Pages::of(DOUBTS, 1, 0);
        loop {
            let page = sqlx::query(sql)
                .persistent(deployment.prepared)
                .bind(operation) // $1
                .bind(mode.as_str()) // $2
                .bind(DOUBTS) // $3
                .bind(pages.skipped) // $4
                .try_map(|row: PgRow| Ok(statement::or_left_out(operation, Self::of(&row, operation))))
                .fetch_all(&mut *conn)
                .await
                .map_err(Error::of_statement)?;
            if pages.end_with(page) {
                return Ok(pages.found);
            }
        }
    }

    /// `None` for a row whose key no caller can have.
    fn of(row: &PgRow, operation: &str) -> sqlx::Result<Option<Self>> {
        let Some(key) = statement::stored_key(row, operation)? else { return Ok(None) };
        let stored: Option<String> = row.try_get("stored")?;
        let counts = row.try_get::<Option<bool>, _>("looks_count")? == Some(true);
        let names = step::in_doubt(row)?;
        let in_doubt = row.try_get::<Option<&str>, _>("steps_in_doubt")?.unwrap_or("[]");
        let in_doubt = serde_json::from_str(in_doubt).map_err(|error| sqlx::Error::Decode(error.into()))?;
        Ok(Some(Self {
            shown: Shown::of(row, key)?,
            lease_until: row.try_get("stored_lease_until")?,
            names: if names.is_empty() { vec![String::new()] } else { names },
            in_doubt,
            looks: if counts { Looks::of_column(stored.as_deref()) } else { None },
            stored,
            lapsed_at: row.try_get("lapsed_at")?,
            now: row.try_get("now")?,
        }))
    }

    fn record(&self, deployment: Deployment) -> Record<'_> {
        Record { key: &self.shown.key, deployment }
    }

    /// The first visit: the looks begin after the quiet time, and the record is remembered until then. `false` means
    /// that another visit or decision was faster.
    ///
    /// The lease may have lapsed only because the server's clock has jumped ahead. After one more lease of real time
    /// its owner has renewed it, which ends these looks, or has stopped by its own clock.
    pub(crate) async fn visit_first(
        &self,
        conn: &mut PgConnection,
        deployment: Deployment,
        lease: Duration,
        quiet: Duration,
        retention: Duration,
    ) -> Result<bool, Error> {
        let since = self.lapsed_at.unwrap_or(self.now);
        let stopped = self.lapsed_at.map_or(self.now, |_| self.now + lease.as_secs_f64());
        let next = stopped + quiet.as_secs_f64();
        let looks = json!({
            "token": self.shown.token,
            "lease_until": self.lease_until,
            "in_doubt": self.in_doubt,
            "since": since,
            "of": self.names.iter().map(|name| (name.clone(), json!({"n": 0, "next": next}))).collect::<Map<_, _>>(),
        });
        let update = self
            .record(deployment)
            .query(concat! {
                "
                update /* pg_idempotency: first visit */ idempotency.record
                set looks = $6::text::jsonb,
                    expires_at = greatest(expires_at, pg_catalog.statement_timestamp() + $8::interval)
                ", undecided!(), "
                    -- Otherwise a slow first visit would bring back the looks of a faster one.
                    and looks is not distinct from $7::text::jsonb
                ",
            })
            .bind(self.shown.token) // $4
            .bind(&self.lease_until) // $5
            .bind(looks.to_string()) // $6
            .bind(&self.stored) // $7
            .bind(interval(retention)); // $8
        changes_a_row(conn, update).await
    }

    /// Writes the look of this number, unless another one was reserved after the look `n`, or somebody has decided. The
    /// next look comes `after` this time, or never. The record is remembered for the retention from now.
    pub(crate) async fn write_look(
        &self,
        conn: &mut PgConnection,
        deployment: Deployment,
        Writing { name, n, number, look, after, retention }: Writing<'_>,
    ) -> Result<bool, Error> {
        let update = self
            .record(deployment)
            .query(concat! {
                "
                update /* pg_idempotency: write look */ idempotency.record
                -- Citus refuses a column in jsonb_build_object, which is stable.
                set looks = pg_catalog.jsonb_set(looks, array['of', $6::text], $8::text::jsonb || pg_catalog.jsonb_build_object(
                        'next', extract(epoch from pg_catalog.statement_timestamp() + $10::interval),
                        'at', $9::text::jsonb || pg_catalog.jsonb_build_object($11::text, pg_catalog.statement_timestamp())
                    )),
                    expires_at = greatest(expires_at, pg_catalog.statement_timestamp() + $12::interval)
                ", undecided!(), "
                    and ", looks_count!("looks ->> 'lease_until'::text = $5::text"), "
                    and looks -> 'of'::text -> $6::text ->> 'n'::text = $7::int8::text
                ",
            })
            .bind(self.shown.token) // $4
            .bind(&self.lease_until) // $5
            .bind(name) // $6
            .bind(i64::from(n)) // $7
            .bind(look.as_json().to_string()) // $8
            .bind(Value::Object(look.at.clone()).to_string()) // $9
            .bind(after.map(interval)) // $10
            .bind(number) // $11
            .bind(interval(retention)); // $12
        changes_a_row(conn, update).await
    }
}
