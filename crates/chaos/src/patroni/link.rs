//! A node's connection to etcd, which a scenario can cut for this node alone.

use std::net::Ipv4Addr;

use idempotency_check::wire::{Entrance, Stream};
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::watch;

/// While the link is cut, nothing passes and nothing is refused, as if the network dropped every packet. When it is
/// mended, the older connections are closed.
pub(crate) struct Link {
    entrance: Entrance,
    cut: watch::Sender<bool>,
}

impl Link {
    pub(crate) async fn to(port: u16) -> anyhow::Result<Self> {
        let (cut, is_cut) = watch::channel(false);
        let entrance =
            Entrance::tcp((Ipv4Addr::LOCALHOST, 0).into(), move |client| pass(client, port, is_cut.clone())).await?;
        Ok(Self { entrance, cut })
    }

    pub(crate) fn port(&self) -> u16 {
        self.entrance.port()
    }

    pub(crate) fn cut(&self) {
        self.cut.send_replace(true);
    }

    pub(crate) fn mend(&self) {
        self.cut.send_replace(false);
    }
}

async fn pass(mut client: Stream, port: u16, mut is_cut: watch::Receiver<bool>) {
    if !*is_cut.borrow()
        && let Ok(mut server) = TcpStream::connect(("127.0.0.1", port)).await
    {
        tokio::select! {
            _ = copy_bidirectional(&mut client, &mut server) => return,
            _ = is_cut.wait_for(|cut| *cut) => {}
        }
        // Both sides stay connected, and receive nothing.
        let _ = is_cut.wait_for(|cut| !*cut).await;
        return;
    }
    let _ = is_cut.wait_for(|cut| !*cut).await;
}
