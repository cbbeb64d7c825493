//! Deleting expired records of a distributed table.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{Executor as _, PgConnection, Row as _};

use crate::Error;
use crate::record::fragment::{expired_at, readable_place};
use crate::record::statement::interval;
use crate::record::sweep::{Deleted, could_be_retried};

/// As [`sweep`](crate::record::sweep()), for Citus, which refuses `ctid` and `for update skip locked`. It deletes
/// everything that is due up to the `expires_at` of the `limit`th record.
///
/// Records that share this `expires_at` are deleted together, so it may delete some more. It waits for a record that
/// another transaction has locked, for at most a second (SQLSTATE 55P03). The owner may have prolonged that record
/// meanwhile, so PostgreSQL then checks the same condition against the new version of the row.
pub(crate) async fn sweep(
    conn: &mut PgConnection,
    limit: u32,
    since: Option<DateTime<Utc>>,
    grace: Duration,
) -> Result<Deleted, Error> {
    conn.execute("set local citus.propagate_set_commands = 'local'; set local lock_timeout = '1s'")
        .await
        .map_err(Error::of_statement)?;
    let rows = sqlx::query(concat! {
        "
        delete /* pg_idempotency: sweep */ from idempotency.record
        where ", expired_at!("pg_catalog.statement_timestamp() - $3::interval"), "
            and expires_at >= coalesce($2::timestamptz, '-infinity')
            and expires_at <= (
                select max(due.expires_at)
                from (
                    select expires_at
                    from idempotency.record
                    where ", expired_at!("pg_catalog.statement_timestamp() - $3::interval"), "
                        and expires_at >= coalesce($2::timestamptz, '-infinity')
                    order by expires_at
                    limit $1::int8
                ) as due
            )
        returning
            mode = 'mark' as marks,
            mode <> 'mark' and completed_at is not null as completed,
            ", could_be_retried!(), " is true as retried,
            ", readable_place!("expires_at"), " as expires_at
        ",
    })
    .persistent(false)
    .bind(i64::from(limit)) // $1
    .bind(since) // $2
    .bind(interval(grace)) // $3
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    let mut deleted = Deleted::default();
    for row in rows {
        deleted.until = deleted.until.max(row.try_get("expires_at")?);
        match (row.try_get("marks")?, row.try_get("completed")?, row.try_get("retried")?) {
            (true, ..) => deleted.marks += 1,
            (_, true, _) => deleted.completed += 1,
            (.., true) => deleted.unfinished += 1,
            _ => deleted.indeterminate += 1,
        }
    }
    Ok(deleted)
}
