//! Tests of the HTTP layer, one file per behaviour. Requests go to the service directly, unless the connection matters.

mod bodies;
mod bounds;
mod by_reference;
mod cancellation;
mod connections;
mod failures;
mod fingerprints;
mod headers;
mod in_flight;
mod leased;
mod mistakes;
#[cfg(not(idempotency_distributed))]
mod protected;
#[path = "../support/proxy.rs"]
#[allow(dead_code, reason = "the other tests use more of it")]
mod proxy;
mod replays;
mod requests;
mod rules;
mod settings;
mod stack;
mod steps;
#[path = "../support/strict.rs"]
mod strict;
mod support;
mod transactional;
mod vanished;
