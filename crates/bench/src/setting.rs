//! How the server is reached, and how durable its commits are.

use std::path::PathBuf;
use std::time::Duration;

use rig::proxy::{Proxy, through};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgConnection, PgPool};

use crate::delay;
use crate::redis::Address;
use crate::results::{NOT_DURABLE, SOCKET};

#[derive(Clone)]
pub(crate) struct Setting {
    synchronous: bool,
    pub(crate) rtt: Option<Duration>,
    server: PgConnectOptions,
    pub(crate) redis: Option<Address>,
}

impl Setting {
    /// On the Unix socket.
    pub(crate) fn local(server: &PgConnectOptions, redis: Option<&Address>, synchronous: bool) -> Self {
        Self { synchronous, rtt: None, server: with_commits(server.clone(), synchronous), redis: redis.cloned() }
    }

    /// The same, with each round trip this much longer.
    pub(crate) fn far(self, rtt: Duration) -> anyhow::Result<Self> {
        let server = through(&self.server, delay::before(&socket(&self.server)?, rtt)?);
        let redis = match self.redis {
            Some(Address::Socket(path)) => Some(Address::Port(delay::before(&path, rtt)?)),
            other => other,
        };
        Ok(Self { server: with_commits(server, self.synchronous), redis, rtt: Some(rtt), ..self })
    }

    /// The same, with the round trips counted.
    pub(crate) async fn counted(self) -> anyhow::Result<(Self, Proxy)> {
        let proxy = Proxy::before(&self.server).await?;
        Ok((Self { server: with_commits(proxy.options.clone(), self.synchronous), ..self }, proxy))
    }

    /// The column of the setting in the tables.
    pub(crate) fn column(&self) -> String {
        match (self.rtt, self.synchronous) {
            (Some(rtt), _) => format!("{} ms a round trip", rtt.as_secs_f64() * 1e3),
            (None, true) => SOCKET.to_owned(),
            (None, false) => NOT_DURABLE.to_owned(),
        }
    }

    pub(crate) async fn connect(&self, database: Option<&str>) -> sqlx::Result<PgConnection> {
        PgConnection::connect_with(&self.of(database)).await
    }

    pub(crate) async fn pool(&self, connections: usize) -> sqlx::Result<PgPool> {
        PgPoolOptions::new().max_connections(connections as u32).connect_with(self.server.clone()).await
    }

    /// The pool of one client.
    pub(crate) fn lazy_pool(&self, database: Option<&str>) -> PgPool {
        PgPoolOptions::new().max_connections(2).test_before_acquire(false).connect_lazy_with(self.of(database))
    }

    fn of(&self, database: Option<&str>) -> PgConnectOptions {
        let server = self.server.clone();
        match database {
            Some(database) => server.database(database),
            None => server,
        }
    }
}

fn socket(server: &PgConnectOptions) -> anyhow::Result<PathBuf> {
    let directory =
        server.get_socket().ok_or_else(|| anyhow::anyhow!("DATABASE_URL names no Unix socket; run script/bench"))?;
    Ok(directory.join(format!(".s.PGSQL.{}", server.get_port())))
}

fn with_commits(server: PgConnectOptions, synchronous: bool) -> PgConnectOptions {
    server.options([("synchronous_commit", if synchronous { "on" } else { "off" })])
}
