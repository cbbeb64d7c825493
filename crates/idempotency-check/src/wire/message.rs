//! The messages of both sides. The crate `postgres-protocol` does not parse the messages of a client.

use std::borrow::Cow;
use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _};

/// The longest message, in bytes. PostgreSQL itself refuses longer messages.
const LONGEST: usize = 1 << 30;

const SSL_REQUEST: u32 = 80_877_103;
const GSSENC_REQUEST: u32 = 80_877_104;
const CANCEL_REQUEST: u32 = 80_877_102;

/// One whole message, with its header. The first message of a client has no kind, and [`Message::kind`] returns 0 for
/// this message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    bytes: Vec<u8>,
    header: usize,
}

/// The content of an ErrorResponse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The SQLSTATE.
    pub code: String,
    /// The message, in the language of the server.
    pub message: String,
}

impl Message {
    /// A message of this kind with this body.
    #[must_use]
    pub fn new(kind: u8, body: &[u8]) -> Self {
        let mut message = Self { bytes: vec![kind; 5], header: 5 };
        message.set_body(body);
        message
    }

    /// Reads the next message of the client or of the server.
    ///
    /// # Errors
    ///
    /// Fails if the connection ends or breaks, or if the length is impossible.
    pub async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Self> {
        Self::read_after(5, from).await
    }

    /// Reads the first message of a client.
    ///
    /// # Errors
    ///
    /// Fails for the same reasons as [`Message::read`].
    pub async fn read_first(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Self> {
        Self::read_after(4, from).await
    }

    async fn read_after(header: usize, from: &mut (impl AsyncRead + Unpin)) -> io::Result<Self> {
        let mut bytes = vec![0; header];
        from.read_exact(&mut bytes).await?;
        let rest = (u32_at(&bytes, header - 4) as usize).checked_sub(4).filter(|&rest| rest <= LONGEST);
        let rest =
            rest.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "this is not PostgreSQL's protocol"))?;
        bytes.resize(header + rest, 0);
        from.read_exact(&mut bytes[header..]).await?;
        Ok(Self { bytes, header })
    }

    /// The bytes of the message, as they are sent.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The type of the message, such as `b'Q'`. The first messages of a connection have no type, and the result is 0.
    #[must_use]
    pub fn kind(&self) -> u8 {
        if self.header == 5 { self.bytes[0] } else { 0 }
    }

    /// The bytes of the message after its length field.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        &self.bytes[self.header..]
    }

    /// Replaces the body, and corrects the length.
    pub fn set_body(&mut self, body: &[u8]) {
        self.bytes.truncate(self.header);
        self.bytes.extend(body);
        let length = u32::try_from(body.len() + 4).unwrap_or(u32::MAX);
        self.bytes[self.header - 4..self.header].copy_from_slice(&length.to_be_bytes());
    }

    /// Whether the client requests encryption. The server answers with one byte. The client then sends another first
    /// message.
    #[must_use]
    pub fn is_encryption_request(&self) -> bool {
        self.kind() == 0 && matches!(u32_at(self.body(), 0), SSL_REQUEST | GSSENC_REQUEST)
    }

    /// Whether the client opened this connection only to cancel a statement of another connection.
    #[must_use]
    pub fn is_cancel_request(&self) -> bool {
        self.kind() == 0 && u32_at(self.body(), 0) == CANCEL_REQUEST
    }

    /// The `SSLRequest`: a client that wants TLS sends this message first.
    #[must_use]
    pub fn ssl_request() -> Self {
        let mut request = Self { bytes: vec![0; 4], header: 4 };
        request.set_body(&SSL_REQUEST.to_be_bytes());
        request
    }

    /// The text of a Query or a Parse.
    #[must_use]
    pub fn sql(&self) -> Option<Cow<'_, str>> {
        let text = match self.kind() {
            b'Q' => field(self.body(), 0),
            b'P' => field(self.body(), 1),
            _ => return None,
        };
        Some(String::from_utf8_lossy(text))
    }

    /// The name of the prepared statement in a Parse, Bind, Describe or Close message. The unnamed statement has an
    /// empty name.
    #[must_use]
    pub fn statement(&self) -> Option<Cow<'_, str>> {
        let name = match (self.kind(), self.body()) {
            (b'P', body) => field(body, 0),
            (b'B', body) => field(body, 1),
            (b'D' | b'C', [b'S', name @ ..]) => field(name, 0),
            _ => return None,
        };
        Some(String::from_utf8_lossy(name))
    }

    /// The state in a ReadyForQuery: `b'I'` outside a transaction, `b'T'` in a transaction, `b'E'` in a failed
    /// transaction.
    #[must_use]
    pub fn ready(&self) -> Option<u8> {
        (self.kind() == b'Z').then(|| self.body().first().copied().unwrap_or(b'I'))
    }

    /// The content of an ErrorResponse. `None` for another message.
    #[must_use]
    pub fn rejection(&self) -> Option<Rejection> {
        if self.kind() != b'E' {
            return None;
        }
        let of = |kind: u8| {
            let found = self.body().split(|&byte| byte == 0).find(|field| field.first() == Some(&kind));
            found.map(|field| String::from_utf8_lossy(&field[1..]).into_owned()).unwrap_or_default()
        };
        Some(Rejection { code: of(b'C'), message: of(b'M') })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |four| u32::from_be_bytes(*four))
}

