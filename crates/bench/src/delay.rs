//! A proxy before a server on a Unix socket that makes each round trip take longer.
//!
//! It has threads of its own, because Tokio's timer rounds up to whole milliseconds.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Holds back all that the server says, so that a round trip takes `rtt` longer. Returns the port of the proxy.
pub(crate) fn before(socket: &Path, rtt: Duration) -> anyhow::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let socket = PathBuf::from(socket);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            if let Err(error) = client.and_then(|client| relay(client, &socket, rtt)) {
                eprintln!("the proxy lost a connection: {error}");
            }
        }
    });
    Ok(port)
}

/// When one end closes the connection, the other one is closed too.
fn relay(client: TcpStream, socket: &Path, rtt: Duration) -> std::io::Result<()> {
    client.set_nodelay(true)?;
    let server = UnixStream::connect(socket)?;
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    let to_client = client.try_clone()?;
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Both);
    });
    std::thread::spawn(move || {
        let _ = delay(server, to_client, rtt);
        let _ = client.shutdown(Shutdown::Both);
    });
    Ok(())
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
