//! A client of both transports, and its view of the database.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use futures_util::{SinkExt as _, StreamExt as _};
use serde::Deserialize;
use serde_json::Value;
use sqlx::{PgPool, Postgres, Transaction};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_tungstenite::tungstenite::{ClientRequestBuilder, Message as Frame};
use tokio_tungstenite::{WebSocketStream, client_async};

/// How often to look whether the server is in the middle.
const GATE_PACE: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug)]
pub(crate) enum Transport {
    Http,
    Socket,
}

pub(crate) struct Client {
    address: SocketAddr,
    /// A pool of connections, kept alive between requests.
    http: reqwest::Client,
    pool: PgPool,
    run: String,
}

/// One author's line to the server, ready to be asked over.
pub(crate) enum Line {
    Http { http: reqwest::Client, url: String, author: String },
    Socket(Box<WebSocketStream<TcpStream>>),
}

/// What came back, which is the same over both.
#[derive(Deserialize)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

impl Client {
    pub(crate) fn new(address: SocketAddr, pool: PgPool, run: String) -> anyhow::Result<Self> {
        // A proxy for the outside world has no business between this client and 127.0.0.1.
        let http = reqwest::Client::builder().no_proxy().build()?;
        Ok(Self { address, http, pool, run })
    }

    /// The records of earlier runs are remembered for five minutes.
    pub(crate) fn author(&self, name: &str) -> String {
        format!("{}-{name}", self.run)
    }

    pub(crate) async fn open(&self, transport: Transport, author: &str) -> anyhow::Result<Line> {
        let (address, author) = (self.address, author.to_owned());
        Ok(match transport {
            Transport::Http => {
                Line::Http { http: self.http.clone(), url: format!("http://{address}/messages"), author }
            }
            Transport::Socket => {
                let uri = format!("ws://{address}/socket").parse()?;
                let request = ClientRequestBuilder::new(uri).with_header("X-User-ID", author);
                let (socket, _) = client_async(request, TcpStream::connect(address).await?).await?;
                Line::Socket(Box::new(socket))
            }
        })
    }

    /// Moves all that this author has done so far into the past: the messages, and the claims of their nonces.
    pub(crate) async fn pass_time(&self, author: &str, seconds: f64) -> sqlx::Result<()> {
        let sql = "
            with moved as (
                update idempotency.record
                set claimed_at = claimed_at - make_interval(secs => $2::float8),
                    completed_at = completed_at - make_interval(secs => $2::float8),
                    expires_at = expires_at - make_interval(secs => $2::float8)
                where scope = $1::text
            )
            update message
            set created_at = created_at - make_interval(secs => $2::float8)
            where author = $1::text
        ";
        sqlx::query(sql).bind(author).bind(seconds).execute(&self.pool).await.map(drop)
    }

    /// A gate in the middle of the server's work: until this transaction ends, the nonce is claimed and its message
    /// waits.
    pub(crate) async fn no_inserts(&self) -> sqlx::Result<Transaction<'static, Postgres>> {
        let mut gate = self.pool.begin().await?;
        sqlx::query("lock table message in share mode").execute(&mut *gate).await?;
        Ok(gate)
    }

    /// Returns when this many of the run's connections wait, for the gate or for one that does.
    pub(crate) async fn all_waiting(&self, connections: i64) -> sqlx::Result<()> {
        let sql = "
            select count(*)
            from pg_stat_activity
            where application_name = current_setting('application_name') and wait_event_type = 'Lock'
        ";
        while sqlx::query_scalar::<_, i64>(sql).fetch_one(&self.pool).await? < connections {
            sleep(GATE_PACE).await;
        }
        Ok(())
    }

    /// How many messages these authors have in the table, and how many records.
    pub(crate) async fn stored(&self, authors: &[&String]) -> sqlx::Result<(i64, i64)> {
        let sql = "
            select
                (select count(*) from message where author = any($1::text[])),
                (select count(*) from idempotency.record where scope = any($1::text[]))
        ";
        sqlx::query_as(sql).bind(authors).fetch_one(&self.pool).await
    }
}

impl Line {
    /// Sends these bytes as a message, and nothing else: the client's JSON is part of what is tried.
    pub(crate) async fn ask(&mut self, message: &str) -> anyhow::Result<Answer> {
        match self {
            Self::Http { http, url, author } => {
                let request = http.post(&*url).header("X-User-ID", &*author).header("Content-Type", "application/json");
                let response = request.body(message.to_owned()).send().await?;
                Ok(Answer { status: response.status().as_u16(), body: response.json().await? })
            }
            Self::Socket(socket) => {
                socket.send(Frame::text(message)).await?;
                match socket.next().await.context("the server has closed the socket")?? {
                    Frame::Text(json) => Ok(serde_json::from_str(&json)?),
                    other => bail!("the server has sent {other:?}"),
                }
            }
        }
    }

    pub(crate) async fn close(self) -> anyhow::Result<()> {
        if let Self::Socket(mut socket) = self {
            (*socket).close(None).await?;
        }
        Ok(())
    }
}
