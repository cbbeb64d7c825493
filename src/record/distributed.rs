//! The room for Citus, and its door: the functions of this file choose between the usual statements and those of this
//! folder. The rest of the crate asks [`Deployment`] what it has to know, and the server is asked only where a whole
//! table is swept or measured, where a record is shown, and once in a process before the first claim. So no call sends
//! a statement for Citus to another server.
//!
//! A worker evaluates the functions in a SELECT from the table, so its clock and its locks would count. In this folder
//! such a SELECT only reads columns, and another statement, which names no table, asks the coordinator for the time and
//! the lock. An INSERT of VALUES goes to one shard and needs no two-phase commit; `insert … select` would need one over
//! all shards.
//!
//! The other statements of `record/` are the same for both kinds of table, and Citus refuses some SQL in them. A stable
//! function, such as `statement_timestamp`, may not be inside CASE or COALESCE. A function that is volatile, such as
//! `set_config`, may not be in RETURNING. A stable function, such as `jsonb_build_object`, takes no column in an
//! UPDATE. Those comments that say *a distributed table* are about these rules.

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
    /// Claims the key by inserting its record. A mark is complete at once. If a record is there already, or an open
    /// transaction claims the key, the answer is [`Tried::Unread`]. If [a look comes first](Deployment::looks_first),
    /// the caller has looked before, and holds the lock.
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

    /// Looks in a snapshot of its own, because an owner may have committed since the claim's snapshot.
    ///
    /// A look that finds a record takes no lock, because the caller's transaction would hold the lock to its end.
    pub(crate) async fn look(self, conn: &mut PgConnection, asked: &mut CalledAt) -> Result<Tried, Error> {
        if self.deployment.distributed {
            protocol::look(self, conn, asked).await
        } else {
            self.look_and_lock(conn, asked).await
        }
    }

    /// Takes over a claim that had expired when the call was made, or is released or lapsed. One of all callers that
    /// saw `found_token` wins, and the others look again, without the key's lock.
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

    /// Releases a claim in the transaction that claimed: the next caller may claim at once. The new token makes sure
    /// that no statement with the old token changes the record again.
    pub(crate) async fn release_in_transaction(self, conn: &mut PgConnection, claim: Claim) -> Result<(), Error> {
        if self.deployment.distributed {
            protocol::release_in_transaction(self, conn, claim).await
        } else {
            self.release_and_forget(conn, claim).await
        }
    }
}

/// The message that begins a transaction that is durable on every server of the deployment.
pub(crate) fn durable_opening(deployment: Deployment) -> &'static str {
    if deployment.distributed { protocol::BEGIN_DURABLE } else { opening::BEGIN_DURABLE }
}

/// As [`durable_opening`], for a decision, whose statements see all rows.
pub(crate) fn durable_opening_of_all_rows(deployment: Deployment) -> &'static str {
    if deployment.distributed { protocol::BEGIN_DURABLE_ALL_ROWS } else { opening::BEGIN_DURABLE_ALL_ROWS }
}

/// Gives the transaction of a caller the settings of [`durable_opening_of_all_rows`], and returns its `row_security`
/// for [`put_back`](opening::put_back).
pub(crate) async fn prepare_decision(conn: &mut PgConnection, deployment: Deployment) -> Result<String, Error> {
    let row_security = opening::prepare_decision(conn).await?;
    if deployment.distributed {
        protocol::pass_on_synchronous_commit(conn).await?;
    }
    Ok(row_security)
}

/// A part of the table that is swept by itself.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// A leaf of the table, or the table itself, by its name.
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

    /// Deletes a batch of the records that are past their retention by the `grace` and under no live lease, oldest
    /// first. `since` is [`Deleted::until`] of the batch before.
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

    /// Whether a batch waits for a record that another transaction has locked, for a moment, and then fails.
    pub(crate) fn waits_for_rows(&self) -> bool {
        matches!(self, Self::Shards)
    }
}

/// Reads the sizes and counts that the server keeps. For a partitioned table they are the sums over its leaves, and for
/// a distributed one over its shards.
pub(crate) async fn size(conn: &mut PgConnection) -> Result<Size, Error> {
    if citus::is_distributed(conn).await? { citus::size(conn).await } else { table::size(conn).await }
}
