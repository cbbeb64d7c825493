//! The table of one run, in a schema of its own.

use std::str::FromStr as _;
use std::time::Duration;

use anyhow::Context as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};

/// A duplicate that waits for its first request holds a connection for up to 5 seconds (the crate's default). Whoever
/// stands behind it must outlast that, or a storm of duplicates becomes a storm of 503s.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(6);

pub(crate) struct Schema {
    pub(crate) url: String,
    /// Eight hexadecimal digits, with which the run's authors begin.
    pub(crate) run: String,
}

impl Schema {
    fn name(&self) -> String {
        format!("chat_nonce_{}", self.run)
    }

    /// Connections that find the run's table without a schema's name. The crate's statements name theirs.
    pub(crate) async fn pool(&self, connections: u32) -> anyhow::Result<PgPool> {
        let options =
            PgConnectOptions::from_str(&self.url).context("DATABASE_URL is not the URL of a PostgreSQL database")?;
        // By the application's name the storm knows this run's connections.
        let options = options.application_name(&self.name()).options([("search_path", self.name())]);
        let pool = PgPoolOptions::new().max_connections(connections).acquire_timeout(ACQUIRE_LIMIT);
        pool.connect_with(options).await.context("cannot connect to the database")
    }

    pub(crate) async fn create(&self) -> anyhow::Result<()> {
        let pool = self.pool(1).await?;
        pg_idempotency::migrate(&pool).await?;
        // A proof, not a service: every statement is held to the rules of a record.
        sqlx::raw_sql(demos::STRICT).execute(&pool).await?;
        sqlx::raw_sql(AssertSqlSafe(format!("create schema {}", self.name()))).execute(&pool).await?;
        sqlx::raw_sql(
            "
            create table message (
                id uuid primary key,
                author text not null,
                content text not null,
                -- For the author's other devices. Not unique: it may come again, unenforced or once its window is over.
                nonce text,
                created_at timestamptz not null default now(),

                constraint nonce_length check (char_length(nonce) between 1 and 25)
            )
            ",
        )
        .execute(&pool)
        .await?;
        Ok(())
    }

    /// Never delete a record before its retention is over, except with the rows that it guards, as here.
    pub(crate) async fn drop(&self) -> anyhow::Result<()> {
        let pool = self.pool(1).await?;
        // A notice for what goes with it would reach the log; a demo that did not come to its end may hold its table.
        let settings = "set client_min_messages = warning; set lock_timeout = '5 s'";
        let sql = format!("{settings}; drop schema {} cascade", self.name());
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&pool).await?;
        sqlx::query("delete from idempotency.record where starts_with(scope, $1::text)")
            .bind(format!("{}-", self.run))
            .execute(&pool)
            .await?;
        Ok(())
    }
}
