//! Compares the rights of the current role with those of the roles in the guide's page `production`.

use sqlx::PgConnection;

use crate::Error;

/// Returns the rights that the current role lacks for each of the roles in the guide. Returns `None` if the role has
/// all rights of one of these roles. Also returns `None` for a role that may only read, because its calls fail before
/// they have an effect.
///
/// A right on each column is as good as a right on the table. To lock a row, as a sweep does, PostgreSQL demands UPDATE
/// on one column.
pub(crate) async fn missing_rights(conn: &mut PgConnection) -> Result<Option<String>, Error> {
    let (selects, inserts, updates, locks, deletes, writes): (bool, bool, bool, bool, bool, bool) = sqlx::query_as(
        "
        select /* pg_idempotency: rights */
            pg_catalog.bool_and(pg_catalog.has_column_privilege(attrelid, attnum, 'SELECT')) as selects,
            pg_catalog.bool_and(pg_catalog.has_column_privilege(attrelid, attnum, 'INSERT')) as inserts,
            pg_catalog.bool_and(pg_catalog.has_column_privilege(attrelid, attnum, 'UPDATE')) as updates,
            pg_catalog.bool_or(pg_catalog.has_column_privilege(attrelid, attnum, 'UPDATE')) as locks,
            pg_catalog.bool_and(pg_catalog.has_table_privilege(attrelid, 'DELETE')) as deletes,
            pg_catalog.bool_or(pg_catalog.has_column_privilege(attrelid, attnum, 'INSERT, UPDATE')
                or pg_catalog.has_table_privilege(attrelid, 'DELETE')) as writes
        from pg_catalog.pg_attribute
        where attrelid = 'idempotency.record'::regclass::oid and attnum > 0::int2 and not attisdropped
        ",
    )
    .persistent(false)
    .fetch_one(conn)
    .await
    .map_err(Error::of_statement)?;
    let (select, delete) = (("SELECT", selects), ("DELETE", deletes));
    let (insert, update) = (("INSERT", inserts), ("UPDATE", updates));
    let lock = ("UPDATE (last_error)", locks);
    let lacking = [
        ("a service", &[select, insert, update][..]),
        ("a janitor", &[select, delete, lock]),
        ("an operator", &[select, update, delete]),
    ]
    .map(|(kind, rights)| {
        let lacking: Vec<_> = rights.iter().filter(|(_, has)| !has).map(|(right, _)| *right).collect();
        (kind, lacking)
    });
    let is_complete = lacking.iter().any(|(_, lacking)| lacking.is_empty());
    let texts = lacking.map(|(kind, lacking)| format!("it lacks {} for {kind}", lacking.join(" and ")));
    Ok((writes && !is_complete).then(|| texts.join(", ")))
}
