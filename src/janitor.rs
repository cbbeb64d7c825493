//! [`Janitor`] deletes expired records.

mod options;
mod run;
mod sweep;
mod swept;

pub use options::Janitor;
pub use swept::Swept;
