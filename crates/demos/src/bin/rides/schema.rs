//! The tables of one run, in a schema of their own.

use std::str::FromStr as _;
use std::time::Duration;

use anyhow::Context as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};

/// This is how late the error comes when nothing listens on the database's port.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(10);

/// No unique constraints: only the steps prevent a second row.
pub(crate) const TABLES: &str = "
    create table ride (
        number bigint generated always as identity primary key,
        phone text not null,
        origin text not null,
        destination text not null
    );
    create table receipt (ride bigint not null, charge bigint not null);
";

pub(crate) struct Schema {
    pub(crate) url: String,
    /// Eight hexadecimal digits, in the name of the operation too.
    pub(crate) run: String,
}

impl Schema {
    pub(crate) fn operation(&self) -> String {
        format!("POST /rides {}", self.run)
    }

    fn name(&self) -> String {
        format!("rides_{}", self.run)
    }

    /// Connections that find the run's tables without a schema's name. The crate's statements name theirs.
    pub(crate) async fn pool(&self, connections: u32) -> anyhow::Result<PgPool> {
        let options =
            PgConnectOptions::from_str(&self.url).context("DATABASE_URL is not the URL of a PostgreSQL database")?;
        let options = options.options([("search_path", self.name())]);
        let pool = PgPoolOptions::new().max_connections(connections).acquire_timeout(ACQUIRE_LIMIT);
        pool.connect_with(options).await.context("cannot connect to the database")
    }

    pub(crate) async fn create(&self) -> anyhow::Result<()> {
        let pool = self.pool(1).await?;
        pg_idempotency::migrate(&pool).await?;
        // A proof, not a service: every statement is held to the rules of a record.
        sqlx::raw_sql(demos::STRICT).execute(&pool).await?;
        sqlx::raw_sql(AssertSqlSafe(format!("create schema {}", self.name()))).execute(&pool).await?;
        sqlx::raw_sql(TABLES).execute(&pool).await?;
        Ok(())
    }

    pub(crate) async fn drop(&self) -> anyhow::Result<()> {
        let pool = self.pool(1).await?;
        // A notice for what goes with it would reach the log.
        let sql = format!("set client_min_messages = warning; drop schema {} cascade", self.name());
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&pool).await?;
        Ok(())
    }
}
