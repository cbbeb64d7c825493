//! A Patroni cluster of the suite's own: etcd and three PostgreSQL nodes on 127.0.0.1, callers that reach the leader
//! through a proxy, and the faults that make the leader change.
//!
//! # Layout
//!
//! - [`programs`] finds Patroni, etcd and PostgreSQL, or says what is missing.
//! - [`keeper`] owns the directory, and ends every process in it when the suite ends.
//! - [`node`] is one Patroni with its PostgreSQL; [`formation`] is the three of them with etcd.
//! - [`link`] is a node's connection to etcd, which can be cut; [`router`] is the callers' way to the leader.
//! - [`rest`] asks Patroni's REST API.
//! - [`fault`] injects the faults; [`callers`], [`mark_callers`] and [`lease_callers`] are the load.
//! - [`outage`] measures what a caller sees.

pub(crate) mod callers;
pub(crate) mod fault;
pub(crate) mod formation;
mod keeper;
pub(crate) mod lease_callers;
mod link;
pub(crate) mod mark_callers;
mod node;
pub(crate) mod outage;
pub(crate) mod programs;
mod rest;
mod router;
