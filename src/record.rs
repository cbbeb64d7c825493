//! Every SQL statement on `idempotency.record`, one function each.
//!
//! All of them are literals, but for those of [`fewest`](crate::fewest). They name the schema, cast each parameter (sqlx keeps
//! prepared statements by their text alone) and contain the whole key. Time is the database's: `statement_timestamp()` for what
//! expires, because `now()` is the start of the transaction.

mod claim;
mod complete;
mod inspect;
mod lease;
mod lock;
mod look;
mod mark;
mod rules;
mod setup;
mod sweep;

use std::time::Duration;

use sqlx::Postgres;
use sqlx::postgres::PgArguments;
use sqlx::postgres::types::PgInterval;
use sqlx::query::Query;

use crate::{Deployment, Key};

pub(crate) use claim::{Awaited, Claim, TakeOver, Terms, draw_token, wait_for_row};
pub(crate) use inspect::{groups, size, unsettled};
pub(crate) use lease::Actor;
pub(crate) use lock::{INSTALLER, SINGLE_RUNNER, holder, try_lock};
pub(crate) use look::{Found, Lease, Standing};
pub(crate) use mark::{MarkBatch, Seen};
pub(crate) use rules::{Broken, broken_rules};
pub(crate) use setup::{commit_settings, response_compression, setup, without_autovacuum};
pub(crate) use sweep::{Batch, Due, count_due, leaves, oldest_due, sweep, sweep_distributed};

/// The record of one key.
#[derive(Clone, Copy)]
pub(crate) struct Record<'k> {
    pub(crate) key: &'k Key,
    pub(crate) deployment: Deployment,
}

/// A response as its record holds it: a body of JSON text alone, or, over HTTP, a status, headers and a body.
///
/// A status without a body is what is left of an HTTP response that was not to be kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: Option<i16>,
    /// JSON text.
    pub(crate) headers: Option<String>,
    pub(crate) body: Option<Vec<u8>>,
}

impl Record<'_> {
    /// A statement on this record, whose parameters $1 to $3 are the key.
    fn query(&self, sql: &'static str) -> Query<'_, Postgres, PgArguments> {
        sqlx::query(sql)
            .persistent(self.deployment.prepared)
            .bind(self.key.scope())
            .bind(self.key.operation())
            .bind(self.key.value())
    }
}

/// Microseconds only: days and months would depend on the session's time zone.
fn interval(duration: Duration) -> PgInterval {
    PgInterval { months: 0, days: 0, microseconds: i64::try_from(duration.as_micros()).unwrap_or(i64::MAX) }
}
