//! What an operator asks: what is in the table, whether the set-up can keep its promise, what became of one key.
//!
//! The binary `idempotency-janitor` prints these; a service may serve them.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::record::{self, Record};
use crate::transaction::in_any_transaction;
use crate::{Error, Key, Mode, migrate};

/// A sample of this many records tells shares to about half a per cent, and is read in a moment.
const SAMPLE: f64 = 30_000.0;

/// Upper ends of the classes of age that [`Group::age`] counts in; the last class is open.
pub const AGES: [&str; 5] = ["< 1 min", "< 1 h", "< 1 day", "< 7 days", "older"];

/// What a record can be, as [`Group::state`] has it.
pub const STATES: [&str; 7] = ["completed", "mark", "in_flight", "released", "lapsed", "indeterminate", "expired"];

/// What is in the table.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// Whether counts and ages were read off every record, or estimated from a sample.
    pub exact: bool,
    /// How many records there are.
    pub records: u64,
    /// The table's size, with its TOAST.
    pub table_bytes: u64,
    /// The size of its two indexes.
    pub index_bytes: u64,
    /// Rows that a vacuum has to clear away, as the server counts them.
    pub dead_rows: u64,
    /// For how long the oldest expired record has been due; exact. `None` where none is.
    pub oldest_expired: Option<Duration>,
    /// Counts by operation, state and age.
    pub groups: Vec<Group>,
}

/// The records of one operation in one state and of one age.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Group {
    /// The operation.
    pub operation: String,
    /// `completed`, `mark`, `in_flight`, `released`, `lapsed`, `indeterminate` or `expired`.
    pub state: String,
    /// Which class of [`AGES`], since the claim.
    pub age: usize,
    /// How many.
    pub records: u64,
    /// When the oldest of them was claimed.
    pub oldest: DateTime<Utc>,
}

/// Something that keeps a promise of this crate from holding, or will.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// `synchronous_commit` is `off`: the server may lose what it has acknowledged when it crashes.
    SynchronousCommitOff,
    /// `fsync` is off: the server may lose everything when its machine crashes.
    FsyncOff,
    /// The table is `UNLOGGED`: the server empties it after a crash.
    Unlogged,
    /// The server is a replica: nothing can be claimed here.
    Replica,
    /// `autovacuum` is off: dead rows gather in the claim's way.
    AutovacuumOff,
    /// The oldest expired record has been due for longer than it should be: no janitor runs, or it does not keep up.
    SweepLags {
        /// For how long it has been due.
        oldest: Duration,
    },
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SynchronousCommitOff => f.write_str(
                "synchronous_commit is off: a crash of the server loses acknowledged effects; set it to on for this role",
            ),
            Self::FsyncOff => {
                f.write_str("fsync is off: a crash of the machine loses acknowledged effects, and the database; turn it on")
            }
            Self::Unlogged => f.write_str(
                "the table is unlogged: a crash of the server empties it, and every repeat is performed again; \
                 alter table idempotency.record set logged",
            ),
            Self::Replica => f.write_str("the server is a replica, where nothing can be claimed; connect to the primary"),
            Self::AutovacuumOff => f.write_str("autovacuum is off: dead rows gather in the claim's way; turn it on"),
            Self::SweepLags { oldest } => write!(
                f,
                "the oldest expired record has been due for {} s: run a janitor, or raise its batch size",
                oldest.as_secs()
            ),
        }
    }
}

/// One record, without its response.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Shown {
    /// Its mode.
    pub mode: Mode,
    /// As in [`Group::state`].
    pub state: String,
    /// The fencing token of its last claim: what [`lease::resolve`](crate::lease::resolve), [`lease::release`](crate::lease::release)
    /// and [`forget`] ask for.
    pub token: i64,
    /// How often it was claimed.
    pub attempt: u32,
    /// When it was last claimed.
    pub claimed_at: DateTime<Utc>,
    /// When it was completed.
    pub completed_at: Option<DateTime<Utc>>,
    /// How long it is remembered.
    pub expires_at: DateTime<Utc>,
    /// What is left of a live lease.
    pub lease_left: Option<Duration>,
    /// How large its response is.
    pub response_bytes: Option<u64>,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
}

