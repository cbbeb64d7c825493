//! Proves that a message with a nonce is created once, although its retry comes over another transport, in another
//! spelling, or with another text.
//!
//! HTTP and the WebSocket ([`transports`]) both call one function, [`message::create`], which uses the crate. The file
//! [`nonce`] describes which nonces are valid.

mod client;
mod message;
mod nonce;
mod transports;

use std::process::ExitCode;

use demos::books::Books;
use demos::client::{Tally, storm};
use demos::gate::Gate;
use demos::schema::Schema;
use demos::service::serve;
use sqlx::PgPool;

use client::Client;
use client::Transport::{self, Http, Socket};

/// Fewer than the storm has requests: its duplicates wait for a connection, as they would in a service.
const CONNECTIONS: u32 = 16;
const STORM: usize = 200;

fn main() -> ExitCode {
    demos::program::run("chat_nonce", message::TABLES, demo)
}

async fn demo(schema: &Schema, books: &mut Books) -> anyhow::Result<()> {
    let url = serve(transports::router(schema.pool(CONNECTIONS).await?)).await?;
    let client = Client { url, http: demos::client::client() };
    let script = Script { schema, pool: schema.pool(2).await?, client };
    script.not_enforced(books).await?;
    script.repeats(books).await?;
    script.spellings(books).await?;
    script.storm(books).await
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
        let mut answers = Vec::new();
        for (transport, message) in asked {
            answers.push(self.client.ask(*transport, author, message.clone()).await?);
        }
        Ok(answers.into_iter().collect())
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

    /// The first request waits in the middle of its work until every connection of the server has a duplicate on it.
    /// Otherwise it would finish before the second one came, and a server that looks and then inserts would pass.
    async fn storm(&self, books: &mut Books) -> anyhow::Result<()> {
        books.scene(&format!("{STORM} requests at once over both transports, one nonce"));
        let ada = self.schema.scope("storm");
        let gate = Gate::shut(&self.pool, "message").await?;
        let asking = (0..STORM).map(|number| {
            let transport = if number % 2 == 0 { Http } else { Socket };
            self.client.ask(transport, &ada, enforced("hello", "4711"))
        });
        let opening = async {
            gate.reached_by(CONNECTIONS.into()).await?;
            gate.open().await
        };
        let (answers, opened) = tokio::join!(storm(STORM, asking), opening);
        opened?;
        let tally: Tally = answers.into_iter().collect::<anyhow::Result<_>>()?;
        books.check("answers", &tally, format!("{} × 200, 1 × 201", STORM - 1));
        books.check("different messages", tally.different(), 1);
        self.check_stored(books, &ada, 1, 1).await
    }
}
