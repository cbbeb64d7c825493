//! What an operator asks of the table, and the one row that they may delete by hand.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::Record;
use crate::{Error, Mode};

/// Sizes and counts that the server keeps anyway.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// Estimated, as of the last analyze or vacuum.
    pub(crate) records: f64,
    pub(crate) table_bytes: i64,
    pub(crate) index_bytes: i64,
    pub(crate) dead_rows: i64,
}

/// The records of one operation in one state and of one age.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) operation: String,
    pub(crate) state: String,
    pub(crate) age: i32,
    pub(crate) records: i64,
    pub(crate) oldest: DateTime<Utc>,
}

/// A record that waits for an operator.
#[derive(Clone, Debug)]
pub(crate) struct Unsettled {
    pub(crate) mode: Mode,
    pub(crate) state: String,
    pub(crate) scope: String,
    pub(crate) operation: String,
    pub(crate) value: String,
    pub(crate) token: i64,
    pub(crate) attempt: i32,
    pub(crate) claimed_at: DateTime<Utc>,
    pub(crate) expires_at: DateTime<Utc>,
    pub(crate) last_error: Option<String>,
}

/// All of a record but its response.
#[derive(Clone, Debug)]
pub(crate) struct Shown {
    pub(crate) mode: Mode,
    pub(crate) state: String,
    pub(crate) fingerprint: Option<Vec<u8>>,
    pub(crate) token: i64,
    pub(crate) attempt: i32,
    pub(crate) claimed_at: DateTime<Utc>,
    pub(crate) completed_at: Option<DateTime<Utc>>,
    pub(crate) expires_at: DateTime<Utc>,
    pub(crate) seconds_left: f64,
    pub(crate) lease_seconds_left: Option<f64>,
    pub(crate) response_bytes: Option<i32>,
    pub(crate) last_error: Option<String>,
}

pub(crate) async fn size(conn: &mut PgConnection) -> Result<Size, Error> {
    sqlx::query(
        "
        select
            greatest(sum(class.reltuples), 0)::float8 as records,
            sum(pg_catalog.pg_table_size(class.oid))::int8 as table_bytes,
            sum(pg_catalog.pg_indexes_size(class.oid))::int8 as index_bytes,
            coalesce(sum(stat.n_dead_tup), 0)::int8 as dead_rows
        from pg_catalog.pg_class as class
        left join pg_catalog.pg_stat_all_tables as stat on stat.relid = class.oid
        where class.oid = 'idempotency.record'::regclass
            or class.oid in (
                select tree.relid from pg_catalog.pg_partition_tree('idempotency.record'::regclass) as tree where tree.isleaf
            )
        ",
    )
    .persistent(false)
    .fetch_one(conn)
    .await
    .and_then(|row| {
        Ok(Size {
            records: row.try_get("records")?,
            table_bytes: row.try_get("table_bytes")?,
            index_bytes: row.try_get("index_bytes")?,
            dead_rows: row.try_get("dead_rows")?,
        })
    })
    .map_err(Error::of_statement)
}

/// Counts by operation, state and age, from this share of the table's pages in per cent. 100 reads all of it.
pub(crate) async fn groups(conn: &mut PgConnection, percent: f32) -> Result<Vec<Group>, Error> {
    let rows = sqlx::query(
        "
        select
            operation,
            case
                when expires_at <= pg_catalog.statement_timestamp()
                    and (lease_until is null or lease_until <= pg_catalog.statement_timestamp()) then 'expired'
                when mode = 'mark' then 'mark'
                when completed_at is not null then 'completed'
                when lease_until = '-infinity' then 'released'
                when lease_until > pg_catalog.statement_timestamp() then 'in_flight'
                when mode = 'at_least_once' then 'lapsed'
                else 'indeterminate'
            end as state,
            case
                when claimed_at > pg_catalog.statement_timestamp() - interval '1 minute' then 0
                when claimed_at > pg_catalog.statement_timestamp() - interval '1 hour' then 1
                when claimed_at > pg_catalog.statement_timestamp() - interval '1 day' then 2
                when claimed_at > pg_catalog.statement_timestamp() - interval '7 days' then 3
                else 4
            end as age,
            count(*) as records,
            min(claimed_at) as oldest
        from idempotency.record tablesample system ($1::float4)
        group by 1, 2, 3
        order by 1, 2, 3
        ",
    )
    .persistent(false)
    .bind(percent)
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    rows.iter()
        .map(|row| {
            Ok(Group {
                operation: row.try_get("operation")?,
                state: row.try_get("state")?,
                age: row.try_get("age")?,
                records: row.try_get("records")?,
                oldest: row.try_get("oldest")?,
            })
        })
        .collect::<sqlx::Result<_>>()
        .map_err(Error::of_statement)
}

