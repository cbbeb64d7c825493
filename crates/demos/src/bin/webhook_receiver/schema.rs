//! The tables of one run, in a schema of their own.

use std::str::FromStr as _;

use anyhow::Context as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};

pub(crate) struct Schema {
    pub(crate) url: String,
    /// Eight hexadecimal digits.
    pub(crate) run: String,
}

impl Schema {
    fn name(&self) -> String {
        format!("webhook_receiver_{}", self.run)
    }

    /// The scope of the run's keys.
    pub(crate) fn sender(&self) -> String {
        format!("webhook-sender-{}", self.run)
    }

    /// Connections that find the run's tables without a schema's name. The crate's statements name theirs.
    pub(crate) async fn pool(&self, connections: u32) -> anyhow::Result<PgPool> {
        let options =
            PgConnectOptions::from_str(&self.url).context("DATABASE_URL is not the URL of a PostgreSQL database")?;
        // By the application's name the demo knows this run's connections.
        let options = options.application_name(&self.name()).options([("search_path", self.name())]);
        let pool = PgPoolOptions::new().max_connections(connections);
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

    /// Never delete a record before its retention is over, except with the rows that it guards, as here.
    pub(crate) async fn drop(&self) -> anyhow::Result<()> {
        let pool = self.pool(1).await?;
        // A notice for what goes with it would reach the log; a demo that did not come to its end may hold its tables.
        let settings = "set client_min_messages = warning; set lock_timeout = '5 s'";
        let sql = format!("{settings}; drop schema {} cascade", self.name());
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&pool).await?;
        sqlx::query("delete from idempotency.record where scope = $1::text").bind(self.sender()).execute(&pool).await?;
        Ok(())
    }
}

const TABLES: &str = "
    -- Nothing is unique in it: the mark alone decides, and a second one would be counted.
    create table account_event (
        number bigint generated always as identity primary key,
        event_id text not null,
        account_id text not null,
        amount bigint not null
    );

    create table account (
        id text primary key,
        balance bigint not null
    ) with (
        -- A balance changes all the time, and finds room in its page.
        fillfactor = 50
    );
";
