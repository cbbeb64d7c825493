//! As much of Redis as the comparison needs: a server of this run's own, and a client for it.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpStream, UnixStream};

#[derive(Clone, Debug)]
pub(crate) enum Address {
    Socket(PathBuf),
    Port(u16),
}

/// Without persistence, which is as fast as it gets, and forgets every key when it restarts.
pub(crate) struct Server {
    process: Child,
    directory: PathBuf,
}

impl Server {
    /// `REDIS_SERVER` names the program; `None` where the variable is not set.
    pub(crate) async fn start() -> anyhow::Result<Option<Self>> {
        let Some(program) = std::env::var_os("REDIS_SERVER").filter(|program| !program.is_empty()) else {
            return Ok(None);
        };
        let directory = std::env::temp_dir().join(format!("pgi-redis.{}", std::process::id()));
        std::fs::create_dir(&directory)?;
        let process = Command::new(program)
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(directory.join("socket"))
            .current_dir(&directory)
            .stdout(Stdio::null())
            .spawn()
            .context("REDIS_SERVER")?;
        let server = Self { process, directory };
        for _ in 0..100 {
            if Redis::connect(&server.address()).await.is_ok() {
                return Ok(Some(server));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        bail!("redis-server did not start")
    }

    pub(crate) fn address(&self) -> Address {
        Address::Socket(self.directory.join("socket"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has nothing to save.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

pub(crate) struct Redis {
    stream: BufReader<Box<dyn Stream>>,
    request: Vec<u8>,
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
        Ok(Self { stream: BufReader::new(stream), request: Vec::new() })
    }

    /// One command, one round trip; the text of the answer, `None` where there is nothing.
    pub(crate) async fn command(&mut self, words: &[&str]) -> anyhow::Result<Option<String>> {
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
                // With the end of the line.
                let mut text = vec![0; length.parse::<usize>()? + 2];
                self.stream.read_exact(&mut text).await?;
                text.truncate(text.len() - 2);
                Ok(Some(String::from_utf8(text)?))
            }
            _ => bail!("Redis says {line}"),
        }
    }
}
