//! Tests that start servers of their own: PostgreSQL and PgBouncer.

#[cfg(target_os = "linux")]
mod closed_checkout;
mod pgbouncer;
