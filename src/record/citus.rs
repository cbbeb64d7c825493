//! Where Citus keeps the table. These statements are plain SQL, because a server without Citus has none of these
//! catalogs and functions.

use sqlx::postgres::PgRow;
use sqlx::{Executor as _, PgConnection, Row as _};

use super::table::{self, Size};
use crate::Error;

/// Where Citus keeps the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// An ordinary table, of a database without Citus, or without distributed tables.
    Plain,
    /// An ordinary table, beside distributed tables. A transaction that writes both does not commit both together.
    Beside,
    /// A Citus local table on this node, which is the coordinator.
    Coordinator,
    /// A table on the workers, or a connection to a worker. `idempotency.is_plain` refuses every call.
    Worker,
}

pub(crate) async fn placement(conn: &mut PgConnection) -> Result<Placement, Error> {
    if !has_citus(conn).await? {
        return Ok(Placement::Plain);
    }
    // The conditions are those of `idempotency.is_plain`.
    let row = conn
        .fetch_one(sqlx::raw_sql(
            "
            select /* pg_idempotency: placement */
                (
                    select partmethod = 'n' and repmodel = 's' and colocationid = 0
                    from pg_catalog.pg_dist_partition where logicalrelid::oid = 'idempotency.record'::regclass::oid
                ) as is_local,
                exists (select from pg_catalog.pg_dist_local_group where groupid <> 0) as on_worker,
                exists (
                    select from pg_catalog.pg_dist_partition
                    where not (partmethod = 'n' and repmodel = 's' and colocationid = 0)
                ) as beside
            ",
        ))
        .await
        .map_err(Error::of_statement)?;
    Ok(match (row.try_get("is_local")?, row.try_get("on_worker")?, row.try_get("beside")?) {
        (None, _, false) => Placement::Plain,
        (None, _, true) => Placement::Beside,
        (Some(true), false, _) => Placement::Coordinator,
        (Some(_), _, _) => Placement::Worker,
    })
}

async fn has_citus(conn: &mut PgConnection) -> Result<bool, Error> {
    let extension = "select /* pg_idempotency: has citus */ from pg_catalog.pg_extension where extname = 'citus'";
    conn.fetch_optional(sqlx::raw_sql(extension)).await.map(|row| row.is_some()).map_err(Error::of_statement)
}

/// Reads the sizes and counts that the server keeps.
pub(crate) async fn size(conn: &mut PgConnection) -> Result<Size, Error> {
    match placement(conn).await? {
        Placement::Coordinator => size_of_shard(conn).await,
        _ => table::size(conn).await,
    }
}

/// The sizes of a Citus local table. The table itself is empty, because its only shard
/// has the rows, and Citus hides the shard from a reader of `pg_class`.
async fn size_of_shard(conn: &mut PgConnection) -> Result<Size, Error> {
    let size = sqlx::raw_sql(
        "
        select /* pg_idempotency: size */
            pg_catalog.pg_stat_get_live_tuples(shard.oid)::float8 as records,
            pg_catalog.citus_table_size('idempotency.record') as table_bytes,
            pg_catalog.citus_total_relation_size('idempotency.record')
                - pg_catalog.citus_table_size('idempotency.record') as index_bytes,
            pg_catalog.pg_stat_get_dead_tuples(shard.oid) as dead_rows
        from (
            select pg_catalog.to_regclass(pg_catalog.shard_name(logicalrelid, shardid))::oid as oid
            from pg_catalog.pg_dist_shard
            where logicalrelid::oid = 'idempotency.record'::regclass::oid
        ) as shard
        ",
    );
    let row: PgRow = conn.fetch_one(size).await.map_err(Error::of_statement)?;
    Size::of(&row).map_err(Error::of_statement)
}
