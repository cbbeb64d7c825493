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

    /// Returns when one of the run's connections waits at the gate.
    pub async fn reached(&self) -> sqlx::Result<()> {
        let waits = "
            select exists (
                select from pg_stat_activity
                where application_name = current_setting('application_name') and wait_event_type = 'Lock'
            )
        ";
        while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&self.pool).await? {
            sleep(LOOK).await;
        }
        Ok(())
    }

    pub async fn open(self) -> sqlx::Result<()> {
        self.transaction.rollback().await
    }
}
