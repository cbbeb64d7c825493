//! Interrupts a service at each message to its PostgreSQL server. After each interruption, a client retries the request
//! with the same idempotency key. The check then judges whether the operation had one effect and one answer.
//!
//! The program `idempotency-check` checks an HTTP service in any language. Its README lists the interruptions. This
//! library runs the same check in a project's own tests:
//!
//! ```no_run
//! # async fn pay(_: &str, _: &str) -> Result<idempotency_check::Answer, String> { unimplemented!() }
//! # async fn test() -> Result<(), idempotency_check::Error> {
//! use idempotency_check::Check;
//!
//! let report = Check::new("postgres://localhost/shop")
//!     .effects("select count(*), coalesce(sum(amount), 0) from payments")
//!     .call(async |database_url, key| pay(&database_url, &key).await)
//!     .run()
//!     .await?;
//! assert!(report.findings.is_empty(), "{report}");
//! # Ok(())
//! # }
//! ```
//!
//! For each request, retry and duplicate, the check calls the function that was passed to [`Check::call`]. To hang up,
//! the check drops the future of the call. Unlike the program, the library does not cut uploads off, because the
//! function sends its own bodies.

mod check;
pub mod cli;
mod client;
mod database;
mod effects;
mod error;
mod form;
mod judge;
mod proxy;
mod report;
mod run;
mod service;
mod talk;
pub mod wire;

pub use check::Check;
pub use client::Answer;
pub use error::Error;
pub use judge::{Compare, Interruption, Verdict};
pub use report::{Checked, Numbered, Report, Told, Try};
