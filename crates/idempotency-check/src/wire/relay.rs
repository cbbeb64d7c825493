use std::future::{Future, pending};
use std::io;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt as _, split};
use tokio::time::timeout;

use super::{Message, Stream};

/// How long a server may take to notice that its connection was closed. The server notices a closed connection only
/// after its current statement.
const CLOSING: Duration = Duration::from_secs(5);

/// What the relay does with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Sends the message after all gathered messages.
    Pass,
    /// Keeps the message, and sends it together with the next message that is passed. If the connection is closed
    /// first, the message is never sent.
    Gather,
    /// Sends this number of bytes of the message, and then closes both connections.
    Part(usize),
    /// Discards the message.
    Swallow,
    /// Closes both connections.
    Close,
}

/// Decides about each message. The relay waits for the decision, so a tap can hold a message. Messages of the other
/// direction still pass.
pub trait Tap: Sync {
    /// Decides about a message of the client. The first message is a start-up or cancel request.
    fn up(&self, message: &mut Message) -> impl Future<Output = Flow> + Send;

    /// Decides about a message of the server.
    fn down(&self, message: &mut Message) -> impl Future<Output = Flow> + Send;
}

/// Passes messages between the client and the server until the server closes its connection, or until the tap closes
/// both connections.
///
/// Requests for encryption are refused, so that the messages can be read. If the client is gone, the server still
/// receives and executes the messages that the client had sent. The server sees the end of the connection after these
/// messages.
pub async fn relay(mut client: Stream, server: Stream, tap: &impl Tap) {
    let Ok(first) = begin(&mut client).await else { return };
    let (mut from_client, mut to_client) = split(client);
    let (mut from_server, mut to_server) = split(server);
    let up = async {
        let mut gathered = Vec::new();
        let mut message = Ok(first);
        while let Ok(mut read) = message {
            match send(tap.up(&mut read).await, &read, &mut gathered, &mut to_server).await {
                Ok(true) => message = Message::read(&mut from_client).await,
                Ok(false) => return,
                // The server has closed the connection. Earlier messages of the server are still passed on to the
                // client.
                Err(_) => break,
            }
        }
        // The server may still execute messages that it has received. Afterwards, the server closes the connection.
        let _ = to_server.shutdown().await;
        pending().await
    };
    let down = async {
        let mut gathered = Vec::new();
        while let Ok(mut message) = Message::read(&mut from_server).await {
            // If the client is gone, the tap still sees the answer.
            if !send(tap.down(&mut message).await, &message, &mut gathered, &mut to_client).await.unwrap_or(true) {
                return;
            }
        }
    };
    tokio::select! { () = up => {}, () = down => {} }
    drop((from_client, to_client));
    // A TCP connection that is closed with unread bytes is reset. The server may then lose messages that it has not
    // read yet.
    let _ = to_server.shutdown().await;
    let _ = timeout(CLOSING, tokio::io::copy(&mut from_server, &mut tokio::io::sink())).await;
}

/// Reads the message that begins the session. Before this message, refuses each request for encryption.
async fn begin(client: &mut Stream) -> io::Result<Message> {
    loop {
        let first = Message::read_first(client).await?;
        if !first.is_encryption_request() {
            return Ok(first);
        }
        client.write_all(b"N").await?;
    }
}

/// Carries out the `flow`. Returns whether the connection goes on.
async fn send(
    flow: Flow,
    message: &Message,
    gathered: &mut Vec<u8>,
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<bool> {
    match flow {
        Flow::Pass => {
            gathered.extend(message.bytes());
            let written = to.write_all(gathered).await;
            gathered.clear();
            written?;
            to.flush().await?;
        }
        Flow::Gather => gathered.extend(message.bytes()),
        Flow::Part(bytes) => {
            gathered.extend(message.bytes().iter().take(bytes));
            to.write_all(gathered).await?;
            to.flush().await?;
            return Ok(false);
        }
        Flow::Swallow => {}
        Flow::Close => return Ok(false),
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, DuplexStream, duplex};

    use super::*;

    /// A tap that gathers Parse, closes at Terminate, sends three bytes of a Query, and swallows notices.
    struct Picky;

    impl Tap for Picky {
        async fn up(&self, message: &mut Message) -> Flow {
            match message.kind() {
                b'P' => Flow::Gather,
                b'X' => Flow::Close,
                b'Q' => Flow::Part(3),
                _ => Flow::Pass,
            }
        }

        async fn down(&self, message: &mut Message) -> Flow {
            if message.kind() == b'N' { Flow::Swallow } else { Flow::Pass }
        }
    }

    fn between() -> (DuplexStream, DuplexStream) {
        let ((client, at_client), (server, at_server)) = (duplex(1 << 16), duplex(1 << 16));
        tokio::spawn(async move { relay(Box::new(at_client), Box::new(at_server), &Picky).await });
        (client, server)
    }

    const STARTUP: [u8; 9] = [0, 0, 0, 9, 0, 3, 0, 0, 0];

    async fn all(mut from: DuplexStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).await.expect("read");
        bytes
    }

    #[tokio::test]
    async fn encryption_is_refused_and_the_start_up_passes_unchanged() {
        let (mut client, mut server) = between();
        client.write_all(Message::ssl_request().bytes()).await.expect("written");
        assert_eq!(client.read_u8().await.expect("an answer"), b'N');
        client.write_all(&STARTUP).await.expect("written");
        let mut read = [0; 9];
        server.read_exact(&mut read).await.expect("the start-up");
        assert_eq!(read, STARTUP);
    }

    #[tokio::test]
    async fn gathered_messages_are_sent_with_the_next_one_or_never() {
        let parse = Message::new(b'P', b"\0select 1\0\0\0");
        for (end, sent) in [(Message::new(b'S', b""), true), (Message::new(b'X', b""), false)] {
            let (mut client, server) = between();
            client.write_all(&STARTUP).await.expect("written");
            client.write_all(&[parse.bytes(), end.bytes()].concat()).await.expect("written");
            drop(client);
            let expected = if sent { [&STARTUP, parse.bytes(), end.bytes()].concat() } else { STARTUP.to_vec() };
            assert_eq!(all(server).await, expected);
        }
    }

    #[tokio::test]
    async fn a_part_is_sent_and_both_connections_are_closed() {
        let (mut client, server) = between();
        client.write_all(&STARTUP).await.expect("written");
        client.write_all(Message::new(b'Q', b"select 1\0").bytes()).await.expect("written");
        assert_eq!(all(server).await, [&STARTUP[..], b"Q\0\0"].concat());
        assert!(all(client).await.is_empty());
    }

    #[tokio::test]
    async fn a_server_receives_what_a_client_sent_before_it_was_gone() {
        let (mut client, mut server) = between();
        client.write_all(&[&STARTUP, Message::new(b'S', b"").bytes()].concat()).await.expect("written");
        drop(client);
        let answer = Message::new(b'Z', b"I");
        server.write_all(answer.bytes()).await.expect("the relay still reads");
        assert_eq!(all(server).await, [&STARTUP[..], b"S\0\0\0\x04"].concat());
    }

    #[tokio::test]
    async fn a_swallowed_message_is_missing_in_the_answer() {
        let (mut client, mut server) = between();
        client.write_all(&STARTUP).await.expect("written");
        for message in [Message::new(b'N', b"\0"), Message::new(b'Z', b"I")] {
            server.write_all(message.bytes()).await.expect("written");
        }
        drop(server);
        assert_eq!(all(client).await, b"Z\0\0\0\x05I");
    }
}
