//! A message, and the one function that creates it, whatever the transport.

use std::time::Duration;

use axum::http::StatusCode;
use pg_idempotency::{Idempotency, Key, Outcome};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use crate::nonce::Nonce;
use crate::problem::Problem;

/// Discord documents "the past few minutes". It must outlast a client's retries, and a person who walks through a
/// tunnel; and it should end before a client that counts its nonces from 1 after each start comes to the same one
/// again.
const WINDOW: Duration = Duration::from_secs(300);

/// A concurrent duplicate waits for the first request, up to 5 seconds: creating a message takes milliseconds, and the
/// client wants the message, not a reason to ask a third time.
const NONCES: Idempotency = match Idempotency::new().with_retention(WINDOW) {
    Ok(options) => options,
    Err(_) => panic!("five minutes are a retention"),
};

/// What Discord takes, in characters.
const LONGEST_CONTENT: usize = 2000;

/// A request, the same over both transports. A misspelt field is refused: whoever sends `"enforce_nounce"` would find
/// out from his readers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewMessage {
    content: String,
    nonce: Option<Nonce>,
    #[serde(default)]
    enforce_nonce: bool,
}

/// What the client gets, and the columns of its row. It is stored with the nonce too, and read back by whichever
/// release gets the retry, five minutes long: a new field needs `#[serde(default)]`.
#[derive(Serialize, Deserialize, sqlx::FromRow)]
pub(crate) struct Message {
    id: Uuid,
    author: String,
    content: String,
    /// `1` comes back as `"1"`: a client finds its message by it, and had better compare strings.
    nonce: Option<String>,
}

impl NewMessage {
    pub(crate) fn from_json(json: &[u8]) -> Result<Self, Problem> {
        let invalid = |detail: String| Problem::new(StatusCode::BAD_REQUEST, "invalid-message", detail);
        // serde would take `["hello", "n-1", true]` for a struct too.
        if !json.trim_ascii_start().starts_with(b"{") {
            return Err(invalid("a message is a JSON object".to_owned()));
        }
        let new: Self = serde_json::from_slice(json).map_err(|error| invalid(error.to_string()))?;
        // PostgreSQL's text has no U+0000.
        match new.content.chars().count() {
            1..=LONGEST_CONTENT if !new.content.contains('\0') => Ok(new),
            _ => Err(invalid(format!("the content must have 1 to {LONGEST_CONTENT} characters, none of them U+0000"))),
        }
    }
}

/// Creates a message, or returns the one that the author's nonce has created within the last 300 seconds.
///
/// - Not enforced: an ordinary message, whatever the nonce, which is not remembered either.
/// - Enforced, without a nonce: there is nothing to enforce, so an ordinary message too.
/// - Enforced, with a nonce: once per author, nonce and [`WINDOW`].
///
/// A client that hangs up drops this future: the message is rolled back, or its COMMIT was under way, and the retry
/// finds out which. Without a nonce nobody ever does, which is why a client that retries should enforce one.
pub(crate) async fn create_message(pool: &PgPool, author: &str, new: &NewMessage) -> Result<Outcome<Message>, Problem> {
    let (true, Some(nonce)) = (new.enforce_nonce, &new.nonce) else {
        return Ok(Outcome::Performed(insert(&mut *pool.acquire().await?, author, new).await?));
    };
    // No transport in its name: the retry may come over the other one.
    let key = Key::new(author, "message.create", nonce.as_str())?;

    // The body is left out of it, so that the same nonce with other content returns the message that there is, as
    // Discord documents. With the content as the body it would be `Error::KeyReused`, a refusal, which is right for a
    // payment. Here the author has changed a word between two attempts, the first of which everybody has read: told
    // "refused", his client sends it under a new nonce, and there they are, the two messages. Told which message there
    // is, it can offer an edit.
    NONCES.run(pool, &key, &(), async |conn| Ok(insert(conn, author, new).await?)).await
}

/// 201 for a message that this request has created, 200 for the one that an earlier request has.
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
