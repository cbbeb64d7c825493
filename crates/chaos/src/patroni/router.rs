//! The callers' way to the leader: a TCP proxy that asks the REST API of every node whether it leads, as HAProxy does
//! with the configuration in Patroni's documentation.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use idempotency_check::wire::{Entrance, Stream};
use sqlx::postgres::PgConnectOptions;
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::rest;
use crate::cluster::on_port;

/// `inter`: the time between two questions to a node. Patroni's documentation has 3 s for a `ttl` of 30 s. Here the
/// `ttl` is a quarter of that.
const INTERVAL: Duration = Duration::from_millis(500);
/// `fall`: after so many failed checks in a row, the leader counts as lost.
const FALL: u32 = 2;
/// `timeout check`.
const CHECK_LIMIT: Duration = Duration::from_secs(2);

/// The ports of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) sql: u16,
    pub(crate) rest: u16,
}

pub(crate) struct Router {
    entrance: Entrance,
    leader: watch::Receiver<Option<Ports>>,
    shuts_sessions: Arc<AtomicBool>,
    following: JoinHandle<()>,
}

impl Router {
    pub(crate) async fn before(nodes: Vec<Ports>) -> anyhow::Result<Self> {
        let (found, leader) = watch::channel(None);
        let shuts_sessions = Arc::new(AtomicBool::new(true));
        let following = tokio::spawn(follow(nodes, found));
        let (to, shuts) = (leader.clone(), shuts_sessions.clone());
        let entrance =
            Entrance::tcp((Ipv4Addr::LOCALHOST, 0).into(), move |client| pass(client, to.clone(), shuts.clone()))
                .await?;
        Ok(Self { entrance, leader, shuts_sessions, following })
    }

    pub(crate) fn options(&self) -> PgConnectOptions {
        on_port(self.entrance.port())
    }

    /// The leader to which the callers are led.
    pub(crate) fn leader(&self) -> Option<Ports> {
        *self.leader.borrow()
    }

    /// Whether the sessions with a leader that is lost are closed (`on-marked-down shutdown-sessions`), or may go on.
    pub(crate) fn shut_sessions(&self, shut: bool) {
        self.shuts_sessions.store(shut, Ordering::Relaxed);
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.following.abort();
    }
}

/// Asks each node in a task of its own, because a node that is stopped does not answer, and must not delay the others.
async fn follow(nodes: Vec<Ports>, found: watch::Sender<Option<Ports>>) {
    let leading = Mutex::new(vec![false; nodes.len()]);
    // A node stays the leader as long as it says so.
    let note = |place: usize, failed: u32| {
        let mut leading = leading.lock().unwrap_or_else(PoisonError::into_inner);
        leading[place] = failed == 0 || (leading[place] && failed < FALL);
        found.send_if_modified(|leader| {
            let known = nodes.iter().position(|node| Some(*node) == *leader).filter(|known| leading[*known]);
            let next = known.or_else(|| leading.iter().position(|leads| *leads)).map(|place| nodes[place]);
            std::mem::replace(leader, next) != next
        });
    };
    let ask = async |place: usize| {
        let mut failed = 0;
        loop {
            failed = if rest::is_leader(nodes[place].rest, CHECK_LIMIT).await { 0 } else { failed + 1 };
            note(place, failed);
            sleep(INTERVAL).await;
        }
    };
    join_all((0..nodes.len()).map(ask)).await;
}

/// Without a leader a connection is closed at once, as a proxy without a server does.
async fn pass(mut client: Stream, mut leader: watch::Receiver<Option<Ports>>, shuts_sessions: Arc<AtomicBool>) {
    let Some(node) = *leader.borrow_and_update() else { return };
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", node.sql)).await else { return };
    let _ = server.set_nodelay(true);
    let lost = async {
        loop {
            if leader.wait_for(|now| *now != Some(node)).await.is_err() || shuts_sessions.load(Ordering::Relaxed) {
                return;
            }
            if leader.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        _ = copy_bidirectional(&mut client, &mut server) => {}
        () = lost => {}
    }
}
