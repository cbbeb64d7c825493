//! The session that holds a lock.

use std::fmt::{Display, Formatter};

/// A session that holds a lock, with the facts that every role may read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockHolder {
    /// Its process, for `pg_terminate_backend`.
    pub pid: i32,
    /// The role that it logged in as.
    pub role: Option<String>,
    /// Its `application_name`, if it has one.
    pub application: Option<String>,
}

impl Display for LockHolder {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {}", self.pid)?;
        if let Some(role) = &self.role {
            write!(f, ", role {role:?}")?;
        }
        if let Some(application) = &self.application {
            write!(f, ", application {application:?}")?;
        }
        Ok(())
    }
}
