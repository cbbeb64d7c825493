//! Whether the set-up keeps the crate's promises.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::{PgConnection, PgPool};

use crate::record::{Distribution, Stranger};
use crate::session::{Opening, in_pooled_transaction};
use crate::{Error, OnEscape, migrate, record};

/// A part of the set-up that breaks a promise of this crate, or will break one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// `synchronous_commit` is `off`: a crash of the server may lose acknowledged effects.
    SynchronousCommitOff,
    /// `synchronous_commit` is `local` on a server with synchronous standbys: acknowledged effects may be missing on
    /// the standby that is promoted.
    SynchronousCommitLocal,
    /// `alter role` or `alter database` has set `synchronous_commit` to one of the two values above. This connection
    /// may have another value.
    SynchronousCommitSet {
        /// The value: `off`, or `local` on a server with synchronous standbys.
        value: String,
        /// The role with this setting; `None` means all roles.
        role: Option<String>,
        /// The database with this setting; `None` means all databases.
        database: Option<String>,
    },
    /// A worker's `synchronous_commit` is `off`, or `local` with synchronous standbys: the worker may lose what the
    /// coordinator has acknowledged. In lease mode the crate raises it for its own transactions.
    WorkerSynchronousCommit {
        /// The worker's host and port.
        worker: String,
        /// The value.
        value: String,
    },
    /// A worker does not answer the coordinator: every call with a key on it fails.
    WorkerDown {
        /// Its host and port.
        worker: String,
        /// The coordinator's error.
        error: String,
    },
    /// The database has Citus, and the table is on the coordinator alone. A transaction that also writes distributed
    /// tables then commits in two phases.
    NotDistributed,
    /// Citus distributes the table in a way that the crate does not support: not by the hash of `scope`.
    WronglyDistributed,
    /// `fsync` is off: a crash of the server's machine may lose everything.
    FsyncOff,
    /// The table is `UNLOGGED`: the server empties it after a crash.
    Unlogged,
    /// The server is a replica, where no key can be claimed.
    Replica,
    /// A role owns a part of the schema, and is neither a superuser nor the owner of the database, nor related to it or to
    /// the asking role by membership. The role can run its code in the transactions of all callers, with their rights. It
    /// may have created the schema before you did.
    ForeignOwner {
        /// The role.
        role: String,
        /// What it owns, separated by commas.
        objects: String,
    },
    /// Somebody has disabled the trigger of a [protected](crate::protect()) table: writes that escape are not refused.
    ProtectionDisabled {
        /// The name of the table or partition, with its schema.
        table: String,
    },
    /// A partition of a [protected](crate::protect()) table was attached later: writes that name it, and not its table, are
    /// not refused.
    PartitionUnprotected {
        /// The name of the partition, with its schema.
        table: String,
    },
    /// The oldest expired record has waited for its sweep for too long: no janitor runs, or it does not keep up.
    SweepLags {
        /// How long ago it expired.
        oldest: Duration,
    },
}

impl Warning {
    /// A name for machines. It remains the same when the message is reworded.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::SynchronousCommitOff => "synchronous_commit_off",
            Self::SynchronousCommitLocal => "synchronous_commit_local",
            Self::SynchronousCommitSet { .. } => "synchronous_commit_set",
            Self::WorkerSynchronousCommit { .. } => "worker_synchronous_commit",
            Self::WorkerDown { .. } => "worker_down",
            Self::NotDistributed => "not_distributed",
            Self::WronglyDistributed => "wrongly_distributed",
            Self::FsyncOff => "fsync_off",
            Self::Unlogged => "unlogged",
            Self::Replica => "replica",
            Self::ForeignOwner { .. } => "foreign_owner",
            Self::ProtectionDisabled { .. } => "protection_disabled",
            Self::PartitionUnprotected { .. } => "partition_unprotected",
            Self::SweepLags { .. } => "sweep_lags",
        }
    }
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SynchronousCommitOff => f.write_str(
                "synchronous_commit is off: a crash of the server loses acknowledged effects; set it to on for this role",
            ),
            Self::SynchronousCommitLocal => f.write_str(
                "synchronous_commit is local: a fail-over to a synchronous standby loses acknowledged effects; \
                 set it to on for this role",
            ),
            Self::SynchronousCommitSet { value, role, database } => {
                let role = role.as_deref().map_or_else(|| "all roles".to_owned(), |role| format!("role {role:?}"));
                let database = database
                    .as_deref()
                    .map_or_else(|| "all databases".to_owned(), |database| format!("database {database:?}"));
                let event = if value == "local" { "a fail-over to a synchronous standby" } else { "a crash of the server" };
                write!(
                    f,
                    "synchronous_commit is {value} for {role} in {database}: {event} loses acknowledged \
                     effects; reset it with alter role or alter database, or set it to on"
                )
            }
            Self::WorkerSynchronousCommit { worker, value } => write!(
                f,
                "synchronous_commit is {value} on the worker {worker}: its crash or fail-over loses acknowledged effects; \
                 set it to on there"
            ),
            Self::WorkerDown { worker, error } => {
                write!(f, "the worker {worker} does not answer, so every call with a key on it fails: {error}")
            }
            Self::NotDistributed => f.write_str(
                "the database has Citus, and the table is not distributed; run `idempotency-janitor migrate --distributed` \
                 and set Deployment::with_distributed(true) if the business tables are distributed",
            ),
            Self::WronglyDistributed => f.write_str(
                "Citus distributes the table, and not by the hash of scope; undistribute it, then run \
                 `idempotency-janitor migrate --distributed`",
            ),
            Self::FsyncOff => f.write_str(
                "fsync is off: a crash of the machine may lose acknowledged effects and the whole database; turn it on",
            ),
            Self::Unlogged => f.write_str(
                "the table is unlogged: a crash of the server empties it, and every repeat is performed again; \
                 alter table idempotency.record set logged",
            ),
            Self::Replica => f.write_str("the server is a replica, where no key can be claimed; connect to the primary"),
            Self::ForeignOwner { role, objects } => write!(
                f,
                "the role {role:?} owns {objects}, so its code can run as every caller; if it is the role that migrates, grant \
                 it to the owner of the database; if not, drop the schema or give it another owner"
            ),
            Self::ProtectionDisabled { table } => write!(
                f,
                "the trigger that protects {table} is disabled, so writes outside an idempotent operation are not refused; \
                 run `idempotency-janitor protect` with the table again, or unprotect it"
            ),
            Self::PartitionUnprotected { table } => write!(
                f,
                "the partition {table} of a protected table is not protected itself; run `idempotency-janitor protect` with \
                 the table again"
            ),
            Self::SweepLags { oldest } => write!(
                f,
                "the oldest expired record has been due for {} s: run a janitor, or raise its batch size",
                oldest.as_secs()
            ),
        }
    }
}

