//! Where the table of effects is.

use sqlx::Executor as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

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
    pub(crate) async fn distribute(self, options: &PgConnectOptions) -> anyhow::Result<()> {
        // One connection, so that all statements see the setting.
        let pool = PgPoolOptions::new().max_connections(1).connect_with(options.clone()).await?;
        pool.execute(SHARDS).await?;
        pg_idempotency::distribute(&pool).await?;
        let place = match self {
            Self::BesideTheKeys => {
                "select create_distributed_table('effect', 'key', colocate_with => 'idempotency.record')"
            }
            Self::LocalToCitus => "select citus_add_local_table_to_metadata('effect')",
            Self::Plain => return Ok(()),
        };
        pool.execute(place).await?;
        Ok(())
    }
}
