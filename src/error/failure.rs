//! The error of a call before its conversion into the caller's type.

use std::any::Any;
use std::panic::resume_unwind;

use crate::Error;

/// Where the error of a call comes from. The caller's type does not show this.
pub(crate) enum Failure<E> {
    Crate(Error),
    Perform(E),
    /// The work of a lease panicked with this payload, and its attempt has failed.
    Panicked(Box<dyn Any + Send>),
}

impl<E: From<Error>> Failure<E> {
    pub(crate) fn into_callers(self) -> E {
        match self {
            Self::Crate(error) => error.into(),
            Self::Perform(error) => error,
            Self::Panicked(panic) => resume_unwind(panic),
        }
    }
}

impl<E> From<Error> for Failure<E> {
    fn from(error: Error) -> Self {
        Self::Crate(error)
    }
}
