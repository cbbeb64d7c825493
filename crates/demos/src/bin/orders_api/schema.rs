//! The tables of one run, in a schema of its own.

use std::str::FromStr as _;
use std::time::Duration;

use anyhow::Context as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};

/// Nobody holds a connection while he waits for another, so this is about a database that is away.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(5);

pub(crate) struct Schema {
    pub(crate) url: String,
    /// Eight hexadecimal digits, with which the run's passengers begin.
    pub(crate) run: String,
}

impl Schema {
    fn name(&self) -> String {
        format!("orders_api_{}", self.run)
    }

    /// Connections that find the run's tables without a schema's name. The crate's statements name theirs.
    pub(crate) async fn pool(&self, connections: u32) -> anyhow::Result<PgPool> {
        let options =
            PgConnectOptions::from_str(&self.url).context("DATABASE_URL is not the URL of a PostgreSQL database")?;
        // By the application's name the client knows this run's connections.
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
            create table passenger (
                name text primary key,
                token text not null unique,
                revoked boolean not null default false,
                phone text not null,
                -- Counts the changes to the passenger's list of orders: its ETag.
                list_version bigint not null default 0,
                completed_rides bigint not null default 0
            );
            create table taxi_order (
                number bigint generated always as identity,
                id uuid primary key,
                passenger text not null references passenger,
                destination text not null,
                state text not null,

                constraint state_is_known check (state in ('ordered', 'cancelled', 'completed'))
            );
            ",
        )
        .execute(&pool)
        .await?;
        Ok(())
    }

    /// Never delete a record before its retention is over, except with the rows that it guards, as here.
    pub(crate) async fn drop(&self) -> anyhow::Result<()> {
        let pool = self.pool(1).await?;
        // A notice for what goes with it would reach the log; a story that did not come to its end may hold its tables.
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
