//! The connection to the database. An error contains the reason why the connection failed.

use std::str::FromStr as _;
use std::time::Duration;

use pg_idempotency::Key;
use pg_idempotency::operator::{self, Shown, bounded};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgConnection, PgPool};
use tokio::time::timeout;

use crate::failure::{Failure, of_connecting};

/// How long the server may take to accept a connection. With a longer limit, cron could start the next command before
/// the answer.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a command waits for a statement that normally takes only a moment.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);
/// How long a command waits for a statement that reads the whole table, or for migrations that another process runs.
/// After this time, the network counts as lost. Without a limit, cron would start the next command beside this command.
pub(crate) const LONG_ANSWER: Duration = Duration::from_secs(600);

/// Waits for an answer of the library, and closes the connection if no answer comes within `limit`.
pub(crate) async fn ask<R, E: Into<Failure>>(
    limit: Duration,
    work: impl Future<Output = Result<R, E>>,
) -> Result<R, Failure> {
    bounded(limit, async { work.await.map_err(Into::into) }).await
}

/// Reads the record of this key.
pub(crate) async fn look(pool: &PgPool, key: &Key) -> Result<Shown, Failure> {
    ask(ANSWER, operator::show(pool, key)).await?.ok_or(Failure::NoRecord)
}

#[derive(Clone)]
pub(crate) struct Database {
    url: Option<String>,
}

impl Database {
    pub(crate) fn new(url: Option<String>) -> Self {
        Self { url }
    }

    fn options(&self) -> Result<PgConnectOptions, Failure> {
        let url = self.url.as_deref().ok_or(Failure::NoDatabase)?;
        // sqlx takes every scheme, and reads the URL `jdbc:postgresql://host/db` as one without a host. A fragment is
        // the rest of a password that was not percent-encoded.
        let is_of_postgres = ["postgres://", "postgresql://"]
            .iter()
            .any(|start| url.get(..start.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(start)));
        if !is_of_postgres || url.contains('#') {
            return Err(Failure::MalformedUrl);
        }
        // The error of sqlx is dropped, because its text may quote the malformed URL with its password.
        let options = PgConnectOptions::from_str(url).map_err(|_| Failure::MalformedUrl)?;
        Ok(options.application_name("idempotency-janitor"))
    }

    pub(crate) async fn connect(&self) -> Result<PgConnection, Failure> {
        match timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&self.options()?)).await {
            Ok(connected) => connected.map_err(of_connecting),
            Err(_) => Err(Failure::Silence(CONNECT_TIMEOUT)),
        }
    }

    /// A pool of one connection. A pool that cannot connect reports only a time-out. Therefore, this function first
    /// opens a connection without a pool, and reports its error.
    pub(crate) async fn pool(&self) -> Result<PgPool, Failure> {
        let closing = self.connect().await?.close();
        timeout(CONNECT_TIMEOUT, closing)
            .await
            .map_err(|_| Failure::Silence(CONNECT_TIMEOUT))?
            .map_err(Failure::Connection)?;
        self.patient_pool()
    }

    /// A pool of one connection for a daemon, which may start before its database.
    pub(crate) fn patient_pool(&self) -> Result<PgPool, Failure> {
        self.pool_of(1, CONNECT_TIMEOUT)
    }

    /// A pool that connects when it is first used. A caller waits for a connection for at most `patience`.
    pub(crate) fn pool_of(&self, connections: u32, patience: Duration) -> Result<PgPool, Failure> {
        let pool = PgPoolOptions::new().max_connections(connections).acquire_timeout(patience);
        Ok(pool.connect_lazy_with(self.options()?))
    }
}
