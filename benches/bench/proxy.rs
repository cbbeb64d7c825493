//! A proxy that counts a client's round trips, or makes each take longer.
//!
//! It has threads of its own, because Tokio's timer rounds up to whole milliseconds.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Before a server on a Unix socket, on a port of its own.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    round_trips: Arc<AtomicUsize>,
}

impl Proxy {
    /// Counts the server's `ReadyForQuery`, of which PostgreSQL sends one for each time the client waits.
    pub(crate) fn counting(socket: &Path) -> anyhow::Result<Self> {
        Self::before(socket, count)
    }

    /// Holds back all that the server says, so that a round trip takes `rtt` longer.
    pub(crate) fn delaying(socket: &Path, rtt: Duration) -> anyhow::Result<Self> {
        Self::before(socket, move |from_server, to_client, _| delay(from_server, to_client, rtt))
    }

    fn before<F>(socket: &Path, down: F) -> anyhow::Result<Self>
    where
        F: Fn(UnixStream, TcpStream, &AtomicUsize) -> std::io::Result<()> + Copy + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let round_trips = Arc::new(AtomicUsize::new(0));
        let (counted, socket) = (round_trips.clone(), PathBuf::from(socket));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let Ok((client, server)) = client.and_then(|client| Ok((client, UnixStream::connect(&socket)?))) else {
                    continue;
                };
                if let Err(error) = relay(client, server, counted.clone(), down) {
                    eprintln!("the proxy lost a connection: {error}");
                }
            }
        });
        Ok(Self { port, round_trips })
    }

    /// Round trips since the last time that this was asked.
    pub(crate) fn take(&self) -> usize {
        self.round_trips.swap(0, Ordering::SeqCst)
    }
}

fn relay<F>(client: TcpStream, server: UnixStream, counted: Arc<AtomicUsize>, down: F) -> std::io::Result<()>
where
    F: Fn(UnixStream, TcpStream, &AtomicUsize) -> std::io::Result<()> + Send + 'static,
{
    client.set_nodelay(true)?;
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    std::thread::spawn(move || {
        // Either end may go at any time; the other is to notice.
        let _ = std::io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Both);
    });
    std::thread::spawn(move || {
        let to_client = client.try_clone();
        let _ = to_client.and_then(|to_client| down(server, to_client, &counted));
        let _ = client.shutdown(Shutdown::Both);
    });
    Ok(())
}

fn count(mut from_server: UnixStream, mut to_client: TcpStream, round_trips: &AtomicUsize) -> std::io::Result<()> {
    let mut message = vec![0; 5];
    loop {
        // One message: its kind, its length with these four bytes, its body.
        message.resize(5, 0);
        from_server.read_exact(&mut message)?;
        let length = u32::from_be_bytes([message[1], message[2], message[3], message[4]]);
        message.resize(length as usize + 1, 0);
        from_server.read_exact(&mut message[5..])?;
        if message[0] == b'Z' {
            round_trips.fetch_add(1, Ordering::SeqCst);
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
