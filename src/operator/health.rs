//! The check of the set-up.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::{PgConnection, PgPool};

use crate::migrate::{IN_SEARCH_PATH, OUT_OF_SEARCH_PATH, Standing};
use crate::record::{CommitSetting, Opening, Placement};
use crate::session::in_pooled_transaction;
use crate::{Error, OnEscape, migrate, record};

/// A part of the set-up that breaks a promise of this crate, or will break a promise later.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// `synchronous_commit` is too weak. With the value `off`, a crash of the server may lose acknowledged effects.
    /// With the value `local` on a server with synchronous standbys, a promoted standby may lack acknowledged effects.
    /// In lease mode the crate raises `synchronous_commit` for its own transactions.
    NotDurable {
        /// The value: `off` or `local`.
        value: String,
        /// Where the value applies: this connection, or a role or a database (by `alter role` or
        /// `alter database`).
        whose: String,
    },
    /// Citus keeps the table on the workers, or this connection leads to a worker. Every call fails, because the locks
    /// and settings of the calls would be on different nodes.
    Distributed,
    /// The database has distributed tables of Citus, and the crate's table is not in Citus's metadata. A transaction
    /// that writes both does not commit both together, so an effect may be repeated after a crash.
    NotInMetadata,
    /// `fsync` is off, so a crash of the server's machine may lose everything.
    FsyncOff,
    /// The table is `UNLOGGED`, so the server empties it after a crash.
    Unlogged,
    /// The server is a replica, where no key can be claimed.
    Replica,
    /// The schema cannot be trusted, because an untrusted role owns a part of the schema or may add code to it. This
    /// code could run with the rights of each role that uses the schema. Three things count as parts of the schema,
    /// wherever they are: a partition, a function that a trigger or a rule calls, and a table with a foreign key to the
    /// records. If the schema cannot be trusted, the check reads nothing in the schema, and returns only warnings of
    /// this kind.
    ///
    /// A role that may act as the owner of the database is trusted. A role is also trusted if one of its members is the
    /// database's owner or the current role. Such a membership counts only if its grantor may act as that member, or as
    /// the owner of the database.
    UntrustedSchema {
        /// A description of the problem and of the remedy.
        problem: String,
    },
    /// Row level security applies to the current role, and its policies could hide records. With this role, the server
    /// therefore refuses the statements of [`operator`](crate::operator), of a [`Janitor`](crate::Janitor), of resumers
    /// and of reconcilers. The other checks would read the records, so `health` returns no other warning.
    RowSecurity {
        /// The tables and partitions, separated by commas.
        tables: String,
    },
    /// The `search_path` of the current role contains the schema `idempotency`, as the path `"$user", public` does for
    /// a role with this name. A table that this role creates without the name of a schema, such as the
    /// `_sqlx_migrations` of the service, gets into the crate's schema. If you drop this schema, move such tables out
    /// of it first.
    InSearchPath,
    /// The current role may write the records, but does not have all rights of any of the roles in the guide's page
    /// `production`. If a role may claim a key but may not store the response, a call under a lease fails after its
    /// effect. A role that may only read gets no warning, because each of its calls fails before the effect.
    MissingRights {
        /// The rights on the records that the role lacks for each kind of role.
        missing: String,
    },
    /// A BEFORE row trigger, a rule or a policy of row level security applies to the table, and can swallow the records
    /// or hide them. A call that meets this returns [`Misuse::ClaimSwallowed`](crate::Misuse::ClaimSwallowed). An AFTER
    /// trigger cannot swallow a record, and is not reported.
    MaySwallow {
        /// The kind and the name of the object, and the name of its table.
        object: String,
    },
    /// The trigger of a [protected](crate::protect()) table, or of one of its partitions, is disabled, is missing, or
    /// differs from the crate's trigger. The server therefore does not refuse a write outside an operation. A partition
    /// that was attached after the call of `protect` has no trigger.
    ProtectionGap {
        /// The name of the table or partition, with its schema.
        table: String,
    },
    /// The oldest expired record has waited too long for its sweep, because no janitor runs or the janitor is too slow.
    SweepLags {
        /// The time since the oldest expired record expired.
        oldest: Duration,
    },
}

