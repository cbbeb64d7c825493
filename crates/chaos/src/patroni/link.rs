//! A node's connection to etcd, which a test can cut for this node alone.

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// While it is cut, nothing passes and nothing is refused, as if the network dropped every packet. When it is mended,
/// the connections of before are closed.
pub(crate) struct Link {
    pub(crate) port: u16,
    cut: watch::Sender<bool>,
    accepting: JoinHandle<()>,
}

impl Link {
    pub(crate) async fn to(port: u16) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let own_port = listener.local_addr()?.port();
        let (cut, is_cut) = watch::channel(false);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, port, is_cut.clone()));
            }
        });
        Ok(Self { port: own_port, cut, accepting })
    }

    pub(crate) fn cut(&self) {
        self.cut.send_replace(true);
    }

    pub(crate) fn mend(&self) {
        self.cut.send_replace(false);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn pass(mut client: TcpStream, port: u16, mut is_cut: watch::Receiver<bool>) {
    if !*is_cut.borrow()
        && let Ok(mut server) = TcpStream::connect(("127.0.0.1", port)).await
    {
        tokio::select! {
            _ = copy_bidirectional(&mut client, &mut server) => return,
            _ = is_cut.wait_for(|cut| *cut) => {}
        }
        // Both sides stay connected, and hear nothing.
        let _ = is_cut.wait_for(|cut| !*cut).await;
        return;
    }
    let _ = is_cut.wait_for(|cut| !*cut).await;
}
