//! Where the table of effects is.

use sqlx::{Executor as _, PgConnection};

/// Each shard of the one table that a world writes is on one worker. With few of them, both workers still have some.
const SHARDS: &str = "set citus.shard_count = 4";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effects {
    /// Distributed by the scope, so that a call is one transaction on one worker.
    BesideTheKeys,
    /// On the coordinator, and in the metadata of Citus.
    LocalToCitus,
    /// A plain table of the coordinator, which Citus does not know.
    Plain,
}

impl Effects {
    pub(crate) async fn distribute(self, conn: &mut PgConnection) -> anyhow::Result<()> {
        conn.execute(SHARDS).await?;
        pg_idempotency::distribute(conn).await?;
        let place = match self {
            Self::BesideTheKeys => {
                "select create_distributed_table('effect', 'key', colocate_with => 'idempotency.record')"
            }
            Self::LocalToCitus => "select citus_add_local_table_to_metadata('effect')",
            Self::Plain => return Ok(()),
        };
        conn.execute(place).await?;
        Ok(())
    }
}
