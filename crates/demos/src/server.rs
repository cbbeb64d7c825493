//! An HTTP service on a socket of this process.

use std::net::Ipv4Addr;

use anyhow::Context as _;
use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub struct Server {
    pub url: String,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<std::io::Result<()>>,
}

impl Server {
    pub async fn start(router: Router) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("cannot listen on a loopback port")?;
        let url = format!("http://{}", listener.local_addr()?);
        let (stop, stopping) = oneshot::channel();
        let server = axum::serve(listener, router).with_graceful_shutdown(async {
            let _ = stopping.await;
        });
        Ok(Self { url, stop, serving: tokio::spawn(server.into_future()) })
    }

    /// Finishes the requests that have arrived, and accepts no others.
    pub async fn stop(self) -> anyhow::Result<()> {
        drop(self.stop);
        Ok(self.serving.await??)
    }
}
