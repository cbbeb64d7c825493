//! The frames of HTTP/2 (RFC 9113), for a peer that writes several of them at once and ends a stream where it likes.

use axum::Router;
use rig::gate::PATIENCE;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub(crate) const NO_ERROR: u32 = 0;
pub(crate) const INTERNAL_ERROR: u32 = 2;
pub(crate) const CANCEL: u32 = 8;

const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short frame").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

pub(crate) fn settings() -> Vec<u8> {
    frame(SETTINGS, 0, 0, &[])
}

/// The headers of the first stream, as literals without an index (RFC 7541).
pub(crate) fn headers(fields: &[(&str, &str)], end: bool) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            let length = u8::try_from(text.len()).ok().filter(|length| *length < 127);
            block.push(length.expect("a short header"));
            block.extend(text.as_bytes());
        }
    }
    frame(HEADERS, END_HEADERS | if end { END_STREAM } else { 0 }, 1, &block)
}

pub(crate) fn data(text: &str) -> Vec<u8> {
    frame(DATA, 0, 1, text.as_bytes())
}

pub(crate) fn reset(code: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, 1, &code.to_be_bytes())
}

/// Reads frames up to the first one of this kind and with these flags.
async fn read_until(socket: &mut TcpStream, kind: u8, flags: u8) {
    let reading = async {
        loop {
            let mut head = [0; 9];
            socket.read_exact(&mut head).await.expect("a frame");
            let mut payload =
                vec![0; usize::try_from(u32::from_be_bytes([0, head[0], head[1], head[2]])).expect("fits")];
            socket.read_exact(&mut payload).await.expect("its payload");
            if head[3] == kind && head[4] & flags == flags {
                return;
            }
        }
    };
    timeout(PATIENCE, reading).await.expect("in time");
}

pub(crate) async fn until_headers(socket: &mut TcpStream) {
    read_until(socket, HEADERS, 0).await;
}

/// Returns once the peer has read all frames before this call.
pub(crate) async fn until_read(socket: &mut TcpStream) {
    socket.write_all(&frame(PING, 0, 0, &[0; 8])).await.expect("sent");
    read_until(socket, PING, ACK).await;
}

/// A service on a real socket, until this value is dropped.
pub(crate) struct Served {
    address: std::net::SocketAddr,
    serving: JoinHandle<()>,
}

impl Served {
    pub(crate) async fn of(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let serving = tokio::spawn(async { axum::serve(listener, app).await.expect("served") });
        Self { address, serving }
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("connected")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.serving.abort();
    }
}
