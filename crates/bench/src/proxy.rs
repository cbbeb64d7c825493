//! A proxy that counts a client's round trips, tells what the client says, or makes each round trip take longer.
//!
//! It has threads of its own, because Tokio's timer rounds up to whole milliseconds.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// Before a server on a Unix socket, on a port of its own.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    heard: Arc<Heard>,
}

#[derive(Default)]
struct Heard {
    round_trips: AtomicUsize,
    /// The SQL that clients have sent, prepared or not.
    texts: Mutex<Vec<String>>,
}

impl Proxy {
    /// Counts the server's `ReadyForQuery`, of which PostgreSQL sends one for each time the client waits, and keeps the
    /// SQL.
    pub(crate) fn listening(socket: &Path) -> anyhow::Result<Self> {
        Self::before(socket, listen, count)
    }

    /// Holds back all that the server says, so that a round trip takes `rtt` longer.
    pub(crate) fn delaying(socket: &Path, rtt: Duration) -> anyhow::Result<Self> {
        let up = |mut from_client: TcpStream, mut to_server: UnixStream, _: &Heard| {
            std::io::copy(&mut from_client, &mut to_server).map(drop)
        };
        Self::before(socket, up, move |from_server, to_client, _| delay(from_server, to_client, rtt))
    }

    fn before<U, D>(socket: &Path, up: U, down: D) -> anyhow::Result<Self>
    where
        U: Fn(TcpStream, UnixStream, &Heard) -> std::io::Result<()> + Copy + Send + 'static,
        D: Fn(UnixStream, TcpStream, &Heard) -> std::io::Result<()> + Copy + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let heard = Arc::<Heard>::default();
        let (hears, socket) = (heard.clone(), PathBuf::from(socket));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let Ok((client, server)) = client.and_then(|client| Ok((client, UnixStream::connect(&socket)?))) else {
                    continue;
                };
                if let Err(error) = relay(client, server, &hears, up, down) {
                    eprintln!("the proxy lost a connection: {error}");
                }
            }
        });
        Ok(Self { port, heard })
    }

    /// Round trips since the last time that this was asked.
    pub(crate) fn take(&self) -> usize {
        self.heard.round_trips.swap(0, Ordering::SeqCst)
    }

    /// The SQL that was sent since the last time that this was asked, in its order.
    pub(crate) fn texts(&self) -> Vec<String> {
        std::mem::take(&mut *self.heard.texts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn relay<U, D>(client: TcpStream, server: UnixStream, heard: &Arc<Heard>, up: U, down: D) -> std::io::Result<()>
where
    U: Fn(TcpStream, UnixStream, &Heard) -> std::io::Result<()> + Send + 'static,
    D: Fn(UnixStream, TcpStream, &Heard) -> std::io::Result<()> + Send + 'static,
{
    client.set_nodelay(true)?;
    let (from_client, to_server) = (client.try_clone()?, server.try_clone()?);
    let (heard_up, heard_down) = (heard.clone(), heard.clone());
    std::thread::spawn(move || {
        // Either end may go at any time; the other is to notice.
        let server = to_server.try_clone();
        let _ = up(from_client, to_server, &heard_up);
        let _ = server.and_then(|server| server.shutdown(Shutdown::Both));
    });
    std::thread::spawn(move || {
        let to_client = client.try_clone();
        let _ = to_client.and_then(|to_client| down(server, to_client, &heard_down));
        let _ = client.shutdown(Shutdown::Both);
    });
    Ok(())
}

fn count(mut from_server: UnixStream, mut to_client: TcpStream, heard: &Heard) -> std::io::Result<()> {
    let mut message = Vec::new();
    loop {
        read(&mut from_server, &mut message, 1)?;
        if message[0] == b'Z' {
            heard.round_trips.fetch_add(1, Ordering::SeqCst);
        }
        to_client.write_all(&message)?;
    }
}

fn listen(mut from_client: TcpStream, mut to_server: UnixStream, heard: &Heard) -> std::io::Result<()> {
    let mut message = Vec::new();
    // The first one, with the name of the database, has no kind.
    read(&mut from_client, &mut message, 0)?;
    to_server.write_all(&message)?;
    loop {
        read(&mut from_client, &mut message, 1)?;
        // A statement that is prepared has a name before its text.
        let text = match message[0] {
            b'Q' => message[5..].split(|byte| *byte == 0).next(),
            b'P' => message[5..].split(|byte| *byte == 0).nth(1),
            _ => None,
        };
        if let Some(text) = text {
            let text = String::from_utf8_lossy(text).into_owned();
            heard.texts.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        }
        to_server.write_all(&message)?;
    }
}

/// One message: its kind, if it has one, its length with these four bytes, its body.
fn read(from: &mut impl Read, message: &mut Vec<u8>, kind: usize) -> std::io::Result<()> {
    message.resize(kind + 4, 0);
    from.read_exact(message)?;
    let length = message[kind..].try_into().map(u32::from_be_bytes).unwrap_or_default();
    message.resize(kind + length as usize, 0);
    from.read_exact(&mut message[kind + 4..])
}

fn delay(mut from_server: UnixStream, mut to_client: TcpStream, rtt: Duration) -> std::io::Result<()> {
    let (hold, held) = mpsc::channel::<(Instant, Vec<u8>)>();
    std::thread::spawn(move || {
        for (due, bytes) in held {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if to_client.write_all(&bytes).is_err() {
                break;
            }
        }
    });
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let read = from_server.read(&mut bytes)?;
        if read == 0 || hold.send((Instant::now() + rtt, bytes[..read].to_vec())).is_err() {
            return Ok(());
        }
    }
}
