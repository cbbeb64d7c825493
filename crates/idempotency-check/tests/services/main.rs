//! What `idempotency-check` finds in services: in one with planted mistakes, in two of other languages, in packages
//! that promise idempotency, and in two demos of pg-idempotency.
//!
//! `CHECK=whole` tries every interruption of every service, for docs/checked.md (`script/check-services`). Otherwise
//! only what the tests assert is tried.

mod as_sent;
mod database;
mod installed;
mod ours;
mod packages;
mod page;
mod planted;
mod port;
mod program;
mod redis;
mod vectors;

/// libtest hides what a passing test prints. A test that did nothing has to say so.
fn skipped<T>(service: &str, reason: &str) -> Option<T> {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "skipped: {service}: {reason}");
    None
}
