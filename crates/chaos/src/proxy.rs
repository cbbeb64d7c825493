//! A proxy between the callers and the server, or between two servers. It cuts connections at the worst moments: before
//! COMMIT is sent, after its answer, and in the middle of a message. Or it swallows everything.

use std::future::Future;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::sleep;

use crate::cluster::on_port;
use crate::entrance::Entrance;
use crate::random::Random;
use crate::world::World;

/// One COMMIT in so many is cut, and one other message in so many.
const COMMITS: u64 = 8;
const MESSAGES: u64 = 200;

const NOTHING: u8 = 0;
/// The proxy reads the answer, and closes the connection.
const SWALLOW: u8 = 1;
/// The proxy sends three bytes of the answer.
const HALVE: u8 = 2;
/// The proxy reads the answer, and sends nothing more.
const SILENCE: u8 = 3;

/// How long a black hole stays, in milliseconds.
const HOLE: Range<u64> = 50..400;
/// Longer than any hole.
pub(crate) const PAST_ALL_HOLES: Duration = Duration::from_millis(HOLE.end + 100);

pub(crate) struct Proxy {
    pub(crate) options: PgConnectOptions,
    cuts: Arc<AtomicBool>,
    _entrance: Entrance,
}

impl Proxy {
    /// Between the callers and their server.
    pub(crate) async fn before(world: &Arc<World>) -> anyhow::Result<Self> {
        let socket = world.options.get_socket().context("a server on a Unix socket")?;
        let socket = socket.join(format!(".s.PGSQL.{}", world.options.get_port()));
        let proxy = Self::to(world, move || UnixStream::connect(socket.clone())).await?;
        proxy.cut(true);
        Ok(proxy)
    }

    /// Between two servers, of which the second one has this port. It cuts nothing yet.
    pub(crate) async fn before_port(world: &Arc<World>, port: u16) -> anyhow::Result<Self> {
        Self::to(world, move || async move {
            let server = TcpStream::connect(("127.0.0.1", port)).await?;
            server.set_nodelay(true)?;
            Ok(server)
        })
        .await
    }

    async fn to<S, F>(world: &Arc<World>, connect: impl Fn() -> F + Send + 'static) -> anyhow::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
        F: Future<Output = std::io::Result<S>> + Send + 'static,
    {
        let cuts = Arc::new(AtomicBool::new(false));
        let random = Arc::new(Mutex::new(world.random("proxy")));
        let (of_wires, is_cutting) = (world.clone(), cuts.clone());
        let entrance = Entrance::open(move |client| {
            let wire = Wire { world: of_wires.clone(), cuts: is_cutting.clone(), random: random.clone() };
            let connecting = connect();
            async move {
                if let Ok(server) = connecting.await {
                    wire.pass(client, server).await;
                }
            }
        })
        .await?;
        let options = on_port(entrance.port)
            .username(world.options.get_username())
            .database(world.options.get_database().unwrap_or("postgres"));
        Ok(Self { options, cuts, _entrance: entrance })
    }

    pub(crate) fn cut(&self, cuts: bool) {
        self.cuts.store(cuts, Ordering::Relaxed);
    }
}

struct Wire {
    world: Arc<World>,
    cuts: Arc<AtomicBool>,
    random: Arc<Mutex<Random>>,
}

impl Wire {
    fn draw<T>(&self, draw: impl FnOnce(&mut Random) -> T) -> T {
        draw(&mut self.random.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Passes messages until one side closes the connection, or the proxy does.
    async fn pass(&self, client: TcpStream, server: impl AsyncRead + AsyncWrite) {
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = tokio::io::split(server);
        let answer = AtomicU8::new(NOTHING);
        let requests = async {
            let mut begun = false;
            while let Some(message) = message(&mut from_client, begun).await {
                begun = true;
                let is_commit = message.starts_with(b"Q") && message[5..].to_ascii_uppercase().starts_with(b"COMMIT");
                let chance = if is_commit { COMMITS } else { MESSAGES };
                let (hit, cut) = self.draw(|random| (random.one_in(chance), random.below(6)));
                let hit = hit && self.cuts.load(Ordering::Relaxed);
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

/// One whole message of the frontend. The first one has no type.
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