/// The records that nobody will complete unless an operator settles them, oldest claim first: the indeterminate, and those
/// that were attempted this often. A comparison with null holds for none.
///
/// It reads the whole table: an index on what completion changes would end its heap-only updates.
pub(crate) async fn unsettled(
    conn: &mut PgConnection,
    limit: i64,
    max_attempts: Option<i32>,
) -> Result<Vec<Unsettled>, Error> {
    let rows = sqlx::query(
        "
        select
            mode, scope, operation, key, token, attempt, claimed_at, expires_at, last_error,
            case
                when lease_until = '-infinity' then 'released'
                when mode = 'at_least_once' then 'lapsed'
                else 'indeterminate'
            end as state
        from idempotency.record
        where completed_at is null
            and expires_at > pg_catalog.statement_timestamp()
            and (
                lease_until is null
                or (mode = 'at_most_once' and lease_until > '-infinity' and lease_until <= pg_catalog.statement_timestamp())
                or (mode in ('at_least_once', 'at_most_once')
                    and lease_until <= pg_catalog.statement_timestamp()
                    and attempt >= $2::int4)
            )
        order by claimed_at, scope, operation, key
        limit $1::int8
        ",
    )
    .persistent(false)
    .bind(limit)
    .bind(max_attempts)
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    rows.iter()
        .map(|row| {
            Ok(Unsettled {
                mode: mode(row)?,
                state: row.try_get("state")?,
                scope: row.try_get("scope")?,
                operation: row.try_get("operation")?,
                value: row.try_get("key")?,
                token: row.try_get("token")?,
                attempt: row.try_get("attempt")?,
                claimed_at: row.try_get("claimed_at")?,
                expires_at: row.try_get("expires_at")?,
                last_error: row.try_get("last_error")?,
            })
        })
        .collect::<sqlx::Result<_>>()
        .map_err(Error::of_statement)
}

impl Record<'_> {
    /// The record, without its response: that may be large, and nobody's business.
    pub(crate) async fn show(self, conn: &mut PgConnection) -> Result<Option<Shown>, Error> {
        let row = self
            .query(
                "
                select
                    mode, fingerprint, token, attempt, claimed_at, completed_at, expires_at, last_error,
                    pg_catalog.octet_length(response_body) as response_bytes,
                    extract(epoch from expires_at - pg_catalog.statement_timestamp())::float8 as seconds_left,
                    case when lease_until > pg_catalog.statement_timestamp()
                        then extract(epoch from lease_until - pg_catalog.statement_timestamp())::float8
                    end as lease_seconds_left,
                    case
                        when expires_at <= pg_catalog.statement_timestamp()
                            and (lease_until is null or lease_until <= pg_catalog.statement_timestamp()) then 'expired'
                        when mode = 'mark' then 'mark'
                        when completed_at is not null then 'completed'
                        when lease_until = '-infinity' then 'released'
                        when lease_until > pg_catalog.statement_timestamp() then 'in_flight'
                        when mode = 'at_least_once' then 'lapsed'
                        else 'indeterminate'
                    end as state
                from idempotency.record
                where scope = $1::text and operation = $2::text and key = $3::text
                ",
            )
            .fetch_optional(conn)
            .await
            .map_err(Error::of_statement)?;
        row.map(|row| {
            Ok(Shown {
                mode: mode(&row)?,
                state: row.try_get("state")?,
                fingerprint: row.try_get("fingerprint")?,
                token: row.try_get("token")?,
                attempt: row.try_get("attempt")?,
                claimed_at: row.try_get("claimed_at")?,
                completed_at: row.try_get("completed_at")?,
                expires_at: row.try_get("expires_at")?,
                seconds_left: row.try_get("seconds_left")?,
                lease_seconds_left: row.try_get("lease_seconds_left")?,
                response_bytes: row.try_get("response_bytes")?,
                last_error: row.try_get("last_error")?,
            })
        })
        .transpose()
        .map_err(Error::of_statement)
    }

    /// Deletes the record that was shown with this token, unless it is under a live lease.
    pub(crate) async fn forget(self, conn: &mut PgConnection, token: i64) -> Result<bool, Error> {
        let deleted = self
            .query(
                "
                delete from idempotency.record
                where scope = $1::text and operation = $2::text and key = $3::text
                    and token = $4::int8
                    and (lease_until is null or lease_until <= pg_catalog.statement_timestamp())
                ",
            )
            .bind(token)
            .execute(conn)
            .await
            .map_err(Error::of_statement)?;
        Ok(deleted.rows_affected() == 1)
    }
}

fn mode(row: &PgRow) -> sqlx::Result<Mode> {
    let mode: &str = row.try_get("mode")?;
    Mode::from_column(mode)
        .map_err(|_| sqlx::Error::Decode(format!("unknown mode {mode:?} in idempotency.record").into()))
}
