use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, UnixListener};
use tokio::task::{JoinHandle, JoinSet};

use super::Stream;

/// The listening side of a proxy. When this value is dropped, the proxy stops listening, and its connections are
/// closed.
#[derive(Debug)]
pub struct Entrance {
    port: u16,
    socket: Option<PathBuf>,
    accepting: JoinHandle<()>,
}

impl Entrance {
    /// Listens at this address, and calls `pass` with each connection. Port 0 means any free port.
    ///
    /// # Errors
    ///
    /// Fails if another socket uses the address, or if the address does not belong to this machine.
    pub async fn tcp<F>(at: SocketAddr, pass: impl Fn(Stream) -> F + Send + 'static) -> io::Result<Self>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind(at).await?;
        let port = listener.local_addr()?.port();
        let accepting = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                // `TCP_NODELAY` affects only the latency, so an error is ignored.
                let _ = client.set_nodelay(true);
                connections.spawn(pass(Box::new(client)));
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { port, socket: None, accepting })
    }

    /// Listens on a Unix socket in this directory, with the name that clients expect for port 5432.
    ///
    /// # Errors
    ///
    /// Fails if the socket exists already, or if the directory does not exist.
    pub fn unix<F>(directory: &Path, pass: impl Fn(Stream) -> F + Send + 'static) -> io::Result<Self>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let port = 5432;
        let socket = directory.join(format!(".s.PGSQL.{port}"));
        let listener = UnixListener::bind(&socket)?;
        let accepting = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(pass(Box::new(client)));
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { port, socket: Some(socket), accepting })
    }

    /// The port at which the proxy listens. A Unix socket has port 5432 in its name.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Entrance {
    fn drop(&mut self) {
        self.accepting.abort();
        if let Some(socket) = &self.socket {
            // The removal fails if the directory was removed before, together with the socket.
            let _ = std::fs::remove_file(socket);
        }
    }
}
