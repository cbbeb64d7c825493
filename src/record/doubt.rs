//! The operations in doubt that a reconciler visits. Each update requires the token and the end of the lease that the
//! search has found. `write_probe` also requires that the [`probes`](super::probes) are those of the steps in doubt.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::probes::{Probed, Probes, ShownProbes, as_json};
use super::show::{Shown, shown};
use super::statement::{
    self, Pages, changes_a_row, interval, no_live_lease, not_expired, probes_count, readable, state, steps_hash,
    steps_in_doubt, stored_time,
};
use super::step;
use crate::{Error, Mode};

/// How many operations one search finds. If another reconciler is faster with one of these operations, this reconciler
/// tries the next operation.
const DOUBTS: i64 = 32;

/// An operation in doubt that is due for a visit.
#[derive(Debug)]
pub(crate) struct Doubt {
    pub(crate) shown: Shown,
    /// The end of the lease, in the form of [`stored_time`]. A row without an end of the lease does not decode, and
    /// only a person can write such a row.
    lease_until: String,
    /// The names of the steps in doubt, in the order of jsonb.
    steps_in_doubt: Vec<String>,
    /// Those of them that are left to a person, because no other service has seen them.
    in_database: Vec<String>,
    now: DateTime<Utc>,
}

impl Doubt {
    /// The operations that are due. Operations that no reconciler has visited come before those that were visited. In
    /// each of these two groups, the oldest claim comes first. A row that does not decode is left out with a warning.
    pub(crate) async fn all(
        conn: &mut PgConnection,
        persistent: bool,
        operation: &str,
        mode: Mode,
    ) -> Result<Vec<Self>, Error> {
        let sql = concat! {
            "
            select /* pg_idempotency: doubts */
                scope, value,", shown!(), ",
                ", stored_time!("lease_until"), " as stored_lease_until, pg_catalog.statement_timestamp() as now,
                ", steps_in_doubt!(), "::text as steps_in_doubt
            from idempotency.record
            where operation = $1::text
                and request is not null
                and mode = $2::text
                and ", state!(), " = 'indeterminate'
                and (", probes_count!(), " is not true
                    or pg_catalog.jsonb_path_exists(probes, '$.of[*].next ? (@ <= $now)', pg_catalog.jsonb_build_object(
                        'now', extract(epoch from pg_catalog.statement_timestamp())
                    )))
            order by ", probes_count!(), " is true, record.claimed_at
            limit $3::int8 offset $4::int8
            ",
        };
        let mut pages = Pages::of(DOUBTS, 1, 0);
        loop {
            let page = sqlx::query(sql)
                .persistent(persistent)
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
        let steps = row.try_get::<Option<&str>, _>("steps_in_doubt")?.unwrap_or("[]");
        // If the probes cannot be decoded, this search fails, because a reconciler must not treat the record as a
        // record without probes. An operator still sees the record.
        ShownProbes::read(row)?;
        Ok(Some(Self {
            shown: Shown::of(row, key)?,
            lease_until: row.try_get("stored_lease_until")?,
            steps_in_doubt: serde_json::from_str(steps).map_err(|error| sqlx::Error::Decode(error.into()))?,
            in_database: step::in_database(row),
            now: row.try_get("now")?,
        }))
    }

    /// The probes that are due, and their indices in the column.
    pub(crate) fn due(&self) -> impl Iterator<Item = (usize, &ShownProbes)> {
        let probes = self.shown.probes.iter().enumerate();
        probes.filter(|(_, probes)| probes.next.is_some_and(|next| next <= self.now))
    }

    /// Makes the first visit since the operation came into doubt. The first probe is due when the time `after` is over.
    /// A step that no other service has seen is left to a person at once.
    /// The record is remembered for the retention from now. `false` means that another visit or decision was faster.
    pub(crate) async fn visit_first(
        &self,
        conn: &mut PgConnection,
        after: Duration,
        retention: Duration,
    ) -> Result<bool, Error> {
        let of = |step, next| ShownProbes { step, next, ..ShownProbes::default() };
        let next = Some(self.now + after);
        let mut probes = Probes { token: self.shown.token, lease_until: self.lease_until.clone(), of: Vec::new() };
        for step in &self.steps_in_doubt {
            probes.of.push(of(Some(step.clone()), next.filter(|_| !self.in_database.contains(step))));
        }
        if probes.of.is_empty() {
            probes.of.push(of(None, next));
        }
        let update = self
            .shown
            .record()
            .query(concat! {
                "
                update /* pg_idempotency: first visit */ idempotency.record
                set probes = $6::text::jsonb,
                    expires_at = greatest(expires_at, pg_catalog.statement_timestamp() + $7::interval)
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    -- The form of stored_time.
                    and lease_until = ($5::text::timestamp at time zone 'UTC')
                    and completed_at is null
                    and ", no_live_lease!(), "
                    and ", not_expired!(), "
                    -- A slow first visit would undo the probes of a faster one. As probes_count; Citus refuses to
                    -- convert a time of a column in an update.
                    and (probes ->> 'token'::text = token::text
                        and probes ->> 'lease_until'::text = $5::text
                        and pg_catalog.jsonb_path_query_array(probes, '$.of[*].step')
                            = coalesce(", steps_in_doubt!(), ", '[]'::jsonb)) is not true
                ",
            })
            .bind(self.shown.token) // $4
            .bind(&self.lease_until) // $5
            .bind(as_json(&probes)) // $6
            .bind(interval(retention)); // $7
        changes_a_row(conn, update).await
    }

    /// Writes the probes at `index`. Writes nothing if a probe has begun or ended since `seen` was read, or if the
    /// operation was decided. The next probe is due when the time `after` is over, and never if `after` is `None`. The
    /// record is remembered for the retention from now.
    pub(crate) async fn write_probe(
        &self,
        conn: &mut PgConnection,
        index: usize,
        seen: &ShownProbes,
        probes: &ShownProbes,
        after: Option<Duration>,
        retention: Duration,
    ) -> Result<bool, Error> {
        let update = self
            .shown
            .record()
            .query(concat! {
                "
                update /* pg_idempotency: write probe */ idempotency.record
                -- Citus refuses a column in jsonb_build_object, which is stable.
                set probes = pg_catalog.jsonb_set(
                        probes,
                        array['of', $6::text],
                        $8::text::jsonb || pg_catalog.jsonb_build_object(
                            'at', extract(epoch from pg_catalog.statement_timestamp()),
                            'next', extract(epoch from pg_catalog.statement_timestamp() + $9::interval)
                        )
                    ),
                    expires_at = greatest(expires_at, pg_catalog.statement_timestamp() + $10::interval)
                where scope = $1::text and operation = $2::text and value = $3::text
                    and token = $4::int8
                    -- The form of stored_time.
                    and lease_until = ($5::text::timestamp at time zone 'UTC')
                    and completed_at is null
                    and ", no_live_lease!(), "
                    and ", not_expired!(), "
                    -- As probes_count; Citus refuses to convert a time of a column in an update.
                    and (probes ->> 'token'::text = token::text
                        and probes ->> 'lease_until'::text = $5::text
                        and pg_catalog.jsonb_path_query_array(probes, '$.of[*].step')
                            = coalesce(", steps_in_doubt!(), ", '[]'::jsonb))
                    and probes -> 'of'::text -> $6::text::int4 ->> 'probes'::text = $7::int8::text
                    -- A probe that ends does not change the number. Its finding must not be overwritten unread.
                    and probes -> 'of'::text -> $6::text::int4 ->> 'finding'::text is not distinct from $11::text
                ",
            })
            .bind(self.shown.token) // $4
            .bind(&self.lease_until) // $5
            .bind(index.to_string()) // $6
            .bind(i64::from(seen.probes)) // $7
            .bind(as_json(probes)) // $8
            .bind(after.map(interval)) // $9
            .bind(interval(retention)) // $10
            .bind(seen.finding.map(Probed::as_str)); // $11
        changes_a_row(conn, update).await
    }
}
