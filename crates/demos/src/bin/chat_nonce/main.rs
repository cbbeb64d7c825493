//! Proves that a message with a nonce is created once, although its retry comes over another transport, in another
//! spelling, or with another text.
//!
//! ```sh
//! cargo run -p demos --bin chat_nonce # on a temporary PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! HTTP and the WebSocket ([`transports`]) both call one function, [`message::create`], which uses the crate. The file
//! [`nonce`] describes which nonces are valid.

mod client;
mod message;
mod nonce;
mod transports;

use std::process::ExitCode;
use std::time::Duration;

use demos::books::Books;
use demos::client::Tally;
use demos::gate::Gate;
use demos::schema::Schema;
use demos::server::Server;
use sqlx::PgPool;
use tokio::task::JoinSet;

use client::Client;
use client::Transport::{self, Http, Socket};

const LIMIT: Duration = Duration::from_secs(60);

/// Fewer than the storm has requests: its duplicates wait for a connection, as they would in a service.
const CONNECTIONS: u32 = 16;
const STORM: usize = 200;

/// In JSON. The last two are integers without all their digits: perhaps the lost ones tell two nonces apart.
const INVALID_NONCES: [&str; 8] =
    [r#""""#, r#""abcdefghijklmnopqrstuvwxyz""#, r#""a\u0000b""#, "true", "[]", "{}", "1.0", "18446744073709551616"];

fn main() -> ExitCode {
    demos::program::run("chat_nonce", message::TABLES, LIMIT, demo)
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let server = Server::start(transports::router(schema.pool(CONNECTIONS).await?)).await?;
    let client = Client { url: server.url.clone(), http: demos::client::client() };
    let script = Script { schema, pool: schema.pool(2).await?, client };
    script.not_enforced(books).await?;
    script.repeats(books).await?;
    script.spellings(books).await?;
    script.two_authors(books).await?;
    script.invalid(books).await?;
    script.storm(books).await?;
    drop(script);
    server.stop().await
}

struct Script<'a> {
    schema: &'a Schema,
    pool: PgPool,
    client: Client,
}

/// A message whose nonce is enforced. The nonce is JSON.
fn enforced(content: &str, nonce: &str) -> String {
    format!(r#"{{"content":"{content}","nonce":{nonce},"enforce_nonce":true}}"#)
}

impl Script<'_> {
    /// Sends each message over a new connection, as a client does that has lost the one before.
    async fn ask_all(&self, author: &str, asked: &[(Transport, String)]) -> anyhow::Result<Tally> {
        let mut tally = Tally::default();
        for (transport, message) in asked {
            tally.count(&self.client.open(*transport, author).await?.ask(message.clone()).await?);
        }
        Ok(tally)
    }

    /// Compares the author's rows and records with the expected ones.
    async fn check_stored(&self, books: &mut Books, author: &str, messages: i64, records: i64) -> anyhow::Result<()> {
        for (what, sql, expected) in [
            ("messages in the table", "select count(*) from message where author = $1::text", messages),
            ("records", "select count(*) from records where scope = $1::text", records),
        ] {
            let counted: i64 = sqlx::query_scalar(sql).bind(author).fetch_one(&self.pool).await?;
            books.check(what, counted, expected);
        }
        Ok(())
    }

    async fn not_enforced(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("A nonce that is not enforced is not remembered");
        let ada = self.schema.scope("not-enforced");
        let message = r#"{"content":"hello","nonce":"n-1"}"#.to_owned();
        let asked = [(Http, message.clone()), (Socket, message), (Http, enforced("hello", r#""n-1""#))];
        books.check("answers", self.ask_all(&ada, &asked).await?, "3 × 201");
        self.check_stored(books, &ada, 3, 1).await
    }

    async fn repeats(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("Repeats over either transport, with another text: the first message");
        let ada = self.schema.scope("repeats");
        let message = |hour: usize| enforced(&format!("see you at {hour}"), r#""n-1""#);
        let asked = [(Http, message(8)), (Socket, message(8)), (Socket, message(9)), (Http, message(10))];
        let tally = self.ask_all(&ada, &asked).await?;
        books.check("answers", &tally, "3 × 200, 1 × 201");
        books.check("different messages", tally.different(), 1);
        self.check_stored(books, &ada, 1, 1).await
    }

    async fn spellings(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("1 and \"1\" are one nonce, and 01 is another");
        let ada = self.schema.scope("spellings");
        let nonces = ["1", r#""1""#, r#""18446744073709551615""#, "18446744073709551615", r#""01""#, r#""\u00301""#];
        let asked = nonces.map(|nonce| (if nonce.starts_with('"') { Socket } else { Http }, enforced("hello", nonce)));
        let tally = self.ask_all(&ada, &asked).await?;
        books.check("answers", &tally, "3 × 200, 3 × 201");
        books.check("different messages", tally.different(), 3);
        self.check_stored(books, &ada, 3, 3).await
    }

    async fn two_authors(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("One nonce, two authors");
        for author in ["ada", "bob"] {
            let author = self.schema.scope(author);
            let asked = [Http, Socket].map(|transport| (transport, enforced("hello", r#""n-1""#)));
            books.check("answers", self.ask_all(&author, &asked).await?, "1 × 200, 1 × 201");
            self.check_stored(books, &author, 1, 1).await?;
        }
        Ok(())
    }

    /// Also where the nonce is not enforced: a nonce that is valid only until it is enforced would be a trap.
    async fn invalid(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene("Invalid nonces, and a misspelt member");
        let ada = self.schema.scope("invalid");
        let mut asked = Vec::new();
        for transport in [Http, Socket] {
            for nonce in INVALID_NONCES {
                asked.push((transport, enforced("hello", nonce)));
                asked.push((transport, format!(r#"{{"content":"hello","nonce":{nonce}}}"#)));
            }
            asked.push((transport, r#"{"content":"hello","nonce":"n-1","enforce_nounce":true}"#.to_owned()));
        }
        let refused = format!("{} × 400 invalid-message", asked.len());
        books.check("answers", self.ask_all(&ada, &asked).await?, refused);
        self.check_stored(books, &ada, 0, 0).await
    }

    /// The first request waits in the middle of its work until every connection of the server has a duplicate on it.
    /// Otherwise it would finish before the second one came, and a server that looks and then inserts would pass.
    async fn storm(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene(&format!("{STORM} requests at once over both transports, one nonce"));
        let ada = self.schema.scope("storm");
        // Opened before the gate is shut: a request behind it waits for five seconds at most.
        let mut lines = Vec::new();
        for number in 0..STORM {
            lines.push(self.client.open(if number % 2 == 0 { Http } else { Socket }, &ada).await?);
        }
        let gate = Gate::shut(&self.pool, "message").await?;
        let mut asking: JoinSet<_> = lines.into_iter().map(|line| line.ask(enforced("hello", "4711"))).collect();
        gate.reached_by(CONNECTIONS.into()).await?;
        gate.open().await?;
        let mut tally = Tally::default();
        while let Some(answer) = asking.join_next().await {
            tally.count(&answer??);
        }
        books.check("answers", &tally, format!("{} × 200, 1 × 201", STORM - 1));
        books.check("different messages", tally.different(), 1);
        self.check_stored(books, &ada, 1, 1).await
    }
}
