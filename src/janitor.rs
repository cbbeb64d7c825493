//! The janitor, which deletes expired records: [`Janitor`] describes it.

mod options;
mod run;
mod sweep;
mod swept;

pub use options::Janitor;
pub use swept::Swept;
