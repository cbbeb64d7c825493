//! A client of both transports.

use anyhow::{Context as _, bail};
use demos::client::Answer;
use futures_util::{SinkExt as _, StreamExt as _};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::{ClientRequestBuilder, Message as Frame};
use tokio_tungstenite::{WebSocketStream, client_async};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Transport {
    Http,
    Socket,
}

pub(crate) struct Client {
    pub(crate) url: String,
    pub(crate) http: reqwest::Client,
}

/// One author's connection.
pub(crate) enum Line {
    Http(Box<reqwest::RequestBuilder>),
    Socket(Box<WebSocketStream<TcpStream>>),
}

impl Client {
    pub(crate) async fn open(&self, transport: Transport, author: &str) -> anyhow::Result<Line> {
        match transport {
            Transport::Http => {
                let request = self.http.post(format!("{}/messages", self.url)).header("X-User-ID", author);
                Ok(Line::Http(Box::new(request.header("Content-Type", "application/json"))))
            }
            Transport::Socket => {
                let address = self.url.trim_start_matches("http://");
                let request = ClientRequestBuilder::new(format!("ws://{address}/socket").parse()?);
                let stream = TcpStream::connect(address).await?;
                let (socket, _) = client_async(request.with_header("X-User-ID", author), stream).await?;
                Ok(Line::Socket(Box::new(socket)))
            }
        }
    }
}

impl Line {
    /// Sends this JSON as a message. It is text, because no encoder would write all that this demo sends.
    pub(crate) async fn ask(self, message: String) -> anyhow::Result<Answer> {
        let mut socket = match self {
            Self::Http(request) => return Ok(Answer::to(request.body(message)).await),
            Self::Socket(socket) => *socket,
        };
        socket.send(Frame::text(message)).await?;
        let Frame::Text(json) = socket.next().await.context("the server has closed the socket")?? else {
            bail!("the server has not sent text");
        };
        #[derive(Deserialize)]
        struct Answered {
            status: u16,
            body: Box<RawValue>,
        }
        let Answered { status, body } = serde_json::from_str(&json)?;
        socket.close(None).await?;
        Ok(Answer { status: Some(status), text: body.get().to_owned(), ..Answer::default() })
    }
}
