//! Mistakes in the code of the service.

use super::Error;

/// How a service uses the crate wrongly. A retry meets the same mistake.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Misuse {
    /// The options contradict each other, or do not fit this call, or a duration is out of range. No SQL ran.
    #[error("the options do not allow this: {problem}")]
    #[non_exhaustive]
    Options {
        /// What is wrong, and what to do.
        problem: String,
    },
}

impl Misuse {
    pub(crate) fn options(problem: &str) -> Error {
        Self::Options { problem: problem.to_owned() }.into()
    }
}
