//! `/metrics` and `/healthz` of the daemon.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusBuilder;
use sqlx::{Connection as _, PgConnection};
use tokio::sync::Mutex;

use crate::connection::Database;
use crate::failure::Failure;
use crate::process::print;
use crate::server::{Server, names_loopback};

/// The interval at which the metrics are drained. The exporter's own server uses the same interval.
const UPKEEP: Duration = Duration::from_secs(5);

/// How long `/healthz` waits for the database. The probes in `contrib/kubernetes` have a longer time-out.
const PROBE: Duration = Duration::from_secs(2);

/// Starts to serve, and prints the address, because port 0 means any free port.
pub(crate) async fn serve(address: SocketAddr, database: &Database) -> Result<Server, Failure> {
    let recorder = PrometheusBuilder::new().build_recorder();
    let (exported, kept_up) = (recorder.handle(), recorder.handle());
    // A process has one recorder, and only this function sets it.
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
    let router = if address.ip().is_loopback() { router.layer(from_fn(only_as_loopback)) } else { router };
    let server = Server::start(address, router).await?;
    print(&format!("metrics on http://{}/metrics\n", server.address))?;
    tokio::spawn(async move {
        // Histograms grow until they are drained, and perhaps no Prometheus server scrapes them.
        loop {
            tokio::time::sleep(UPKEEP).await;
            kept_up.run_upkeep();
        }
    });
    Ok(server)
}

/// Refuses a request that a page of another site has made a browser send. A probe may send no `Host`.
async fn only_as_loopback(request: Request, next: Next) -> Response {
    if request.headers().get(header::HOST).is_none_or(names_loopback) {
        return next.run(request).await;
    }
    let refusal = "this address is loopback, and answers only under the names localhost, 127.0.0.1 and [::1]\n";
    (StatusCode::FORBIDDEN, refusal).into_response()
}

/// All probes share one connection, because each new connection is a new process on the server. The probes do not use
/// the connection of the sweep, because a probe would wait behind a batch, and would report a busy janitor as dead. The
/// probes do not use a pool either. A pool pings each connection that is returned to it. After the network was lost,
/// such a ping can take a quarter of an hour, and the pool would have no connection until then.
struct Probe {
    database: Database,
    kept: Mutex<Option<PgConnection>>,
}

impl Probe {
    /// Takes the connection out of `kept` during the ping. If this future is dropped, a connection that does not answer
    /// is therefore closed. A broken connection is replaced at once, for example after a restart of the server.
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
