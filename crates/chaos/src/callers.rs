//! Callers for faults that last seconds: they retry a key until it is answered, as a service does while its database is
//! away.
//!
//! # Layout
//!
//! - [`load`] is one world with its callers; [`marks`] and [`leases`] are its calls in these modes.
//! - [`modes`] is a load in each mode, and compares all their answers with the tables.
//! - [`outage`] measures what a caller sees.

pub(crate) mod leases;
pub(crate) mod load;
pub(crate) mod marks;
pub(crate) mod modes;
pub(crate) mod outage;
