//! The listening side of every proxy.

use std::future::Future;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A port of 127.0.0.1 whose connections are passed on. It is closed when this value is dropped.
pub(crate) struct Entrance {
    pub(crate) port: u16,
    accepting: JoinHandle<()>,
}

impl Entrance {
    pub(crate) async fn open<F>(pass: impl Fn(TcpStream) -> F + Send + 'static) -> anyhow::Result<Self>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let _ = client.set_nodelay(true);
                tokio::spawn(pass(client));
            }
        });
        Ok(Self { port, accepting })
    }
}

impl Drop for Entrance {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}
