//! The parts of Redis that the comparison needs: a server that belongs to this run, and a client for it.

use std::path::PathBuf;
use std::process::Command;

use anyhow::bail;
use rig::child::Kept;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpStream, UnixStream};

#[derive(Clone, Debug)]
pub(crate) enum Address {
    Socket(PathBuf),
    Port(u16),
}

/// It has no persistence, so it is as fast as possible, and forgets every key when it restarts.
pub(crate) struct Server {
    /// Stops and removes the server. It has said where its socket is.
    keeper: Kept,
}

impl Server {
    /// `REDIS_SERVER` names the program. Returns `None` if the variable is not set.
    pub(crate) fn start() -> anyhow::Result<Option<Self>> {
        let Some(program) = std::env::var_os("REDIS_SERVER").filter(|program| !program.is_empty()) else {
            return Ok(None);
        };
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../script/redis"));
        Ok(Some(Self { keeper: Kept::start(command.arg("serve").arg(program))? }))
    }

    pub(crate) fn address(&self) -> Address {
        Address::Socket(PathBuf::from(&self.keeper.said))
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

pub(crate) struct Redis {
    stream: BufReader<Box<dyn Stream>>,
    request: Vec<u8>,
    /// How many commands were sent.
    pub(crate) commands: usize,
}

impl Redis {
    pub(crate) async fn connect(address: &Address) -> std::io::Result<Self> {
        let stream: Box<dyn Stream> = match address {
            Address::Socket(path) => Box::new(UnixStream::connect(path).await?),
            Address::Port(port) => {
                let stream = TcpStream::connect(("127.0.0.1", *port)).await?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        };
        Ok(Self { stream: BufReader::new(stream), request: Vec::new(), commands: 0 })
    }

    /// One command is one round trip. Returns the text of the answer, and `None` for nil.
    pub(crate) async fn command(&mut self, words: &[&str]) -> anyhow::Result<Option<String>> {
        self.commands += 1;
        self.request.clear();
        self.request.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
        for word in words {
            self.request.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
        }
        self.stream.write_all(&self.request).await?;
        let mut line = String::new();
        self.stream.read_line(&mut line).await?;
        let line = line.trim_end();
        match line.split_at_checked(1) {
            Some(("+" | ":", text)) => Ok(Some(text.to_owned())),
            Some(("$", "-1")) => Ok(None),
            Some(("$", length)) => {
                // The two bytes are the end of the line.
                let mut text = vec![0; length.parse::<usize>()? + 2];
                self.stream.read_exact(&mut text).await?;
                text.truncate(text.len() - 2);
                Ok(Some(String::from_utf8(text)?))
            }
            _ => bail!("Redis says {line}"),
        }
    }
}
