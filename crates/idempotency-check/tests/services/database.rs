//! A database for one check.

use std::sync::atomic::{AtomicU32, Ordering};

use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use url::Url;

/// The payments, and the keys of the services that keep them by hand.
pub(crate) const TABLES: &str = include_str!("tables.sql");

pub(crate) struct Database {
    server: Url,
    name: String,
}

impl Database {
    /// From `template0`: the packages send SQL that this repository's hostile operators in `public` would break.
    pub(crate) async fn create(tables: &'static str) -> anyhow::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let server = Url::parse(&std::env::var("DATABASE_URL")?)?;
        let name = format!("check_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let mut conn = PgConnection::connect(server.as_str()).await?;
        conn.execute(AssertSqlSafe(format!("create database {name} template template0"))).await?;
        let database = Self { server, name };
        PgConnection::connect(&database.url()).await?.execute(tables).await?;
        Ok(database)
    }

    pub(crate) fn url(&self) -> String {
        let mut url = self.server.clone();
        url.set_path(&self.name);
        url.into()
    }

    /// Of the record with this value.
    pub(crate) async fn fingerprint(&self, value: &str) -> sqlx::Result<Vec<u8>> {
        let mut conn = PgConnection::connect(&self.url()).await?;
        let select = "select fingerprint from idempotency.record where value = $1::text";
        sqlx::query_scalar(select).bind(value).fetch_one(&mut conn).await
    }

    pub(crate) async fn drop(self) -> anyhow::Result<()> {
        let mut conn = PgConnection::connect(self.server.as_str()).await?;
        conn.execute(AssertSqlSafe(format!("drop database {} with (force)", self.name))).await?;
        Ok(())
    }
}
