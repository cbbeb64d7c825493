use std::io;
use std::path::PathBuf;

use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// A connection over TCP, TLS or a Unix socket.
pub type Stream = Box<dyn Duplex>;

/// The traits that a [`Stream`] has.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Duplex for T {}

/// The address at which a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A host name or an IP address, and a port.
    Tcp(String, u16),
    /// The path of the socket itself, not of its directory.
    Unix(PathBuf),
}

impl Address {
    /// The address in these options.
    #[must_use]
    pub fn of(options: &PgConnectOptions) -> Self {
        let (host, port) = (options.get_host(), options.get_port());
        match options.get_socket() {
            Some(directory) => Self::Unix(directory.join(format!(".s.PGSQL.{port}"))),
            None if host.starts_with('/') => Self::Unix(PathBuf::from(host).join(format!(".s.PGSQL.{port}"))),
            None => Self::Tcp(host.to_owned(), port),
        }
    }

    /// Opens a connection without encryption.
    ///
    /// # Errors
    ///
    /// Fails if no server listens at this address.
    pub async fn connect(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(host, port) => {
                let stream = TcpStream::connect((host.trim_matches(['[', ']']), *port)).await?;
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
            Self::Unix(socket) => Ok(Box::new(UnixStream::connect(socket).await?)),
        }
    }
}
