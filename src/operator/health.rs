//! Whether the set-up can keep its promise.

use std::time::Duration;

use sqlx::PgConnection;

use crate::transaction::in_any_transaction;
use crate::{Error, migrate, record};

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
