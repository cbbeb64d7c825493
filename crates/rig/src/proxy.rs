//! A network between client and server. It passes the bytes on, counts connections and round trips, reads the
//! statements, and can vanish.

use std::collections::BTreeMap;
use std::future::pending;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Notify;

#[derive(Clone)]
pub struct Proxy {
    pub options: PgConnectOptions,
    wire: Wire,
}

/// The bytes of each connection's client, by the number of the connection.
type Heard = Mutex<BTreeMap<usize, Vec<u8>>>;

#[derive(Clone, Default)]
struct Wire {
    connections: Arc<AtomicUsize>,
    /// The server sends one `ReadyForQuery` for each time the client waits.
    round_trips: Arc<AtomicUsize>,
    vanished: Arc<AtomicBool>,
    /// How often all connections were lost.
    losses: Arc<AtomicUsize>,
    cut: Arc<Notify>,
    /// The next ROLLBACK fails.
    spoils: Arc<AtomicBool>,
    answers: Arc<Mutex<Option<Replaced>>>,
    /// The SQLSTATE with which each login is refused.
    refusal: Arc<Mutex<Option<&'static str>>>,
    /// `None` without a listener.
    heard: Option<Arc<Heard>>,
}

/// The answers to the next messages with this text are replaced with an error.
#[derive(Clone, Copy)]
struct Replaced {
    text: &'static str,
    sqlstate: &'static str,
    times: usize,
}

impl Proxy {
    pub async fn before(server: &PgConnectOptions) -> anyhow::Result<Self> {
        Self::with(server, Wire::default()).await
    }

    /// One that keeps all bytes of the clients, for [`statements`](Self::statements).
    pub async fn listening(server: &PgConnectOptions) -> anyhow::Result<Self> {
        Self::with(server, Wire { heard: Some(Arc::default()), ..Wire::default() }).await
    }

    async fn with(server: &PgConnectOptions, wire: Wire) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        tokio::spawn({
            let (wire, server) = (wire.clone(), server.clone());
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    tokio::spawn(pass(client, server.clone(), wire.clone()));
                }
            }
        });
        Ok(Self { options: through(server, port), wire })
    }

    /// How many connections clients have opened.
    pub fn connections(&self) -> usize {
        self.wire.connections.load(Ordering::SeqCst)
    }

    /// The round trips since the last time that this was asked.
    pub fn take(&self) -> usize {
        self.wire.round_trips.swap(0, Ordering::SeqCst)
    }

    /// The texts of all statements that clients have sent, as `log_statement = all` would show them. Each prepared one
    /// is there once for each connection.
    pub fn statements(&self) -> Vec<String> {
        let heard = self.wire.heard.as_ref().map(|heard| heard.lock().unwrap_or_else(PoisonError::into_inner).clone());
        heard.into_iter().flatten().flat_map(|(_, bytes)| texts(&bytes)).collect()
    }

    /// From now on every byte of the present connections is swallowed, in both directions, and none of them is closed.
    /// New connections work.
    pub fn lose_connections(&self) {
        self.wire.losses.fetch_add(1, Ordering::SeqCst);
    }

    /// Closes every present connection, in both directions. What the server has received, it does all the same. New
    /// connections work.
    pub fn cut_connections(&self) {
        self.wire.cut.notify_waiters();
    }

    /// The next ROLLBACK of an aborted transaction fails, and the transaction stays, as after a
    /// `pg_cancel_backend`. The server gets another statement in its place, which an aborted transaction refuses.
    pub fn spoil_rollback(&self) {
        self.wire.spoils.store(true, Ordering::SeqCst);
    }

    /// Gives an error of its own as the answer to the next messages of clients that contain this text, as a pooler
    /// does. The server executes them all the same.
    pub fn answer(&self, text: &'static str, sqlstate: &'static str, times: usize) {
        *locked(&self.wire.answers) = (times > 0).then_some(Replaced { text, sqlstate, times });
    }

    /// From now on, refuses each login with this error, or none.
    pub fn refuse_logins(&self, sqlstate: Option<&'static str>) {
        *locked(&self.wire.refusal) = sqlstate;
    }

    /// From now on every byte is swallowed, in both directions, and no connection is closed.
    pub fn vanish(&self) {
        self.lose_connections();
        self.wire.vanished.store(true, Ordering::SeqCst);
    }

    /// After [`Proxy::vanish`], new connections work again. The older ones stay lost.
    pub fn mend(&self) {
        self.wire.vanished.store(false, Ordering::SeqCst);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The message `ErrorResponse`.
fn error_response(sqlstate: &str) -> Vec<u8> {
    let fields = format!("SERROR\0VERROR\0C{sqlstate}\0Man error of the pooler\0\0");
    let length = u32::try_from(fields.len() + 4).expect("a short message");
    [b"E", &length.to_be_bytes()[..], fields.as_bytes()].concat()
}

impl Wire {
    /// The SQLSTATE of the answer to these bytes, if the answer is not that of the server.
    fn replaced_answer(&self, sent: &[u8]) -> Option<&'static str> {
        let mut answers = locked(&self.answers);
        let Replaced { text, sqlstate, times } = (*answers)?;
        if !sent.windows(text.len()).any(|part| part == text.as_bytes()) {
            return None;
        }
        *answers = (times > 1).then_some(Replaced { text, sqlstate, times: times - 1 });
        Some(sqlstate)
    }
}

