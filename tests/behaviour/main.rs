//! What the crate promises, on a real PostgreSQL: one behaviour per test, one theme per file.

mod proxy;
#[path = "../support/strict.rs"]
mod strict;
mod support;

mod answers;
mod assertions;
mod cancellation;
mod claims;
mod commits;
mod distributed;
mod ensure;
mod expiry;
mod fingerprints;
mod fixtures;
mod handlers;
mod in_flight;
mod isolated;
mod isolation_levels;
mod janitor;
mod keys;
mod lease_fencing;
mod lease_renewal;
mod leases;
mod mark_batches;
mod marks;
mod migrations;
mod perform;
mod recipes;
mod responses;
mod round_trips;
mod rules;
mod transactions;
mod vanished_network;
mod ways;
