//! A Patroni cluster of the suite's own: etcd and three PostgreSQL nodes on 127.0.0.1, callers that reach the leader
//! through a proxy, and the faults that make the leader change.
//!
//! # Layout
//!
//! - [`programs`] finds Patroni, etcd and PostgreSQL, or says what is missing.
//! - [`node`] is one Patroni with its PostgreSQL; [`formation`] is the three of them with etcd.
//! - [`link`] is a node's connection to etcd, which can be cut; [`router`] is the callers' way to the leader.
//! - [`rest`] asks Patroni's REST API.
//! - [`fault`] injects the faults.

pub(crate) mod fault;
pub(crate) mod formation;
mod link;
mod node;
pub(crate) mod programs;
mod rest;
mod router;
