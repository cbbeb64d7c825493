//! `RoundTrips::Fewest`: the message that begins the transaction contains the claim, and the message that commits
//! contains the completion. In Rust, only this file calls `claim_at_begin` and `store_response` of the schema.
//!
//! Such a message takes no parameters, so its values are literals. [`text`] and [`bytes`] write each literal so that
//! the value cannot end the literal.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Executor as _, PgConnection, SqlSafeStr as _};

use crate::error::sqlstate;
use crate::outcome::Response;
use crate::record::{Claim, Record, Terms, draw_token};
use crate::session::Opening;
use crate::{Error, Fingerprint, Key, Misuse};

/// Commits, and begins an empty transaction, because sqlx still counts an open transaction.
const COMMIT_AND_CHAIN: &str = "commit and chain";

/// The longest response that goes into a message. For a longer response, the hexadecimal digits (two for each byte) and
/// their decoding cost more than a round trip. A body of 256 KiB takes 5.7 ms in the text of a message, and 1.2 ms as a
/// parameter.
const MOST_INLINE: usize = 16 * 1024;

/// Stores the response and commits. A short response and the COMMIT go into one message. If the first statement of this
/// message fails, the server does not reach the COMMIT.
pub(super) async fn complete_and_chain(
    conn: &mut PgConnection,
    record: Record<'_>,
    claim: Claim,
    response: &Response,
) -> Result<(), Error> {
    let length = response.body.as_ref().map_or(0, Vec::len) + response.headers.as_ref().map_or(0, String::len);
    if length > MOST_INLINE || !record.deployment.saves_round_trips() {
        record.complete(conn, claim, response).await?;
        return commit_and_chain(conn).await;
    }
    let sql = format!("{}; {COMMIT_AND_CHAIN}", complete_text(record.key, claim, response));
    conn.execute(AssertSqlSafe(sql)).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        Some(sqlstate::CLAIM_ENDED) => Error::Misuse(Misuse::NotInTransaction),
        Some(sqlstate::RETENTION_ENDED) => Error::OutlivedRetention,
        // The error may come from the COMMIT, in which the caller's deferred constraints and triggers run.
        _ => error.into(),
    })
}

/// Commits the crate's transaction in plain SQL. sqlx does not notice this COMMIT and still counts an open
/// transaction, so the statement also begins a new transaction. The new transaction is empty, and holds neither a lock
/// nor a snapshot.
async fn commit_and_chain(conn: &mut PgConnection) -> Result<(), Error> {
    conn.execute(COMMIT_AND_CHAIN).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
        // The caller's code has ended the transaction.
        Some(sqlstate::NO_ACTIVE_TRANSACTION) => Error::Misuse(Misuse::NotInTransaction),
        _ => error.into(),
    })
}

pub(super) fn claiming(record: Record<'_>, terms: &Terms) -> Result<(Claim, Opening), Error> {
    let token = draw_token()?;
    let message = format!(
        "select /* pg_idempotency: claim */ idempotency.claim_at_begin(
            {key}, '{token}', {fingerprint}, {retention}, {lease}, {mode}, '{lock_id}'
        ); begin",
        key = key(record.key),
        fingerprint = bytes(terms.fingerprint.as_ref().map(Fingerprint::as_bytes)),
        retention = interval(Some(terms.retention)),
        lock_id = record.key.lock_id(),
        lease = interval(terms.lease),
        mode = text(Some(terms.mode.as_str())),
    );
    Ok((Claim { token, attempt: 1 }, Opening::Claiming(AssertSqlSafe(message).into_sql_str())))
}

fn complete_text(of: &Key, claim: Claim, response: &Response) -> String {
    format!(
        "select /* pg_idempotency: complete and commit */ idempotency.store_response(
            {key}, '{token}', {body}, {status}, {headers}
        )",
        key = key(of),
        token = claim.token,
        body = bytes(response.body.as_deref()),
        status = response.status.map_or_else(null, |status| format!("'{status}'")),
        headers = text(response.headers.as_deref()),
    )
}

fn key(key: &Key) -> String {
    let [scope, operation, value] = [key.scope(), key.operation(), key.value()].map(|part| text(Some(part)));
    format!("{scope}, {operation}, {value}")
}

/// A literal of type `bytea`. PostgreSQL reads the literal while it parses the message, which costs less than a
/// function call.
fn bytes(value: Option<&[u8]>) -> String {
    value.map_or_else(null, |value| format!("E'\\\\x{}'", hex::encode(value)))
}

/// A literal of type `text`. Quotes, backslashes and control characters are written as `\u` and four hexadecimal
/// digits. A text with characters outside ASCII is converted from its bytes, because a database in SQL_ASCII refuses
/// `\u` for such characters.
fn text(value: Option<&str>) -> String {
    let Some(value) = value else { return null() };
    if !value.is_ascii() {
        return format!("pg_catalog.convert_from({}, 'UTF8')", bytes(Some(value.as_bytes())));
    }
    let mut literal = String::with_capacity(value.len() + 3);
    literal.push_str("E'");
    for character in value.chars() {
        match character {
            '\'' | '\\' | '\0'..='\x1f' | '\x7f' => literal.push_str(&format!("\\u{:04X}", u32::from(character))),
            _ => literal.push(character),
        }
    }
    literal.push('\'');
    literal
}

fn interval(value: Option<Duration>) -> String {
    // The literal is in seconds, because PostgreSQL 13 and 14 cannot read a number of microseconds above 2^31. Like an
    // interval that is bound as a parameter, this interval has no days.
    value.map_or_else(null, |value| format!("'{}.{:06} seconds'", value.as_secs(), value.subsec_micros()))
}

fn null() -> String {
    "null".to_owned()
}
