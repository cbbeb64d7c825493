//! The HTTP server of the console, and of `/metrics` and `/healthz`. Clients that have not signed in can hold only a
//! bounded number of its connections, and only for a bounded time: the rest of the process keeps its descriptors.
//! `axum::serve` has no such bounds: a few hundred clients that never ended their requests took all descriptors.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

use crate::failure::Failure;

/// A browser opens six, and few people and probes come at once. Two servers and the database need less than the 256
/// descriptors that some systems give a process. A client above this waits in the system's queue.
const CONNECTIONS: u32 = 64;
/// A client sends its header in one piece. This also ends a connection that is idle between two requests.
const HEADER_TIME: Duration = Duration::from_secs(5);
/// After this time a connection ends with the request in progress, so that no slow body or slow reader keeps it.
const CONNECTION_TIME: Duration = Duration::from_secs(30);
/// How long the end of a connection, or of the server, waits for a request in progress: longer than any action takes.
const GRACE: Duration = Duration::from_secs(10);
/// The pause after an error of `accept`, such as a process without a free descriptor.
const RETRY: Duration = Duration::from_millis(500);

/// Serves until it is stopped or dropped.
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

    /// Accepts no more, and waits for the requests in progress.
    pub(crate) async fn stop(self) {
        drop(self.stop);
        let _ = timeout(GRACE, self.places.acquire_many(CONNECTIONS)).await;
    }
}

async fn accept(listener: TcpListener, router: Router, places: Arc<Semaphore>, mut stopped: watch::Receiver<()>) {
    loop {
        // A place first: a connection that waits for one has no descriptor.
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
        // Errors are the client's: it has gone, or has sent no HTTP.
        _ = connection.as_mut() => return,
        _ = stopped.changed() => {}
        () = sleep(CONNECTION_TIME) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = timeout(GRACE, connection).await;
}
