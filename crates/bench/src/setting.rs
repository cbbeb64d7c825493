//! How the server is reached, and how durable its commits are.

use std::path::Path;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{Connection as _, PgConnection, PgPool};

use crate::proxy::Proxy;
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
        let value = if synchronous { "on" } else { "off" };
        let server = server.clone().options([("synchronous_commit", value)]);
        Self { synchronous, rtt: None, server, redis: redis.cloned() }
    }

    /// The same, with each round trip this much longer.
    pub(crate) fn far(self, rtt: Duration) -> anyhow::Result<Self> {
        let server = through(&self.server, Proxy::delaying(&socket(&self.server)?, rtt)?.port);
        let redis = match self.redis {
            Some(Address::Socket(path)) => Some(Address::Port(Proxy::delaying(&path, rtt)?.port)),
            other => other,
        };
        Ok(Self { server, redis, rtt: Some(rtt), ..self })
    }

    /// The same, with the round trips counted.
    pub(crate) fn counted(self) -> anyhow::Result<(Self, Proxy)> {
        let proxy = Proxy::counting(&socket(&self.server)?)?;
        Ok((Self { server: through(&self.server, proxy.port), ..self }, proxy))
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

fn socket(server: &PgConnectOptions) -> anyhow::Result<std::path::PathBuf> {
    let directory: &Path =
        server.get_socket().ok_or_else(|| anyhow::anyhow!("DATABASE_URL names no Unix socket; run script/bench"))?;
    Ok(directory.join(format!(".s.PGSQL.{}", server.get_port())))
}

fn through(server: &PgConnectOptions, port: u16) -> PgConnectOptions {
    let options = server.get_options().map(str::to_owned).unwrap_or_default();
    let synchronous = if options.contains("synchronous_commit=off") { "off" } else { "on" };
    PgConnectOptions::new_without_pgpass()
        .host("127.0.0.1")
        .port(port)
        .username(server.get_username())
        .database(server.get_database().unwrap_or("postgres"))
        .ssl_mode(PgSslMode::Disable)
        .options([("synchronous_commit", synchronous)])
}
