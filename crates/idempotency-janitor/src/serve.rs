//! `/metrics` and `/healthz` of the daemon.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusBuilder;
use sqlx::{Connection as _, PgConnection};
use tokio::sync::Mutex;

use crate::connection::Database;
use crate::failure::Failure;
use crate::print;
use crate::server::Server;

/// As often as the exporter's own server does it.
const UPKEEP: Duration = Duration::from_secs(5);

/// Below the time-outs of common probes.
const PROBE: Duration = Duration::from_secs(2);

/// Prints where it serves, since port 0 is anybody's.
pub(crate) async fn metrics(address: SocketAddr, database: &Database) -> Result<Server, Failure> {
    let recorder = PrometheusBuilder::new().build_recorder();
    let (exported, kept_up) = (recorder.handle(), recorder.handle());
    // There is one recorder in a process, and this is the only place that sets it.
    metrics::set_global_recorder(recorder)
        .map_err(|error| Failure::Listen { address, source: std::io::Error::other(error.to_string()) })?;
    let probe = Arc::new(Probe { database: database.clone(), kept: Mutex::new(None) });
    let router = Router::new().route("/metrics", get(async move || exported.render())).route(
        "/healthz",
        get(async move || match tokio::time::timeout(PROBE, probe.ask()).await {
            Ok(Ok(())) => (StatusCode::OK, "ok\n"),
            _ => (StatusCode::SERVICE_UNAVAILABLE, "the database does not answer\n"),
        }),
    );
    let server = Server::start(address, router).await?;
    print(&format!("metrics on http://{}/metrics\n", server.address))?;
    tokio::spawn(async move {
        // Histograms grow until somebody drains them, and nobody may ever scrape.
        loop {
            tokio::time::sleep(UPKEEP).await;
            kept_up.run_upkeep();
        }
    });
    Ok(server)
}

/// One connection for all probes, since each new one is a process of the server's. Not the sweep's: behind its batch a
/// probe would wait, and take a busy janitor for a dead one. And not a pool's: a pool of sqlx asks each connection that
/// it takes back, for as long as that takes, and after a silent loss of the network it would have none to give for a
/// quarter of an hour.
struct Probe {
    database: Database,
    kept: Mutex<Option<PgConnection>>,
}

impl Probe {
    /// Out of its place while it is asked: dropped with this future, a connection that does not answer is closed. One
    /// that broke, as in a restart of the server, is replaced at once.
    async fn ask(&self) -> Result<(), Failure> {
        let mut kept = self.kept.lock().await;
        if let Some(mut conn) = kept.take()
            && conn.ping().await.is_ok()
        {
            *kept = Some(conn);
            return Ok(());
        }
        *kept = Some(self.database.connect().await?);
        Ok(())
    }
}
