//! The binary, driven as a process: what it does, its exit codes, its one-line errors.
#![cfg(feature = "cli")]

#[path = "../support/strict.rs"]
mod strict;
mod support;

mod connections;
mod daemon;
mod health;
mod keys;
mod migrate;
mod probes;
mod roles;
mod settle;
mod stats;
mod sweep;
mod unsettled;
