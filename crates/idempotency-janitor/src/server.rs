//! The HTTP server of the console, and of `/metrics` and `/healthz`. The number of open connections and the time of
//! each connection are bounded, even for clients that have not signed in. Therefore, clients cannot use up the file
//! descriptors that the rest of the process needs. `axum::serve` has no such bounds. With `axum::serve`, a few hundred
//! clients that never ended their requests used up all descriptors.

use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::HeaderValue;
use axum::http::uri::Authority;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

use crate::failure::Failure;

/// The greatest number of connections. A browser opens six connections, and few people and probes connect at once. The
/// connections of two servers and of the database pool need fewer descriptors than the 256 that some systems give a
/// process. A further client waits in the system's queue.
const CONNECTIONS: u32 = 64;
/// How long a client may take to send the header of a request. A usual client sends the header in one piece. The limit
/// also ends a connection that is idle between two requests.
const HEADER_TIME: Duration = Duration::from_secs(5);
/// After this time, a connection accepts no further request. The connection is closed when the request in progress is
/// finished, or at the latest after a further [`GRACE`]. So a client that sends a body slowly, or reads an answer
/// slowly, cannot hold a connection for longer than both times together.
const CONNECTION_TIME: Duration = Duration::from_secs(30);
/// How long the end of a connection, or of the server, waits for the request in progress. An action of the console
/// takes less time than this limit, unless the database is slow.
const GRACE: Duration = Duration::from_secs(10);
/// The pause after an error of `accept`. Such an error occurs if the process has no free descriptor.
const RETRY: Duration = Duration::from_millis(500);

/// A server that runs until it is stopped or dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    places: Arc<Semaphore>,
    stop: watch::Sender<()>,
}

impl Server {
    pub(crate) async fn start(address: SocketAddr, router: Router) -> Result<Self, Failure> {
        let unavailable = |source| Failure::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(unavailable)?;
        let places = Arc::new(Semaphore::new(CONNECTIONS as usize));
        let (stop, stopped) = watch::channel(());
        let address = listener.local_addr().map_err(unavailable)?;
        tokio::spawn(accept(listener, router, places.clone(), stopped));
        Ok(Self { address, places, stop })
    }

    /// Refuses new connections, and waits for the requests in progress.
    pub(crate) async fn stop(self) {
        drop(self.stop);
        let _ = timeout(GRACE, self.places.acquire_many(CONNECTIONS)).await;
    }
}

async fn accept(listener: TcpListener, router: Router, places: Arc<Semaphore>, mut stopped: watch::Receiver<()>) {
    loop {
        // The place is acquired before the connection is accepted. So a connection that waits for a place does not use
        // a descriptor.
        let accepting = async { (places.clone().acquire_owned().await, listener.accept().await) };
        let (place, accepted) = tokio::select! {
            accepted = accepting => accepted,
            _ = stopped.changed() => return,
        };
        let Ok((stream, _)) = accepted else {
            sleep(RETRY).await;
            continue;
        };
        let (router, stopped) = (router.clone(), stopped.clone());
        tokio::spawn(async move {
            let _place = place;
            answer(stream, router, stopped).await;
        });
    }
}

async fn answer(stream: TcpStream, router: Router, mut stopped: watch::Receiver<()>) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    tokio::select! {
        // An error here means that the client has gone away, or has not sent HTTP.
        _ = connection.as_mut() => return,
        _ = stopped.changed() => {}
        () = sleep(CONNECTION_TIME) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = timeout(GRACE, connection).await;
}

/// Whether a `Host` is a name of this machine's loopback address. Another site may point its own name to this address
/// (DNS rebinding), and would then read in a browser what a server on loopback sends.
pub(crate) fn names_loopback(host: &HeaderValue) -> bool {
    let Ok(authority) = Authority::try_from(host.as_bytes()) else { return false };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}
