//! Deleting what is past its retention.

use sqlx::{PgConnection, Row};

use crate::Error;

/// What one batch deleted, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) completed: u64,
    pub(crate) unfinished: u64,
    pub(crate) marks: u64,
}

impl Batch {
    pub(crate) fn rows(&self) -> u64 {
        self.completed + self.unfinished + self.marks
    }
}

/// Deletes at most `limit` records that are past their retention and under no live lease, oldest first.
///
/// Rows that somebody is taking over are skipped, and the predicate stands outside once more: the row version that is
/// deleted is judged, not the one that was selected. By `ctid` and an array, because `in (select … limit)` may run the
/// select once for each outer row, and then deletes more than the limit.
pub(crate) async fn sweep(conn: &mut PgConnection, limit: u32) -> Result<Batch, Error> {
    sqlx::query(
        "
        with deleted as (
            delete from idempotency.record
            where ctid = any (array(
                    select ctid
                    from idempotency.record
                    where expires_at <= statement_timestamp()
                        and (lease_until is null or lease_until <= statement_timestamp())
                    order by expires_at
                    limit $1::int8
                    for update skip locked
                ))
                and expires_at <= statement_timestamp()
                and (lease_until is null or lease_until <= statement_timestamp())
            returning mode, completed_at
        )
        select
            count(*) filter (where mode <> 'mark' and completed_at is not null) as completed,
            count(*) filter (where completed_at is null) as unfinished,
            count(*) filter (where mode = 'mark') as marks
        from deleted
        ",
    )
    .persistent(false)
    .bind(i64::from(limit))
    .fetch_one(conn)
    .await
    .and_then(|row| {
        let count = |column| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
        Ok(Batch { completed: count("completed")?, unfinished: count("unfinished")?, marks: count("marks")? })
    })
    .map_err(Error::of_statement)
}
