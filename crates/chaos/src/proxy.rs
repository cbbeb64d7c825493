//! A proxy between the callers and the server, or between two servers, which cuts where it hurts: before COMMIT is sent, after it was answered,
//! in the middle of a message; or swallows all, or is slow.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::random::Random;
use crate::world::World;

/// What the proxy does to its connections.
#[derive(Clone, Debug)]
pub(crate) struct Trouble {
    /// One COMMIT in so many is cut; 0 for none.
    pub(crate) commits: u64,
    /// One other message in so many.
    pub(crate) messages: u64,
    /// Each message takes so many milliseconds, in each direction.
    pub(crate) latency: Range<u64>,
}

const NOTHING: u8 = 0;
/// The answer is to be read, and the connection closed.
const SWALLOW: u8 = 1;
/// Three bytes of the answer are to be sent.
const HALVE: u8 = 2;
/// The answer is to be read, and then silence.
const SILENCE: u8 = 3;

/// How long a black hole stays: longer than callers are patient in a hurry, shorter than their time-out, and some past
/// it.
const HOLE: Range<u64> = 50..400;

/// Gone with this value, and all its connections.
pub(crate) struct Proxy {
    pub(crate) options: PgConnectOptions,
    /// Whether it cuts.
    cuts: Arc<AtomicBool>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Between the callers and their server.
    pub(crate) async fn before(world: &Arc<World>, trouble: Trouble) -> anyhow::Result<Self> {
        let socket = world.options.get_socket().context("a server on a Unix socket")?;
        let socket = socket.join(format!(".s.PGSQL.{}", world.options.get_port()));
        Self::to(Server::Socket(socket), world, trouble, true).await
    }

    /// Between two servers, of which the second has this port. Cuts nothing yet.
    pub(crate) async fn before_port(world: &Arc<World>, trouble: Trouble, port: u16) -> anyhow::Result<Self> {
        Self::to(Server::Port(port), world, trouble, false).await
    }

    async fn to(server: Server, world: &Arc<World>, trouble: Trouble, cuts: bool) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let options = PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(listener.local_addr()?.port())
            .username(world.options.get_username())
            .database(world.options.get_database().unwrap_or("postgres"))
            .ssl_mode(PgSslMode::Disable);
        let random = Arc::new(Mutex::new(world.random("proxy")));
        let cuts = Arc::new(AtomicBool::new(cuts));
        let (world, is_cutting) = (world.clone(), cuts.clone());
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let wire = Wire {
                    world: world.clone(),
                    trouble: trouble.clone(),
                    cuts: is_cutting.clone(),
                    random: random.clone(),
                };
                let server = server.clone();
                tokio::spawn(async move {
                    let _ = client.set_nodelay(true);
                    match server {
                        Server::Socket(path) => {
                            if let Ok(server) = UnixStream::connect(path).await {
                                wire.pass(client, server).await;
                            }
                        }
                        Server::Port(port) => {
                            if let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await {
                                let _ = server.set_nodelay(true);
                                wire.pass(client, server).await;
                            }
                        }
                    }
                });
            }
        });
        Ok(Self { options, cuts, accepting })
    }

    pub(crate) fn cut(&self, cuts: bool) {
        self.cuts.store(cuts, Ordering::Relaxed);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

#[derive(Clone)]
enum Server {
    Socket(PathBuf),
    Port(u16),
}

struct Wire {
    world: Arc<World>,
    trouble: Trouble,
    cuts: Arc<AtomicBool>,
    random: Arc<Mutex<Random>>,
}

impl Wire {
    fn draw<T>(&self, draw: impl FnOnce(&mut Random) -> T) -> T {
        draw(&mut self.random.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn lag(&self) {
        if !self.trouble.latency.is_empty() {
            let lag = self.draw(|random| random.millis(self.trouble.latency.clone()));
            sleep(lag).await;
        }
    }

    /// Until one side hangs up, or the proxy does.
    async fn pass(&self, client: TcpStream, server: impl AsyncRead + AsyncWrite) {
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = tokio::io::split(server);
        let answer = AtomicU8::new(NOTHING);
        let requests = async {
            let mut begun = false;
            while let Some(message) = message(&mut from_client, begun).await {
                begun = true;
                self.lag().await;
                let is_commit = message.starts_with(b"Q") && message[5..].to_ascii_uppercase().starts_with(b"COMMIT");
                let chance = if is_commit { self.trouble.commits } else { self.trouble.messages };
                let chance = if self.cuts.load(Ordering::Relaxed) { chance } else { 0 };
                let (hit, cut) = self.draw(|random| (chance > 0 && random.one_in(chance), random.below(6)));
                let cut = match (hit, is_commit) {
                    (false, _) => u64::MAX,
                    (true, true) => cut,
                    (true, false) => 1,
                };
                match cut {
                    0 => return self.world.fault("cut before COMMIT was sent"),
                    1 => {
                        self.world.fault("cut within a message");
                        let _ = to_server.write_all(&message[..message.len() / 2]).await;
                        return;
                    }
                    2 => {
                        self.world.fault("black hole before COMMIT");
                        sleep(self.draw(|random| random.millis(HOLE))).await;
                        return;
                    }
                    3 => self.hit(&answer, SWALLOW, "cut after COMMIT was answered"),
                    4 => self.hit(&answer, HALVE, "cut within the answer to COMMIT"),
                    5 => self.hit(&answer, SILENCE, "black hole after COMMIT"),
                    _ => {}
                }
                if to_server.write_all(&message).await.is_err() {
                    return;
                }
            }
        };
        let answers = async {
            let mut bytes = vec![0; 16 * 1024];
            while let Ok(read @ 1..) = from_server.read(&mut bytes).await {
                self.lag().await;
                let pass = match answer.load(Ordering::Acquire) {
                    NOTHING => read,
                    HALVE => read.min(3),
                    _ => 0,
                };
                if to_client.write_all(&bytes[..pass]).await.is_err() {
                    return;
                }
                match answer.load(Ordering::Acquire) {
                    NOTHING => {}
                    SILENCE => return sleep(self.draw(|random| random.millis(HOLE))).await,
                    _ => return,
                }
            }
        };
        tokio::select! {
            () = requests => {}
            () = answers => {}
        }
    }

    fn hit(&self, answer: &AtomicU8, what: u8, fault: &'static str) {
        self.world.fault(fault);
        answer.store(what, Ordering::Release);
    }
}

/// One message of the frontend, whole; the first has no type.
async fn message(from: &mut (impl AsyncRead + Unpin), begun: bool) -> Option<Vec<u8>> {
    let header = if begun { 5 } else { 4 };
    let mut message = vec![0; header];
    from.read_exact(&mut message).await.ok()?;
    let length = u32::from_be_bytes(*message.last_chunk()?);
    let rest = usize::try_from(length).ok()?.checked_sub(4)?;
    message.resize(header + rest, 0);
    from.read_exact(&mut message[header..]).await.ok()?;
    Some(message)
}

/// What a slow network does: nothing else.
pub(crate) fn slow(latency: Range<u64>) -> Trouble {
    Trouble { commits: 0, messages: 0, latency }
}

/// Somewhat longer than any hole, for who waits for all to be over.
pub(crate) const PAST_ALL_HOLES: Duration = Duration::from_millis(HOLE.end + 100);