/// Looks for parts of the set-up that break a promise. `lag` is how long an expired record may wait for its sweep.
///
/// It sees the settings of a connection of this pool, and the settings of `alter role` and `alter database` for any role
/// that may log in. It does not see settings that a service makes in its URL or in a session.
///
/// # Errors
///
/// [`Error::SchemaMissing`] if the table is missing or too old, and [`Error::Database`].
///
/// # Cancellation
///
/// Nothing is changed, at any point.
pub async fn health(pool: &PgPool, lag: Duration) -> Result<Vec<Warning>, Error> {
    in_pooled_transaction(pool, Opening::Plain, async |conn| warnings(conn, lag).await).await
}

/// The tables that are [protected](crate::protect()), with their schema. Partitions are parts of their table.
///
/// # Errors
///
/// [`Error::SchemaMissing`] if the table `idempotency.record` is missing or too old, and [`Error::Database`].
///
/// # Cancellation
///
/// Nothing is changed, at any point.
pub async fn protected(pool: &PgPool) -> Result<BTreeMap<String, OnEscape>, Error> {
    in_pooled_transaction(pool, Opening::Plain, async |conn| {
        migrate::current(conn).await?;
        record::protected(conn).await
    })
    .await
}

async fn warnings(conn: &mut PgConnection, lag: Duration) -> Result<Vec<Warning>, Error> {
    migrate::current(conn).await?;
    let setup = record::setup(conn).await?;
    let mut warnings = Vec::new();
    match Commit::of(&setup.synchronous_commit, setup.synchronous_standbys) {
        Commit::Off => warnings.push(Warning::SynchronousCommitOff),
        Commit::Local => warnings.push(Warning::SynchronousCommitLocal),
        Commit::Durable => {}
    }
    for setting in record::commit_settings(conn).await? {
        let value = match Commit::of(&setting.value, setup.synchronous_standbys) {
            Commit::Off => "off",
            Commit::Local => "local",
            Commit::Durable => continue,
        };
        warnings.push(Warning::SynchronousCommitSet {
            value: value.to_owned(),
            role: setting.role,
            database: setting.database,
        });
    }
    match record::distribution(conn).await? {
        Distribution::NoCitus => {}
        Distribution::Plain => warnings.push(Warning::NotDistributed),
        Distribution::By(column) if column == "scope" => warnings.extend(weak_workers(conn).await?),
        Distribution::By(_) | Distribution::Other => warnings.push(Warning::WronglyDistributed),
    }
    warnings.extend((!setup.fsync).then_some(Warning::FsyncOff));
    warnings.extend(setup.unlogged.then_some(Warning::Unlogged));
    warnings.extend(setup.in_recovery.then_some(Warning::Replica));
    let foreign = |Stranger { role, objects }| Warning::ForeignOwner { role, objects };
    warnings.extend(record::strangers(conn).await?.into_iter().map(foreign));
    warnings.extend(record::gaps(conn).await?.into_iter().map(|record::Gap { table, disabled }| match disabled {
        true => Warning::ProtectionDisabled { table },
        false => Warning::PartitionUnprotected { table },
    }));
    let oldest = record::oldest_due(conn, Duration::ZERO).await?.filter(|oldest| *oldest > lag);
    warnings.extend(oldest.map(|oldest| Warning::SweepLags { oldest }));
    Ok(warnings)
}

async fn weak_workers(conn: &mut PgConnection) -> Result<Vec<Warning>, Error> {
    let workers = record::workers(conn).await?.into_iter();
    let warnings = workers.filter_map(|worker| match worker.synchronous_commit {
        Err(error) => Some(Warning::WorkerDown { worker: worker.node, error }),
        Ok((value, standbys)) => match Commit::of(&value, standbys) {
            Commit::Durable => None,
            Commit::Off | Commit::Local => Some(Warning::WorkerSynchronousCommit { worker: worker.node, value }),
        },
    });
    Ok(warnings.collect())
}

/// The effect of a `synchronous_commit`.
enum Commit {
    Durable,
    Off,
    /// Durable on the primary only. Without synchronous standbys this is as good as `on`.
    Local,
}

impl Commit {
    fn of(value: &str, standbys: bool) -> Self {
        match value {
            // `alter role` stores the text as it was typed.
            "off" | "false" | "no" | "0" => Self::Off,
            "local" if standbys => Self::Local,
            _ => Self::Durable,
        }
    }
}