/// Returns the field with this number. Each field ends with a zero byte.
fn field(bytes: &[u8], number: usize) -> &[u8] {
    bytes.split(|&byte| byte == 0).nth(number).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_message_is_read_whole() {
        let mut bytes = Message::new(b'Q', b"select 1\0").bytes().to_vec();
        bytes.extend(Message::new(b'P', b"s1\0select $1\0\0\0").bytes());
        let mut from = bytes.as_slice();
        let query = Message::read(&mut from).await.expect("a message");
        assert_eq!((query.kind(), query.sql().as_deref()), (b'Q', Some("select 1")));
        let parse = Message::read(&mut from).await.expect("a message");
        assert_eq!((parse.sql().as_deref(), parse.statement().as_deref()), (Some("select $1"), Some("s1")));
        assert!(Message::read(&mut from).await.is_err(), "the connection has ended");
    }

    #[tokio::test]
    async fn a_first_message_has_no_kind() {
        let request = Message::ssl_request();
        assert_eq!(request.bytes(), [0, 0, 0, 8, 4, 210, 22, 47]);
        let read = Message::read_first(&mut request.bytes()).await.expect("a message");
        assert_eq!(read.kind(), 0);
        assert!(read.is_encryption_request() && !read.is_cancel_request());
    }

    #[tokio::test]
    async fn an_impossible_length_is_refused() {
        for header in [[b'Q', 0, 0, 0, 3], [b'Q', 0xff, 0xff, 0xff, 0xff]] {
            let error = Message::read(&mut header.as_slice()).await.expect_err("refused");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn a_new_body_has_its_length() {
        let mut message = Message::new(b'Q', b"select 1\0");
        message.set_body(b"x\0");
        assert_eq!(message.bytes(), b"Q\0\0\0\x06x\0");
    }

    #[test]
    fn a_bind_names_its_statement_behind_its_portal() {
        assert_eq!(Message::new(b'B', b"portal\0stmt\0\0\0").statement().as_deref(), Some("stmt"));
        assert_eq!(Message::new(b'D', b"Pportal\0").statement(), None);
        assert_eq!(Message::new(b'C', b"Sstmt\0").statement().as_deref(), Some("stmt"));
    }

    #[test]
    fn an_error_gives_its_code_and_its_message() {
        let error = Message::new(b'E', b"SERROR\0C23505\0Mduplicate key\0\0");
        let rejection = Rejection { code: "23505".to_owned(), message: "duplicate key".to_owned() };
        assert_eq!(error.rejection(), Some(rejection));
        assert_eq!(Message::new(b'Z', b"T").ready(), Some(b'T'));
    }
}
