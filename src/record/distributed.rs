//! Everything that a table distributed by Citus needs instead of the usual statements.
//!
//! A worker evaluates the functions in a SELECT from the table, so its clock and its locks would count. Here such a
//! SELECT only reads columns, and another statement, which names no table, asks the coordinator for the time and the
//! lock. An INSERT of VALUES goes to one shard and needs no two-phase commit; `insert … select` would need one over all
//! shards.

mod citus;
mod claim;
mod coordinator;
mod look;
mod sweep;
mod take_over;

pub(super) use citus::size_of_shards;
pub(crate) use citus::{Distribution, create_distributed_table, distribution, is_distributed, workers};
pub(super) use claim::claim;
pub(super) use coordinator::forget_claim;
pub(super) use look::look;
pub(crate) use sweep::sweep;
pub(super) use take_over::take_over;
