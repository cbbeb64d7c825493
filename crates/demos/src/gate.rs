//! Stops a service in the middle of its work: the key is claimed, and the handler's own statement waits.

use std::time::Duration;

use sqlx::{AssertSqlSafe, PgPool, Postgres, Transaction};
use tokio::time::sleep;

const LOOK: Duration = Duration::from_millis(5);

pub struct Gate {
    transaction: Transaction<'static, Postgres>,
    pool: PgPool,
}

impl Gate {
    /// From now on, every statement of the run that writes to this table waits.
    pub async fn shut(pool: &PgPool, table: &str) -> sqlx::Result<Self> {
        let mut transaction = pool.begin().await?;
        let lock = format!("lock table {table} in share mode");
        sqlx::query(AssertSqlSafe(lock)).execute(&mut *transaction).await?;
        Ok(Self { transaction, pool: pool.clone() })
    }

    /// Returns when this many of the run's connections wait at the gate, or for one that does.
    pub async fn reached_by(&self, connections: i64) -> sqlx::Result<()> {
        let waiting = "
            select count(*)
            from pg_stat_activity
            where application_name = current_setting('application_name') and wait_event_type = 'Lock'
        ";
        while sqlx::query_scalar::<_, i64>(waiting).fetch_one(&self.pool).await? < connections {
            sleep(LOOK).await;
        }
        Ok(())
    }

    pub async fn open(self) -> sqlx::Result<()> {
        self.transaction.rollback().await
    }
}
