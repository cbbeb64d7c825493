//! Demos: whole services that run into trouble, such as storms of duplicates, hang-ups and killed processes, and then
//! check their own books. Each program exits with 0 only if every count is right. `examples/` in the root has the code
//! to copy.
//!
//! ```sh
//! cargo run -p demos --bin rides # on a temporary PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! # Layout
//!
//! This library contains the tools that the programs share:
//!
//! - [`program`]: a program's start and end, and the start of its worker processes.
//! - [`broker`]: a broker, whose messages are acknowledged, and its client.
//! - [`schema`]: the tables of one run, and counts of their rows.
//! - [`books`]: counts against expected counts.
//! - `escape`: the writes of a run, once more through the pool.
//! - [`crew`]: worker processes that are killed and replaced.
//! - [`gate`]: stops a service in the middle of its work.
//! - [`service`]: an HTTP service on a socket of this process, and the user of a request.
//! - [`client`]: requests, the answers to them, and storms of them.
//! - [`gateway`] and [`outside`]: a gateway that charges cards and sends texts, and its client.
//! - [`problem`]: the error responses of the services.

#![allow(missing_docs, reason = "the programs beside it are its only users; names that need no comment have none")]

pub mod books;
pub mod broker;
pub mod client;
pub mod crew;
mod escape;
pub mod gate;
pub mod gateway;
pub mod outside;
pub mod problem;
pub mod program;
pub mod schema;
pub mod service;
