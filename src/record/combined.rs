//! Statements that share a message with BEGIN or COMMIT, and so cost no round trip of their own.
//!
//! Such a message is a text, of several statements, to which nothing can be bound: values stand in it as digits, decimal or
//! hexadecimal, and as nothing else. Nothing in it is prepared either; so its statements are functions of the schema, whose
//! plans the server keeps. What they do to the table is word for word [`Record::claim`] and [`Record::complete`], and a test
//! compares them.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Executor, PgConnection};

use super::claim::{REJECT_WAIT, draw_token, lock_timeout};
use super::{Claim, Record, Response, Terms, Unmet};
use crate::error::sqlstate;
use crate::{Error, Fingerprint, InFlight};

/// What the functions of the schema fail with.
const TAKEN: &str = "IK001";
const NOT_IN_TRANSACTION: &str = "IK002";
const OUTLIVED_RETENTION: &str = "IK003";

/// The longest body that is put into a text. Above it, twice the bytes and their decoding cost more than a round trip.
const MOST_INLINE: usize = 16 * 1024;

/// Whether an opening with a claim failed because the key is taken: by whom and for how long, the plain claim will tell.
pub(crate) fn is_taken(error: &sqlx::Error) -> bool {
    sqlstate(error).as_deref() == Some(TAKEN)
}

impl Response {
    /// Whether it can be stored by [`Record::complete_and_commit`].
    pub(crate) fn fits_inline(&self) -> bool {
        self.body.as_ref().map_or(0, Vec::len) + self.headers.as_ref().map_or(0, String::len) <= MOST_INLINE
    }
}

impl Record<'_> {
    /// A claim as a text, which fails where the key [is taken](is_taken).
    pub(crate) fn claim_inline(self, terms: &Terms) -> Result<(Claim, String), Error> {
        let (function, limit) = match terms.in_flight {
            InFlight::Wait(limit) => ("claim_waiting", limit),
            InFlight::Reject => ("claim_rejecting", REJECT_WAIT),
        };
        let token = draw_token()?;
        let sql = format!(
            "select idempotency.{function}({key}, {fingerprint}, '{token}', {retention}, '{lock_id}', {limit}, {mode}, {lease})",
            key = self.key_inline(),
            fingerprint = bytes(terms.fingerprint.as_ref().map(Fingerprint::as_bytes)),
            retention = interval(Some(terms.retention)),
            lock_id = self.key.lock_id(),
            limit = text(Some(&lock_timeout(limit))),
            mode = text(Some(terms.mode.as_str())),
            lease = interval(terms.lease),
        );
        Ok((Claim { token, attempt: 1 }, sql))
    }

    /// [`complete`](Self::complete) and COMMIT in one message: none without the other, because an error of the first keeps
    /// the second from being reached.
    ///
    /// AND CHAIN, because sqlx goes on counting a transaction: the empty one that it then rolls back holds nothing, neither
    /// lock nor snapshot. Where this fails, none may be left: a ROLLBACK is then harmless.
    pub(crate) async fn complete_and_commit(
        self,
        conn: &mut PgConnection,
        claim: Claim,
        response: &Response,
    ) -> Result<Result<(), Unmet>, Error> {
        let sql = format!(
            "select idempotency.complete({key}, '{token}', {body}, {status}, {headers}); commit and chain",
            key = self.key_inline(),
            token = claim.token,
            body = bytes(response.body.as_deref()),
            status = response.status.map_or_else(null, |status| format!("'{status}'")),
            headers = text(response.headers.as_deref()),
        );
        match conn.execute(AssertSqlSafe(sql)).await {
            Ok(_) => Ok(Ok(())),
            Err(error) => match sqlstate(&error).as_deref() {
                Some(NOT_IN_TRANSACTION) => Ok(Err(Unmet::NotInTransaction)),
                Some(OUTLIVED_RETENTION) => Ok(Err(Unmet::OutlivedRetention)),
                // It may be an error of the COMMIT, and so of the caller's own deferred constraints and triggers.
                _ => Err(error.into()),
            },
        }
    }

    fn key_inline(self) -> String {
        let [scope, operation, value] =
            [self.key.scope(), self.key.operation(), self.key.value()].map(|part| text(Some(part)));
        format!("{scope}, {operation}, {value}")
    }
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