/// Tells what is in the table: from a sample of some 30 000 records, or, `exact`, from all of them, which takes as long as
/// reading the table does.
///
/// # Errors
///
/// [`Error::SchemaMissing`] and [`Error::Database`].
pub async fn stats(conn: &mut PgConnection, exact: bool) -> Result<Stats, Error> {
    in_any_transaction(conn, async |conn| read_stats(conn, exact).await).await
}

async fn read_stats(conn: &mut PgConnection, exact: bool) -> Result<Stats, Error> {
    let size = record::size(conn).await?;
    // A table that was never analyzed is small, or so young that a sample means nothing.
    let percent = if exact || size.records < SAMPLE { 100.0 } else { 100.0 * SAMPLE / size.records };
    let sampled = record::groups(conn, percent as f32).await?;
    let scale = 100.0 / percent;
    let groups: Vec<Group> = sampled
        .into_iter()
        .map(|group| Group {
            operation: group.operation,
            state: group.state,
            age: usize::try_from(group.age).unwrap_or_default(),
            records: (group.records as f64 * scale).round() as u64,
            oldest: group.oldest,
        })
        .collect();
    Ok(Stats {
        exact: percent >= 100.0,
        records: groups.iter().map(|group| group.records).sum(),
        table_bytes: size.table_bytes.unsigned_abs(),
        index_bytes: size.index_bytes.unsigned_abs(),
        dead_rows: size.dead_rows.unsigned_abs(),
        oldest_expired: record::oldest_due(conn).await?,
        groups,
    })
}

/// Looks for what keeps a promise from holding. `lag` is how long an expired record may wait for its sweep.
///
/// # Errors
///
/// [`Error::SchemaMissing`] where the table is missing or old, and [`Error::Database`].
pub async fn health(conn: &mut PgConnection, lag: Duration) -> Result<Vec<Warning>, Error> {
    let (setup, oldest) = in_any_transaction(conn, async |conn| {
        migrate::current(conn).await?;
        Ok((record::setup(conn).await?, record::oldest_due(conn).await?))
    })
    .await?;
    let oldest = oldest.filter(|oldest| *oldest > lag);
    Ok([
        (setup.synchronous_commit == "off").then_some(Warning::SynchronousCommitOff),
        (!setup.fsync).then_some(Warning::FsyncOff),
        setup.unlogged.then_some(Warning::Unlogged),
        setup.in_recovery.then_some(Warning::Replica),
        (!setup.autovacuum).then_some(Warning::AutovacuumOff),
        oldest.map(|oldest| Warning::SweepLags { oldest }),
    ]
    .into_iter()
    .flatten()
    .collect())
}

/// Shows the record of a key, without its response. `None` where there is none.
///
/// # Errors
///
/// [`Error::SchemaMissing`] and [`Error::Database`].
pub async fn show(conn: &mut PgConnection, key: &Key) -> Result<Option<Shown>, Error> {
    let record = Record { key, prepared: false };
    let shown = in_any_transaction(conn, async |conn| record.show(conn).await).await?;
    Ok(shown.map(|shown| Shown {
        mode: shown.mode,
        state: shown.state,
        token: shown.token,
        attempt: shown.attempt.unsigned_abs(),
        claimed_at: shown.claimed_at,
        completed_at: shown.completed_at,
        expires_at: shown.expires_at,
        lease_left: shown.lease_seconds_left.and_then(|left| Duration::try_from_secs_f64(left).ok()),
        response_bytes: shown.response_bytes.map(|bytes| u64::from(bytes.unsigned_abs())),
        last_error: shown.last_error,
    }))
}

/// Forgets a key before its time: **the next call with it is performed again**. `token` is the one that [`show`] gave, so
/// that what was looked at is what goes.
///
/// # Errors
///
/// [`Error::LeaseLost`] where the record is under a live lease, or another claim's by now, or gone; the database's.
///
/// # Cancellation
///
/// Safe at every point: done, or not.
pub async fn forget(conn: &mut PgConnection, key: &Key, token: i64) -> Result<(), Error> {
    let record = Record { key, prepared: false };
    let forgotten = in_any_transaction(conn, async |conn| record.forget(conn, token).await).await?;
    if forgotten { Ok(()) } else { Err(Error::LeaseLost) }
}