impl Warning {
    /// The name of the warning, for programs. The name stays the same when the message is reworded.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotDurable { .. } => "not_durable",
            Self::Distributed => "distributed",
            Self::NotInMetadata => "not_in_metadata",
            Self::FsyncOff => "fsync_off",
            Self::Unlogged => "unlogged",
            Self::Replica => "replica",
            Self::UntrustedSchema { .. } => "untrusted_schema",
            Self::RowSecurity { .. } => "row_security",
            Self::InSearchPath => "in_search_path",
            Self::MissingRights { .. } => "missing_rights",
            Self::MaySwallow { .. } => "may_swallow",
            Self::ProtectionGap { .. } => "protection_gap",
            Self::SweepLags { .. } => "sweep_lags",
        }
    }
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotDurable { value, whose } => {
                let event =
                    if value == "local" { "a fail-over to a synchronous standby" } else { "a crash of the server" };
                write!(
                    f,
                    "synchronous_commit is {value} {whose}: {event} loses acknowledged effects; \
                     set it to on there, or reset it with alter role or alter database"
                )
            }
            Self::Distributed => f.write_str(
                "Citus keeps the table on the workers, or this connection leads to a worker, so every call fails; \
                 connect to the coordinator; there, run select undistribute_table('idempotency.record'), if the table \
                 is distributed, and select citus_add_local_table_to_metadata('idempotency.record')",
            ),
            Self::NotInMetadata => f.write_str(
                "the table does not commit together with the distributed tables of this database, so a crash may repeat \
                 an effect; run on the coordinator: select citus_add_local_table_to_metadata('idempotency.record')",
            ),
            Self::FsyncOff => f.write_str(
                "fsync is off: a crash of the machine may lose acknowledged effects and the whole database; turn it on",
            ),
            Self::Unlogged => f.write_str(
                "the table is unlogged: a crash of the server empties it, and every repeat is performed again; \
                 alter table idempotency.record set logged",
            ),
            Self::Replica => {
                f.write_str("the server is a replica, where no key can be claimed; connect to the primary")
            }
            Self::UntrustedSchema { problem } => f.write_str(problem),
            Self::RowSecurity { tables } => write!(
                f,
                "row level security of {tables} applies to this role and could hide records, so the server refuses to \
                 sweep, list, settle, resume and reconcile them; turn it off with alter table … disable row level \
                 security, or give the role of each janitor, resumer, reconciler and operator BYPASSRLS"
            ),
            Self::InSearchPath => {
                write!(f, "{IN_SEARCH_PATH}; {OUT_OF_SEARCH_PATH}; then move such tables to another schema")
            }
            Self::MissingRights { missing } => write!(
                f,
                "this role has the rights of no role in the guide's page `production`: on idempotency.record, \
                 {missing}; a call that may claim a key but may not complete it fails after its effect; grant the \
                 rights of one of these roles"
            ),
            Self::MaySwallow { object } => write!(
                f,
                "{object} can swallow the records of keys or hide them, and then calls fail; drop it, or use an AFTER \
                 trigger instead"
            ),
            Self::ProtectionGap { table } => write!(
                f,
                "the trigger that protects {table} is disabled, missing or not the crate's, so the server does not \
                 refuse writes outside an idempotent operation; run `idempotency-janitor protect` again for the table, \
                 or for the table of this partition"
            ),
            Self::SweepLags { oldest } => write!(
                f,
                "the oldest expired record has been due for {} s: run a janitor, or raise its batch size",
                oldest.as_secs()
            ),
        }
    }
}

