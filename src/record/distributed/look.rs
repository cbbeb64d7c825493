//! Looking at the record on a distributed table: the columns from the worker, the time and the lock from the
//! coordinator.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use super::coordinator::{ask, pass_on_lock_timeout};
use crate::Error;
use crate::record::look::{Found, Look, Standing, columns};
use crate::record::statement::Record;

/// As [`Record::look`].
pub(crate) async fn look(
    record: Record<'_>,
    conn: &mut PgConnection,
    asked: Option<DateTime<Utc>>,
    waited: Duration,
) -> Result<Look, Error> {
    let row = record
        .query(concat! {
            "
            select /* pg_idempotency: look */ ", columns!(), "
            from idempotency.record
            where scope = $1::text and operation = $2::text and value = $3::text
            ",
        })
        .fetch_optional(&mut *conn)
        .await
        .map_err(Error::of_statement)?;
    let coordinator = ask(record, conn, row.is_none()).await?;
    if row.is_none() && coordinator.has_lock_timeout {
        // The claim that follows waits in its insert for a transaction in doubt that has inserted the key.
        pass_on_lock_timeout(conn).await?;
    }
    let asked = coordinator.now.when_asked(asked, waited);
    let standing = match (row, coordinator.mine) {
        (Some(row), _) => Standing::Found(Found::at(&row, asked, &coordinator.now).map_err(Error::of_statement)?),
        (None, Some(true)) => Standing::Free,
        (None, _) => Standing::Held,
    };
    // The transaction began with the check, so nobody asks for its age.
    Ok(Look { asked, age: Duration::ZERO, standing })
}
