//! A Patroni cluster of the suite's own: etcd and three PostgreSQL nodes on 127.0.0.1, and a proxy through which
//! callers reach the leader.
//!
//! # Layout
//!
//! - [`programs`] finds Patroni, etcd and PostgreSQL, or returns the name of the missing one.
//! - [`node`] is one Patroni with its PostgreSQL. [`formation`] is the three of them with etcd.
//! - [`link`] is a node's connection to etcd, which can be cut. [`router`] is the callers' way to the leader.
//! - [`rest`] asks Patroni's REST API.

pub(crate) mod formation;
mod link;
pub(crate) mod node;
pub(crate) mod programs;
mod rest;
pub(crate) mod router;
