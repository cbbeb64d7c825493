//! The layer for `Idempotency-Key`, by behaviour. Requests go to the service itself, except where the connection matters.

mod bodies;
mod bounds;
mod cancellation;
mod connections;
mod failures;
mod fixtures;
mod headers;
mod in_flight;
mod leased;
mod mistakes;
mod replays;
mod requests;
mod rules;
mod sameness;
mod settings;
#[path = "../support/strict.rs"]
mod strict;
mod support;
mod transactional;
