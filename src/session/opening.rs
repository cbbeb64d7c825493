//! How a transaction of the crate's own begins, and what became of the attempt.

use sqlx::{SqlSafeStr as _, SqlStr};

use crate::error::sqlstate;
use crate::{Deployment, Error};

/// How a transaction begins.
#[derive(Clone, Debug)]
pub(crate) enum Opening {
    /// With the session's settings.
    Plain,
    /// As `Plain`, without the check, for a claim that returns the age of its transaction. It detects a foreign transaction
    /// only if a query has run in it, if it has a savepoint, or if it is aborted. The caller of the claim detects another
    /// one by its age, unless it began shortly before the call.
    BeforeClaim,
    /// For a handler without a key. It claims nothing, and may write the tables that are protected
    /// ([`protect`](crate::protect())).
    #[cfg(feature = "http")]
    Exempt,
    /// For code of the service that must not write. It is never committed, because a NOTIFY or a SET is not a write.
    #[cfg(feature = "http")]
    ReadOnly,
    /// With `synchronous_commit = on`, if the session has a weaker setting. For a claim that guards an effect
    /// elsewhere: if the server lost the claim, a second caller could repeat the effect.
    ///
    /// The setting `idempotency.claim` begins with `step` until this transaction ends. So a step, which claims nothing,
    /// may write the tables that are protected, and a later statement can tell whether it is still in this transaction.
    Durable,
    /// As `Durable`, and the workers of a distributed table commit with the same setting. Otherwise each has its own.
    DurableOnWorkers,
    /// At READ COMMITTED, whatever the session's own level is, and without a snapshot yet: the first statement takes a
    /// lock, and the second one must see everything that was committed before that.
    ReadCommitted,
    /// With this message, which contains a claim and BEGIN. The claim contains the check.
    Claiming(SqlStr),
}

/// The result of an attempt to begin.
#[derive(Debug)]
pub(super) enum Begun {
    Open,
    /// The claim in the message did not win: the key is taken, or the claim lost against a concurrent transaction.
    Taken,
    /// The pool gave out a connection with an open transaction, which nobody owns. The error has aborted this transaction.
    Foreign(sqlx::Error),
}

/// Refuses a connection on which somebody sent a raw `BEGIN`, which sqlx does not count. There `now()` is older than
/// this message, and the division by zero aborts that transaction. Without the check the crate would commit it.
///
/// The check comes before BEGIN in the same message, and the message is one transaction. So if the check fails, the
/// crate has no open transaction.
macro_rules! check {
    () => {
        "select 1 / (pg_catalog.now() = pg_catalog.statement_timestamp())::int"
    };
}

const BEGIN: &str = concat!(check!(), "; begin");
/// PostgreSQL refuses to set this mode, whatever its value is, after the first query of a transaction.
const BEGIN_BEFORE_CLAIM: &str = "begin not deferrable";
#[cfg(feature = "http")]
const BEGIN_EXEMPT: &str = concat!(check!(), ", pg_catalog.set_config('idempotency.claim', 'exempt', true); begin");
#[cfg(feature = "http")]
const BEGIN_READ_ONLY: &str = concat!(check!(), "; begin read only");
const BEGIN_DURABLE: &str = concat!(
    check!(),
    ", case when pg_catalog.current_setting('synchronous_commit') in ('off', 'local')
    then pg_catalog.set_config('synchronous_commit', 'on', true) end,
    pg_catalog.set_config('idempotency.claim', 'step', true); begin"
);
/// Citus passes on `set local`, and nothing that a function sets. The session's `lock_timeout` bounds the waits for a row
/// on a worker. On a server without Citus the settings stay what they are.
const BEGIN_DURABLE_ON_WORKERS: &str = concat!(
    check!(),
    "; begin; set local idempotency.claim = 'step';
    set local citus.propagate_set_commands = 'local'; do $$ begin
        execute pg_catalog.format('set local synchronous_commit = %L', case
            when pg_catalog.current_setting('synchronous_commit') in ('off', 'local') then 'on'
            else pg_catalog.current_setting('synchronous_commit')
        end);
        if pg_catalog.current_setting('lock_timeout') <> '0' then
            execute pg_catalog.format('set local lock_timeout = %L', pg_catalog.current_setting('lock_timeout'));
        end if;
    end $$"
);

/// The check would take a snapshot at the session's level, and then BEGIN may not set another. So this rolls back what may
/// be open. It counts as a rollback in `pg_stat_database`, and only a call that has failed pays that.
const BEGIN_READ_COMMITTED: &str = "begin; rollback; begin isolation level read committed";

impl Opening {
    /// [`Durable`](Self::Durable), on every server of this deployment.
    pub(crate) fn durable(deployment: Deployment) -> Self {
        if deployment.commits_on_workers() { Self::DurableOnWorkers } else { Self::Durable }
    }

    /// Whether the transaction commits if its work succeeds.
    pub(super) fn commits(&self) -> bool {
        match self {
            #[cfg(feature = "http")]
            Self::ReadOnly => false,
            _ => true,
        }
    }

    pub(super) fn sql(&self) -> SqlStr {
        match self {
            Self::Plain => BEGIN.into_sql_str(),
            Self::BeforeClaim => BEGIN_BEFORE_CLAIM.into_sql_str(),
            #[cfg(feature = "http")]
            Self::Exempt => BEGIN_EXEMPT.into_sql_str(),
            #[cfg(feature = "http")]
            Self::ReadOnly => BEGIN_READ_ONLY.into_sql_str(),
            Self::Durable => BEGIN_DURABLE.into_sql_str(),
            Self::DurableOnWorkers => BEGIN_DURABLE_ON_WORKERS.into_sql_str(),
            Self::ReadCommitted => BEGIN_READ_COMMITTED.into_sql_str(),
            Self::Claiming(message) => message.clone(),
        }
    }

    /// The same transaction, with the check.
    pub(super) fn checked(&self) -> &Self {
        match self {
            Self::BeforeClaim => &Self::Plain,
            checked => checked,
        }
    }

    pub(super) fn is_checked(&self) -> bool {
        !matches!(self, Self::BeforeClaim)
    }

    /// The result of an attempt to begin with this message.
    pub(super) fn judge(&self, begun: sqlx::Result<()>) -> Result<Begun, Error> {
        let Err(error) = begun else { return Ok(Begun::Open) };
        match (self, sqlstate(&error).as_deref()) {
            (
                Self::Claiming(_),
                Some(sqlstate::KEY_TAKEN | sqlstate::SERIALIZATION_FAILURE | sqlstate::DEADLOCK_DETECTED),
            ) => Ok(Begun::Taken),
            (Self::Claiming(_), Some(sqlstate::FOREIGN_TRANSACTION))
            | (Self::BeforeClaim, Some(sqlstate::ACTIVE_TRANSACTION))
            // The check has found a foreign transaction, or that transaction is already aborted.
            | (_, Some(sqlstate::DIVISION_BY_ZERO | sqlstate::IN_FAILED_TRANSACTION)) => Ok(Begun::Foreign(error)),
            _ => Err(Error::of_statement(error)),
        }
    }
}
