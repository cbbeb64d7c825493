//! The choice between the usual statements and those for Citus. The functions of this file choose, and the folder
//! `distributed` contains the statements for Citus.
//!
//! The rest of the crate reads the properties of a deployment from [`Deployment`]. The crate asks the server whether
//! the table is distributed only in these cases:
//!
//! - A function sweeps, measures, checks or distributes the whole table.
//! - A function shows a record.
//! - A process with [`Deployment::distributed`] makes its first claim.
//!
//! So no call names a function of Citus on a server without Citus.
//!
//! In a SELECT from the table, a worker evaluates the functions, so the worker's clock and locks would count. Therefore
//! such a SELECT in this folder only reads columns. Another statement, which names no table, gets the time and the lock
//! from the coordinator. An INSERT of VALUES goes to one shard, and needs no two-phase commit. An `insert … select`
//! would need a two-phase commit over all shards.
//!
//! The other statements of `record/` are the same for both kinds of table. These statements avoid SQL that Citus
//! refuses. Comments that mention *a distributed table* are about these rules:
//!
//! - In an UPDATE, CASE and COALESCE may not contain a stable function, such as `statement_timestamp`.
//! - RETURNING may not contain a stable or volatile function, such as `current_setting` or `set_config`.
//! - In an UPDATE, a stable function, such as `jsonb_build_object`, may not have a column as an argument.

mod citus;
mod protocol;

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use super::opening;
use super::statement::{Record, draw_token};
use super::table::{self, Deleted, Size};
use super::tried::{CalledAt, Claim, Terms, Tried};
use crate::{Deployment, Error};

pub(crate) use citus::{Distribution, create_distributed_table, distribution, workers};

impl Record<'_> {
    /// Claims the key by inserting its record. A mark is complete at once. Returns [`Tried::Unread`] if the key has a
    /// record already, or if an open transaction claims the key. If the call must [look for the record
    /// first](Deployment::looks_first), the look has taken the key's lock.
    pub(crate) async fn claim(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
        asked: &mut CalledAt,
    ) -> Result<Tried, Error> {
        if self.deployment.distributed {
            protocol::claim(self, conn, terms).await
        } else {
            self.insert(conn, terms, asked).await
        }
    }

    /// Looks at the record in a new snapshot, because an owner may have committed since the claim's snapshot.
    ///
    /// A look that finds a record takes no lock, because the caller's transaction would hold the lock to its end.
    pub(crate) async fn look(self, conn: &mut PgConnection, asked: &mut CalledAt) -> Result<Tried, Error> {
        if self.deployment.distributed {
            protocol::look(self, conn, asked).await
        } else {
            self.look_and_lock(conn, asked).await
        }
    }

    /// Takes over a claim that is released or lapsed, or that had expired when the call was made. Only one of the
    /// callers that have found `found_token` wins. The other callers look again, and do not hold the key's lock.
    pub(crate) async fn take_over(
        self,
        conn: &mut PgConnection,
        terms: &Terms,
        asked: &CalledAt,
        found_token: i64,
        attempt: i32,
    ) -> Result<Tried, Error> {
        let claim = Claim { token: draw_token()?, attempt };
        if self.deployment.distributed {
            protocol::take_over(self, conn, terms, asked, found_token, claim).await
        } else {
            self.lock_and_take(conn, terms, asked, found_token, claim).await
        }
    }

    /// Releases a claim in the transaction that made the claim, so that the next caller may claim at once. The record
    /// gets a new token, so no statement with the old token can change the record again.
    pub(crate) async fn release_in_transaction(self, conn: &mut PgConnection, claim: Claim) -> Result<(), Error> {
        if self.deployment.distributed {
            protocol::release_in_transaction(self, conn, claim).await
        } else {
            self.release_and_forget(conn, claim).await
        }
    }
}

/// The message that begins a transaction whose COMMIT is durable on every server of the deployment.
pub(crate) fn durable_opening(deployment: Deployment) -> &'static str {
    if deployment.distributed { protocol::BEGIN_DURABLE } else { opening::BEGIN_DURABLE }
}

/// The message that begins a durable transaction for a decision. In this transaction, a statement fails if row level
/// security would hide a row from it.
pub(crate) fn durable_opening_of_all_rows(deployment: Deployment) -> &'static str {
    if deployment.distributed { protocol::BEGIN_DURABLE_ALL_ROWS } else { opening::BEGIN_DURABLE_ALL_ROWS }
}

/// Gives the caller's transaction the settings of [`durable_opening_of_all_rows`]. Returns the previous `row_security`,
/// which [`put_back`](opening::put_back) restores.
pub(crate) async fn prepare_decision(conn: &mut PgConnection, deployment: Deployment) -> Result<String, Error> {
    let row_security = opening::prepare_decision(conn).await?;
    if deployment.distributed {
        protocol::pass_on_synchronous_commit(conn).await?;
    }
    Ok(row_security)
}

/// A part of the table that is swept separately.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// The name of a leaf of the table, or of the table itself.
    Leaf(String),
    /// All shards of a distributed table.
    Shards,
}

impl Part {
    pub(crate) async fn all(conn: &mut PgConnection) -> Result<Vec<Self>, Error> {
        if citus::is_distributed(conn).await? {
            return Ok(vec![Self::Shards]);
        }
        Ok(table::leaves(conn).await?.into_iter().map(Self::Leaf).collect())
    }

    /// Deletes a batch of due records, the oldest first. A record is due if its retention ended at least `grace` ago,
    /// and if it has no live lease. `since` is the [`Deleted::until`] of the previous batch.
    pub(crate) async fn sweep(
        &self,
        conn: &mut PgConnection,
        limit: u32,
        since: Option<DateTime<Utc>>,
        grace: Duration,
    ) -> Result<Deleted, Error> {
        match self {
            Self::Leaf(leaf) => table::sweep(conn, leaf, limit, since, grace).await,
            Self::Shards => citus::sweep(conn, limit, since, grace).await,
        }
    }

    /// Whether a batch waits for a locked record, and fails if the record stays locked for a second.
    pub(crate) fn waits_for_rows(&self) -> bool {
        matches!(self, Self::Shards)
    }
}

/// Reads the sizes and counts that the server keeps. For a partitioned table, the values are sums over its leaves. For
/// a distributed table, the values are sums over its shards.
pub(crate) async fn size(conn: &mut PgConnection) -> Result<Size, Error> {
    if citus::is_distributed(conn).await? { citus::size(conn).await } else { table::size(conn).await }
}
