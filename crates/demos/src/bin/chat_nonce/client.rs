//! A client of both transports.

use anyhow::{Context as _, bail};
use demos::client::Answer;
use futures_util::{SinkExt as _, StreamExt as _};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::net::TcpStream;
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::{ClientRequestBuilder, Message as Frame};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Transport {
    Http,
    Socket,
}

pub(crate) struct Client {
    pub(crate) url: String,
    pub(crate) http: reqwest::Client,
}

impl Client {
    /// Sends this JSON as a message, over a new connection. It is text, because no encoder would write all that this demo
    /// sends.
    pub(crate) async fn ask(&self, transport: Transport, author: &str, message: String) -> anyhow::Result<Answer> {
        match transport {
            Transport::Http => {
                let request = self.http.post(format!("{}/messages", self.url)).header("X-User-ID", author);
                Ok(Answer::to(request.header("Content-Type", "application/json").body(message)).await)
            }
            Transport::Socket => self.ask_socket(author, message).await,
        }
    }

    async fn ask_socket(&self, author: &str, message: String) -> anyhow::Result<Answer> {
        let address = self.url.trim_start_matches("http://");
        let request = ClientRequestBuilder::new(format!("ws://{address}/socket").parse()?);
        let stream = TcpStream::connect(address).await?;
        let (mut socket, _) = client_async(request.with_header("X-User-ID", author), stream).await?;
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
