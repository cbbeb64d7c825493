//! The option *fewest round trips*: the claim in the message that begins the transaction, the completion in the one that
//! commits. Off the main path: nothing else in the crate needs this file, nor the two functions of the schema that it calls.
//!
//! Such a message is a text, to which nothing can be bound: values are digits in it, decimal or hexadecimal, and nothing else.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgTransaction, SqlSafeStr as _};

use super::protocol::Call;
use crate::error::sqlstate;
use crate::record::{Claim, Record, Response, Terms, draw_token};
use crate::session::{NotBegun, begin_and_lend, is_taken};
use crate::{Error, Fingerprint, Key, Outcome};

/// What `idempotency.complete` fails with.
const NOT_IN_TRANSACTION: &str = "IK002";
const OUTLIVED_RETENTION: &str = "IK003";

/// The longest response that is put into a text. Above it, twice the bytes and their decoding cost more than a round trip
/// (measured; DESIGN.md).
const MOST_INLINE: usize = 16 * 1024;

impl Call<'_> {
    /// As [`ensure_alone`](Call::ensure_alone), in fewer round trips. A key that is taken costs one more: the plain way then
    /// finds out what is there.
    pub(crate) async fn ensure_in_fewest<T, E, F>(
        &self,
        conn: &mut PgConnection,
        perform: &mut Option<F>,
    ) -> Result<Result<Outcome<T>, E>, Error>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let (record, terms) = (self.record, &self.terms);
        if let Some(replayed) = self.select_first(conn).await {
            return Ok(replayed);
        }
        let started = Instant::now();
        let (claim, claiming) = claim_text(record, terms)?;
        let begin = format!("{CHECK}; {claiming}; begin", CHECK = crate::session::CHECK);
        let ended = begin_and_lend(
            conn,
            AssertSqlSafe(begin).into_sql_str(),
            true,
            async |mut transaction: PgTransaction<'_>| {
                self.observe_claim(started);
                let perform = perform.take().ok_or(Error::UnknownTransaction)?;
                let (response, encoded) = match self.perform(&mut transaction, perform).await {
                    Ok(performed) => performed,
                    Err(error) => {
                        let _ = transaction.rollback().await;
                        return Err(error);
                    }
                };
                let completed = complete_and_commit(transaction, record, claim, &encoded).await;
                completed.map_err(|error| self.failed(error))?;
                Ok(Outcome::Performed(response))
            },
        )
        .await;
        match ended {
            Ok(ended) => Ok(ended),
            Err(NotBegun::Failed(error)) if is_taken(&error) => {
                self.selecting_first().ensure_alone(conn, perform).await
            }
            Err(NotBegun::Failed(error)) => Ok(Err(self.failed(Error::of_statement(error)).into())),
            Err(NotBegun::Foreign) => Err(Error::UnknownTransaction),
        }
    }
}

/// Stores the response and commits, in one message where the response is short; rolled back where either fails.
///
/// One message means: neither without the other, because an error of the first statement keeps the second from being reached.
/// AND CHAIN, because sqlx goes on counting a transaction. The chained one is empty and holds neither lock nor snapshot; the
/// ROLLBACK that sqlx queues for it goes out with the ping of the pool's release, and nobody waits for it.
pub(crate) async fn complete_and_commit(
    mut transaction: PgTransaction<'_>,
    record: Record<'_>,
    claim: Claim,
    response: &Response,
) -> Result<(), Error> {
    let length = response.body.as_ref().map_or(0, Vec::len) + response.headers.as_ref().map_or(0, String::len);
    let completed = if length > MOST_INLINE {
        match record.complete(&mut transaction, claim, response).await {
            Ok(()) => return Ok(transaction.commit().await?),
            Err(error) => Err(error),
        }
    } else {
        let sql = format!("{}; commit and chain", complete_text(record.key, claim, response));
        transaction.execute(AssertSqlSafe(sql)).await.map(drop).map_err(|error| match sqlstate(&error).as_deref() {
            Some(NOT_IN_TRANSACTION) => Error::NotInTransaction,
            Some(OUTLIVED_RETENTION) => Error::OutlivedRetention,
            // It may be an error of the COMMIT, and so of the caller's deferred constraints and triggers.
            _ => error.into(),
        })
    };
    if completed.is_err() {
        // Awaited, so that a retry that follows at once finds the key free.
        let _ = transaction.rollback().await;
    }
    completed
}

fn claim_text(record: Record<'_>, terms: &Terms) -> Result<(Claim, String), Error> {
    let token = draw_token()?;
    let text = format!(
        "select idempotency.claim({key}, {fingerprint}, '{token}', {retention}, '{lock_id}', {lease}, {mode})",
        key = key(record.key),
        fingerprint = bytes(terms.fingerprint.as_ref().map(Fingerprint::as_bytes)),
        retention = interval(Some(terms.retention)),
        lock_id = record.key.lock_id(),
        lease = interval(terms.lease),
        mode = text(Some(terms.mode.as_str())),
    );
    Ok((Claim { token, attempt: 1 }, text))
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

fn bytes(value: Option<&[u8]>) -> String {
    value.map_or_else(null, |value| format!("pg_catalog.decode('{}', 'hex')", hex::encode(value)))
}

fn text(value: Option<&str>) -> String {
    let text = |value| format!("pg_catalog.convert_from(pg_catalog.decode('{}', 'hex'), 'UTF8')", hex::encode(value));
    value.map_or_else(null, text)
}

fn interval(value: Option<Duration>) -> String {
    // Seconds, because PostgreSQL 13 and 14 read no number of microseconds past 2^31; no days, as for a bound parameter.
    value.map_or_else(null, |value| format!("'{}.{:06} seconds'", value.as_secs(), value.subsec_micros()))
}

fn null() -> String {
    "null".to_owned()
}