/// The way to this server's database through a port of this machine.
pub fn through(server: &PgConnectOptions, port: u16) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .host("127.0.0.1")
        .port(port)
        .username(server.get_username())
        .database(server.get_database().unwrap_or("postgres"))
        .ssl_mode(PgSslMode::Disable)
}

/// The texts in the messages Query and Parse of one client.
fn texts(bytes: &[u8]) -> Vec<String> {
    let length = |at: usize| {
        let length = bytes.get(at..at + 4)?.first_chunk::<4>()?;
        usize::try_from(u32::from_be_bytes(*length)).ok()
    };
    let mut texts = Vec::new();
    // The first message, which names user and database, has no kind.
    let mut at = length(0).unwrap_or(bytes.len());
    while let Some(length) = length(at + 1) {
        let body = bytes.get(at + 5..at + 1 + length).unwrap_or_default();
        // A Parse begins with the name of the prepared statement.
        let place = match bytes[at] {
            b'Q' => Some(0),
            b'P' => Some(1),
            _ => None,
        };
        let text = place.and_then(|place| body.split(|byte| *byte == 0).nth(place));
        texts.extend(text.map(|text| String::from_utf8_lossy(text).into_owned()));
        at += 1 + length;
    }
    texts
}

async fn pass(mut client: TcpStream, server: PgConnectOptions, wire: Wire) -> std::io::Result<()> {
    let refusal = *locked(&wire.refusal);
    if let Some(sqlstate) = refusal {
        // The client sends user and database first.
        let _ = client.read(&mut [0; 8192]).await?;
        client.write_all(&error_response(sqlstate)).await?;
        return client.shutdown().await;
    }
    match server.get_socket() {
        Some(directory) => {
            let path: PathBuf = directory.join(format!(".s.PGSQL.{}", server.get_port()));
            let (read, write) = UnixStream::connect(path).await?.into_split();
            relay(client, read, write, wire).await
        }
        None => {
            let (read, write) = TcpStream::connect((server.get_host(), server.get_port())).await?.into_split();
            relay(client, read, write, wire).await
        }
    }
}

async fn relay(
    client: TcpStream,
    mut from_server: impl AsyncRead + Unpin,
    mut to_server: impl AsyncWrite + Unpin,
    wire: Wire,
) -> std::io::Result<()> {
    client.set_nodelay(true)?;
    let number = wire.connections.fetch_add(1, Ordering::SeqCst);
    let begun = wire.losses.load(Ordering::SeqCst);
    let swallows = || wire.vanished.load(Ordering::SeqCst) || wire.losses.load(Ordering::SeqCst) > begun;
    let replaced = Mutex::new(None);
    let (mut from_client, mut to_client) = client.into_split();
    let up = async {
        let mut bytes = [0; 8192];
        loop {
            match from_client.read(&mut bytes).await? {
                // Nor does the server hear of the end of a lost connection.
                0 if swallows() => return pending().await,
                0 => return Ok(()),
                _ if swallows() => {}
                read => {
                    let sent = &mut bytes[..read];
                    if let Some(heard) = &wire.heard {
                        let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
                        heard.entry(number).or_default().extend_from_slice(sent);
                    }
                    let rollback = sent.windows(8).position(|text| text == b"ROLLBACK");
                    if let Some(at) = rollback
                        && wire.spoils.swap(false, Ordering::SeqCst)
                    {
                        sent[at..at + 8].copy_from_slice(b"SELECT 1");
                    }
                    if let Some(sqlstate) = wire.replaced_answer(sent) {
                        *locked(&replaced) = Some(sqlstate);
                    }
                    to_server.write_all(sent).await?;
                }
            }
        }
    };
    let down = async {
        loop {
            // One message: its kind, its length with these four bytes, its body.
            let kind = from_server.read_u8().await?;
            let length = from_server.read_u32().await?;
            let mut message = vec![0; length as usize + 1];
            message[0] = kind;
            message[1..5].copy_from_slice(&length.to_be_bytes());
            from_server.read_exact(&mut message[5..]).await?;
            if swallows() {
                continue;
            }
            let replacement = *locked(&replaced);
            if let Some(sqlstate) = replacement {
                if kind != b'Z' {
                    continue;
                }
                *locked(&replaced) = None;
                to_client.write_all(&error_response(sqlstate)).await?;
            }
            if kind == b'Z' {
                wire.round_trips.fetch_add(1, Ordering::SeqCst);
            }
            to_client.write_all(&message).await?;
        }
    };
    tokio::select! { result = up => result, result = down => result, () = wire.cut.notified() => Ok(()) }
}
