//! The option *fewest round trips*: the message that begins the transaction contains the claim, and the message that
//! commits contains the completion. Only this file calls the functions `claim` and `complete` of the schema.
//!
//! Such a message takes no parameters, so its values are literals. [`text`] and [`bytes`] write them so that no value can
//! end its literal.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool, PgTransaction, SqlSafeStr as _};

use super::protocol::Call;
use crate::error::sqlstate;
use crate::outcome::{Outcome, decode, encode};
use crate::record::{Claim, Record, Response, Terms, draw_token};
use crate::session::{Attempt, COMMIT_OUTERMOST, Connections, NotBegun, Opening, begin_and_lend, commit_outermost};
use crate::{Error, Fingerprint, Key};

/// The SQLSTATEs with which `idempotency.complete` fails.
const NOT_IN_TRANSACTION: &str = "IK002";
const OUTLIVED_RETENTION: &str = "IK003";

/// The longest response that goes into a message. In a longer response, the hexadecimal digits (two for each byte) and
/// their decoding cost more than a round trip (measured; DESIGN.md).
const MOST_INLINE: usize = 16 * 1024;

impl Call<'_> {
    /// As [`on_pool`](Self::on_pool) with [`ensure`](Self::ensure), in fewer round trips. If the key is taken, the call
    /// looks for a response, and then goes the plain way, which costs up to two more.
    pub(super) async fn run_in_fewest<T, E, F>(&self, pool: &PgPool, mut perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let (record, terms) = (self.record, &self.terms);
        let mut connections = Connections::of(pool);
        let mut conn = connections.next().await?;
        loop {
            if let Some(replayed) = self.replay_first(&mut conn).await {
                return Ok(replayed?);
            }
            let (claim, opening) = claiming(record, terms)?;
            let work = async |mut transaction: PgTransaction<'_>, perform: F| {
                let performed = match perform(&mut transaction).await {
                    Ok(response) => encode(&response).map(|encoded| (response, encoded)).map_err(E::from),
                    Err(error) => Err(error),
                };
                match performed {
                    Ok((response, encoded)) => {
                        complete_and_commit(transaction, record, claim, &encoded).await?;
                        Ok(Outcome::Performed(response))
                    }
                    Err(error) => {
                        let _ = transaction.rollback().await;
                        Err(error)
                    }
                }
            };
            match begin_and_lend(&mut conn, &opening, perform, work).await {
                Attempt::NotBegun(NotBegun::Foreign, uncalled) => {
                    perform = uncalled;
                    conn = connections.replace(conn).await?;
                }
                Attempt::NotBegun(NotBegun::Taken, uncalled) => {
                    if let Some(response) = record.select_first(&mut conn, terms).await {
                        return Ok(Outcome::Replayed(decode(&response)?));
                    }
                    let plain = async |conn: &mut PgConnection| self.ensure(conn, uncalled).await;
                    return connections.in_transaction(conn, &Opening::Plain, plain).await;
                }
                attempt => return attempt.into_result(),
            }
        }
    }
}

/// Stores the response and commits: in one message if the response is short. If either fails, rolls back.
///
/// In one message, an error of the first statement keeps the server from reaching the COMMIT, which is that of
/// [`commit_outermost`].
pub(crate) async fn complete_and_commit(
    mut transaction: PgTransaction<'_>,
    record: Record<'_>,
    claim: Claim,
    response: &Response,
) -> Result<(), Error> {
    let length = response.body.as_ref().map_or(0, Vec::len) + response.headers.as_ref().map_or(0, String::len);
    let completed = if length > MOST_INLINE || record.deployment.distributed {
        match record.complete(&mut transaction, claim, response).await {
            Ok(()) => return commit_outermost(transaction).await,
            Err(error) => Err(error),
        }
    } else {
        let sql = format!("{}; {COMMIT_OUTERMOST}", complete_text(record.key, claim, response));
        transaction.execute(AssertSqlSafe(sql)).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
            Some(NOT_IN_TRANSACTION) => Error::NotInTransaction,
            Some(OUTLIVED_RETENTION) => Error::OutlivedRetention,
            // This may be an error of the COMMIT: the caller's deferred constraints and triggers run there.
            _ => error.into(),
        })
    };
    if completed.is_err() {
        // Awaited, so that an immediate retry finds the key free.
        let _ = transaction.rollback().await;
    }
    completed
}

/// The message that claims and begins.
pub(crate) fn claiming(record: Record<'_>, terms: &Terms) -> Result<(Claim, Opening), Error> {
    let token = draw_token()?;
    let message = format!(
        "select idempotency.claim({key}, '{token}', {fingerprint}, {retention}, {lease}, {mode}, '{lock_id}'); begin",
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
        "select idempotency.complete({key}, '{token}', {body}, {status}, {headers})",
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

/// A literal of a bytea. PostgreSQL reads it while it parses the message, which costs less than a function call.
fn bytes(value: Option<&[u8]>) -> String {
    value.map_or_else(null, |value| format!("E'\\\\x{}'", hex::encode(value)))
}

/// A literal of a text. Quotes, backslashes and control characters are written as `\u` and four digits. A text beyond
/// ASCII is converted from its bytes, because a database in SQL_ASCII refuses `\u` there.
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
    // The unit is the second, because PostgreSQL 13 and 14 read no number of microseconds above 2^31. The interval has
    // no days, like an interval that is bound as a parameter.
    value.map_or_else(null, |value| format!("'{}.{:06} seconds'", value.as_secs(), value.subsec_micros()))
}

fn null() -> String {
    "null".to_owned()
}
