//! A proxy that counts a client's round trips, or makes each of them take longer.
//!
//! It has threads of its own, because Tokio's timer rounds up to whole milliseconds.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Before a server on a Unix socket, on a port of its own.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    round_trips: Arc<AtomicUsize>,
}

impl Proxy {
    /// Counts the server's `ReadyForQuery`: PostgreSQL sends one each time that the client waits.
    pub(crate) fn counting(socket: &Path) -> anyhow::Result<Self> {
        Self::before(socket, count)
    }

    /// Holds back all that the server says, so that a round trip takes `rtt` longer.
    pub(crate) fn delaying(socket: &Path, rtt: Duration) -> anyhow::Result<Self> {
        Self::before(socket, move |from_server, to_client, _| delay(from_server, to_client, rtt))
    }

    /// Round trips since the last call of this function.
    pub(crate) fn take(&self) -> usize {
        self.round_trips.swap(0, Ordering::SeqCst)
    }

    fn before<D>(socket: &Path, down: D) -> anyhow::Result<Self>
    where
        D: Fn(UnixStream, TcpStream, &AtomicUsize) -> std::io::Result<()> + Copy + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let round_trips = Arc::<AtomicUsize>::default();
        let (counted, socket) = (round_trips.clone(), PathBuf::from(socket));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if let Err(error) = client.and_then(|client| relay(client, &socket, counted.clone(), down)) {
                    eprintln!("the proxy lost a connection: {error}");
                }
            }
        });
        Ok(Self { port, round_trips })
    }
}

/// When one end closes the connection, the other one is closed too.
fn relay<D>(client: TcpStream, socket: &Path, counted: Arc<AtomicUsize>, down: D) -> std::io::Result<()>
where
    D: Fn(UnixStream, TcpStream, &AtomicUsize) -> std::io::Result<()> + Send + 'static,
{
    client.set_nodelay(true)?;
    let server = UnixStream::connect(socket)?;
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    let to_client = client.try_clone()?;
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Both);
    });
    std::thread::spawn(move || {
        let _ = down(server, to_client, &counted);
        let _ = client.shutdown(Shutdown::Both);
    });
    Ok(())
}

fn count(mut from_server: UnixStream, mut to_client: TcpStream, counted: &AtomicUsize) -> std::io::Result<()> {
    let mut message = vec![0; 5];
    loop {
        // A message is its kind, its length, which counts its own four bytes, and its body.
        message.resize(5, 0);
        from_server.read_exact(&mut message)?;
        let length = message[1..].try_into().map(u32::from_be_bytes).unwrap_or_default();
        message.resize(1 + length as usize, 0);
        from_server.read_exact(&mut message[5..])?;
        if message[0] == b'Z' {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        to_client.write_all(&message)?;
    }
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