/// Checks the set-up, and returns the parts that break a promise. `lag` is the time for which an expired record may
/// wait for its sweep.
///
/// The check sees the settings of a connection of this pool, and those of `alter role` and `alter database` for each
/// role that may log in. The check does not see settings that a service makes in its URL or in a session. The check
/// sees the rights and the `search_path` of its own role only, so run the check as each role.
///
/// # Errors and cancellation
///
/// [`Error::SchemaMissing`] if the table is missing or too old, [`Incompatible::Schema`](crate::Incompatible::Schema)
/// if its migration was applied with another text, and [`Error::Database`]. The call only reads.
pub async fn health(pool: &PgPool, lag: Duration) -> Result<Vec<Warning>, Error> {
    in_pooled_transaction(pool, Opening::ALL_ROWS, async |conn| warnings(conn, lag).await).await
}

/// Returns the [protected](crate::protect()) tables, with the names of their schemas. A partition counts as a part of
/// its table.
///
/// # Errors and cancellation
///
/// [`Error::SchemaMissing`] if the table is missing or too old, [`Incompatible::Schema`](crate::Incompatible::Schema)
/// if the schema [cannot be trusted](Warning::UntrustedSchema), and [`Error::Database`]. The call only reads.
pub async fn protected(pool: &PgPool) -> Result<BTreeMap<String, OnEscape>, Error> {
    in_pooled_transaction(pool, Opening::ALL_ROWS, async |conn| {
        migrate::current(conn).await?;
        record::protected(conn).await
    })
    .await
}

async fn warnings(conn: &mut PgConnection, lag: Duration) -> Result<Vec<Warning>, Error> {
    let standing = migrate::standing(conn).await?;
    if let Standing::Distrusted(problems) = standing {
        return Ok(problems.into_iter().map(|problem| Warning::UntrustedSchema { problem }).collect());
    }
    let hidden = record::with_hidden_rows(conn).await?;
    if !hidden.is_empty() {
        return Ok(vec![Warning::RowSecurity { tables: hidden.join(", ") }]);
    }
    let trusted = standing.trusted()?;
    trusted.current(conn).await?;
    let setup = record::setup(conn).await?;
    let mut warnings = Vec::new();
    warnings.extend(trusted.is_in_search_path().then_some(Warning::InSearchPath));
    warnings.extend(record::missing_rights(conn).await?.map(|missing| Warning::MissingRights { missing }));
    let standbys = setup.synchronous_standbys;
    warnings
        .extend(record::commit_settings(conn).await?.into_iter().filter_map(|setting| not_durable(setting, standbys)));
    warnings.extend(match record::placement(conn).await? {
        Placement::Plain | Placement::Coordinator => None,
        Placement::Beside => Some(Warning::NotInMetadata),
        Placement::Worker => Some(Warning::Distributed),
    });
    warnings.extend((!setup.fsync).then_some(Warning::FsyncOff));
    warnings.extend(setup.unlogged.then_some(Warning::Unlogged));
    warnings.extend(setup.in_recovery.then_some(Warning::Replica));
    warnings.extend(record::swallowers(conn).await?.into_iter().map(|object| Warning::MaySwallow { object }));
    warnings.extend(record::gaps(conn).await?.into_iter().map(|table| Warning::ProtectionGap { table }));
    let oldest = record::oldest_due(conn, Duration::ZERO).await?.filter(|oldest| *oldest > lag);
    warnings.extend(oldest.map(|oldest| Warning::SweepLags { oldest }));
    Ok(warnings)
}

fn not_durable(CommitSetting { value, whose }: CommitSetting, standbys: bool) -> Option<Warning> {
    let value = match &*value {
        // `alter role` stores the value as an operator has typed it.
        "off" | "false" | "no" | "0" => "off",
        // With `local`, a commit is durable on the primary only. Without synchronous standbys, `local` is as good as
        // `on`.
        "local" if standbys => "local",
        _ => return None,
    };
    Some(Warning::NotDurable { value: value.to_owned(), whose })
}
