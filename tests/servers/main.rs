//! Tests that start servers of their own: PostgreSQL and PgBouncer.

#[path = "../support/strict.rs"]
mod strict;

#[cfg(target_os = "linux")]
mod closed_checkout;
mod pgbouncer;
