//! The tables of one run, in a schema of their own, because the database may contain those of other runs.

use std::str::FromStr as _;
use std::time::Duration;

use anyhow::Context as _;
use pg_idempotency::OnEscape;
use rig::strict;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool, Postgres, Transaction};
use uuid::Uuid;

use crate::books::Books;
use crate::escape;

/// A duplicate that waits for its first request holds a connection for up to 5 seconds, the crate's default. A request
/// behind it must wait longer than that, or a storm of duplicates becomes a storm of 503s.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(10);

pub struct Schema {
    url: String,
    program: &'static str,
    /// Eight hexadecimal digits, or `served`. The scopes of the run's keys begin with them.
    pub run: String,
    /// The tables that only idempotent operations write. The database refuses every other write.
    protected: Vec<String>,
}

impl Schema {
    pub(crate) async fn create(url: String, program: &'static str, tables: &'static str) -> anyhow::Result<Self> {
        Self::of_run(url, program, &Uuid::new_v4().simple().to_string().split_off(24)).created(tables).await
    }

    /// The tables of a service that is checked from outside: a second start of its process finds them.
    pub(crate) async fn served(url: String, program: &'static str, tables: &'static str) -> anyhow::Result<Self> {
        let schema = Self::of_run(url, program, "served");
        let exists = "select exists (select from pg_namespace where nspname::text = $1::text)";
        let exists: bool = sqlx::query_scalar(exists).bind(schema.name()).fetch_one(&schema.pool(1).await?).await?;
        if exists { Ok(schema) } else { schema.created(tables).await }
    }

    async fn created(mut self, tables: &'static str) -> anyhow::Result<Self> {
        let schema = &mut self;
        let pool = schema.pool(1).await?;
        pg_idempotency::migrate(&pool).await?;
        // Every statement of a demo has to keep the rules of a record.
        sqlx::raw_sql(strict::SQL).execute(&pool).await?;
        let Self { run, .. } = &*schema;
        let schema_and_records = format!(
            "
            create schema {name};
            -- The records of the run's keys.
            create view {name}.records as
            select * from idempotency.record where starts_with(scope, '{run}');
            ",
            name = schema.name(),
        );
        sqlx::raw_sql(AssertSqlSafe(schema_and_records)).execute(&pool).await?;
        sqlx::raw_sql(tables).execute(&pool).await?;
        let names = "
            select relname::text
            from pg_class
            where relnamespace = current_schema()::regnamespace::oid and relkind = 'r'
            order by relname
        ";
        schema.protected = sqlx::query_scalar(names).fetch_all(&pool).await?;
        for table in &schema.protected {
            pg_idempotency::protect(&pool, table, OnEscape::Refuse).await?;
        }
        escape::log(&pool, &schema.protected).await?;
        Ok(self)
    }

    pub(crate) fn of_run(url: String, program: &'static str, run: &str) -> Self {
        Self { url, program, run: run.to_owned(), protected: Vec::new() }
    }

    fn name(&self) -> String {
        format!("{}_{}", self.program, self.run)
    }

    /// The name of a user, a sender or a queue of this run: the scope of their keys.
    pub fn scope(&self, name: &str) -> String {
        format!("{}-{name}", self.run)
    }

    /// Connections that find the run's tables without a schema's name. The crate's statements name its own schema.
    pub async fn pool(&self, connections: u32) -> anyhow::Result<PgPool> {
        let options =
            PgConnectOptions::from_str(&self.url).context("DATABASE_URL is not the URL of a PostgreSQL database")?;
        // A gate finds the run's connections by their application name.
        let options =
            options.application_name(&self.name()).options([("search_path", format!("{}, public", self.name()))]);
        let pool = PgPoolOptions::new().max_connections(connections).acquire_timeout(ACQUIRE_LIMIT);
        pool.connect_with(options).await.context("cannot connect to the database")
    }

    pub(crate) async fn check_protected(&self, books: &mut Books) -> anyhow::Result<()> {
        if self.protected.is_empty() {
            return Ok(());
        }
        Ok(escape::check(&self.pool(1).await?, books).await?)
    }

    /// Never delete a record before its retention is over, except together with the rows that it guards, as here.
    pub(crate) async fn drop(&self) -> anyhow::Result<()> {
        let pool = self.pool(1).await?;
        // A demo that did not end may still hold locks on its tables. The notices would only fill the log.
        let sql = format!(
            "
            set client_min_messages = warning;
            set lock_timeout = '5 s';
            delete from idempotency.record where starts_with(scope, '{}');
            drop schema {} cascade;
            ",
            self.run,
            self.name(),
        );
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&pool).await?;
        Ok(())
    }
}

/// Begins a transaction that may write protected tables outside an idempotent operation.
pub async fn begin_exempt(pool: &PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
    let mut tx = pool.begin().await?;
    sqlx::query("set local idempotency.claim = 'exempt'").execute(&mut *tx).await?;
    Ok(tx)
}

/// The result of a query for one number.
pub async fn count(pool: &PgPool, sql: &'static str) -> sqlx::Result<i64> {
    sqlx::query_scalar(sql).fetch_one(pool).await
}
