//! The binary, driven as a process: what it does, its exit codes, its one-line errors. [`metrics`] tests the library's
//! metrics with the exporter that the daemon serves.

mod support;

mod browser;
mod connections;
mod console;
mod daemon;
mod health;
mod keys;
mod manifests;
mod metrics;
mod migrate;
mod probes;
mod protect;
mod roles;
mod schema;
mod settings;
mod settle;
mod silence;
mod slow_clients;
mod stats;
mod sweep;
mod terminal;
mod unsettled;
