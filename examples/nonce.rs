//! script/with-postgres cargo run --example nonce
//!
//! A chat whose clients send a message again if they got no answer: transaction mode with a short retention. The
//! retry gets the message that the first attempt created.
//!
//! ```text
//! nonce n-1: Message { id: 1, text: "On my way" }, replayed: false
//! nonce n-1: Message { id: 1, text: "On my way" }, replayed: true
//! nonce n-2: Message { id: 2, text: "On my way" }, replayed: false
//! ```

use std::time::Duration;

use pg_idempotency::{Error, Idempotency, Key, Outcome};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

/// A client retries for seconds, not for a day. An expired record only costs space until the next sweep.
const RETENTION: Duration = Duration::from_secs(5 * 60);

#[derive(Debug, Serialize, Deserialize)]
struct Message {
    id: i64,
    text: String,
}

/// `nonce` is the client's, new for each message that its user writes.
async fn send(pool: &PgPool, author: &str, nonce: &str, text: &str) -> Result<Outcome<Message>, Error> {
    let key = Key::new(author, "message.send", nonce)?;
    // `run` takes a pool, and begins and commits its own transaction. This future may be dropped at any time.
    Idempotency::new()
        .retention(RETENTION)
        .run(pool, &key, text, async |conn| -> Result<Message, Error> {
            let id = sqlx::query_scalar("insert into message (author, text) values ($1, $2) returning id")
                .bind(author)
                .bind(text)
                .fetch_one(conn)
                .await?;
            Ok(Message { id, text: text.to_owned() })
        })
        .await
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&pool).await?;
    sqlx::raw_sql(
        "create table if not exists message (
            id bigint generated always as identity, author text not null, text text not null
        )",
    )
    .execute(&pool)
    .await?;

    for nonce in ["n-1", "n-1", "n-2"] {
        let outcome = send(&pool, "ada", nonce, "On my way").await?;
        let replayed = outcome.is_replayed();
        println!("nonce {nonce}: {:?}, replayed: {replayed}", outcome.into_inner());
    }
    Ok(())
}
