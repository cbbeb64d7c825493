//! A message, and the one function that creates it, whatever the transport.

use std::time::Duration;

use axum::http::StatusCode;
use demos::problem::Problem;
use demos::schema::begin_exempt;
use pg_idempotency::{Idempotency, Key, Outcome};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use crate::nonce::Nonce;

pub(crate) const TABLES: &str = "
    create table message (
        id uuid primary key,
        author text not null,
        content text not null,
        -- Not unique: it may come again, without enforcement or after its retention.
        nonce text
    );
";

/// Discord documents "the past few minutes". It must outlast a client's retries, and it should end before a client
/// that counts its nonces from 1 after each start uses the same one again.
const RETENTION: Duration = Duration::from_secs(300);

/// Discord's limit, in characters.
const LONGEST_CONTENT: usize = 2000;

/// A request, the same over both transports. A misspelt member is refused: without its `enforce_nonce`, a client would
/// learn of its mistake from the readers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewMessage {
    content: String,
    nonce: Option<Nonce>,
    #[serde(default)]
    enforce_nonce: bool,
}

/// The response, and the columns of its row. It is stored with the nonce, and the next release of this program may read
/// it: a new member needs `#[serde(default)]`.
#[derive(Serialize, Deserialize, sqlx::FromRow)]
pub(crate) struct Message {
    id: Uuid,
    author: String,
    content: String,
    nonce: Option<String>,
}

/// Creates a message, or returns the one that the author's nonce has created in the last 300 seconds. Without an
/// enforced nonce it is an ordinary message, and the nonce is not remembered.
///
/// A client that hangs up drops this future: the message is rolled back, or its COMMIT was under way, and the retry
/// returns the right one of the two.
pub(crate) async fn create(pool: &PgPool, author: &str, json: &[u8]) -> Result<Outcome<Message>, Problem> {
    let invalid = |detail: String| Problem::new(StatusCode::BAD_REQUEST, "invalid-message", detail);
    let new: NewMessage = serde_json::from_slice(json).map_err(|error| invalid(error.to_string()))?;
    // PostgreSQL's text has no U+0000.
    if !(1..=LONGEST_CONTENT).contains(&new.content.chars().count()) || new.content.contains('\0') {
        return Err(invalid(format!("the content must have 1 to {LONGEST_CONTENT} characters, none of them U+0000")));
    }
    let (true, Some(nonce)) = (new.enforce_nonce, &new.nonce) else {
        // It has no key, so the table has to let it pass.
        let mut tx = begin_exempt(pool).await?;
        let message = insert(&mut tx, author, &new).await?;
        tx.commit().await?;
        return Ok(Outcome::Performed(message));
    };
    // The key names no transport, because the retry may come over the other one.
    let key = Key::new(author, "message.create", nonce.as_str())?;
    // The fingerprint leaves the content out, so the same nonce with other content returns the first message, as
    // Discord documents. With the content it would be `Error::KeyReused`, which is right for a payment. But here an
    // author who has changed a word between two attempts would send the edited text under a new nonce, and readers
    // would see both. With the first message, the client can offer an edit.
    let nonces = Idempotency::new().with_retention(RETENTION)?;
    nonces.run(pool, &key, &(), async |conn| Ok(insert(conn, author, &new).await?)).await
}

/// 201 for a message that this request has created, and 200 for an earlier one.
pub(crate) fn status(outcome: &Outcome<Message>) -> StatusCode {
    if outcome.is_replayed() { StatusCode::OK } else { StatusCode::CREATED }
}

async fn insert(conn: &mut PgConnection, author: &str, new: &NewMessage) -> sqlx::Result<Message> {
    sqlx::query_as(
        "
        insert into message (id, author, content, nonce)
        values ($1::uuid, $2::text, $3::text, $4::text)
        returning id, author, content, nonce
        ",
    )
    .bind(Uuid::new_v4())
    .bind(author)
    .bind(&new.content)
    .bind(new.nonce.as_ref().map(Nonce::as_str))
    .fetch_one(conn)
    .await
}
