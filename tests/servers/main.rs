//! Tests that start servers or processes of their own: PostgreSQL, PgBouncer, a worker that is suspended.

#[path = "../support/strict.rs"]
mod strict;

#[cfg(target_os = "linux")]
mod closed_checkout;
mod pgbouncer;
mod suspended;
