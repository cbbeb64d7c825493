//! The mark of an error that a call has met before its work.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;

use sqlx::error::{DatabaseError, ErrorKind};

use crate::BoxError;

/// An error of the way to the server, which a call has met before its work. In every other respect, this is the
/// server's error. The mark is a type, because the variant of [`Error`](crate::Error) contains only an error of sqlx.
pub(super) struct Unreached(Box<dyn DatabaseError>);

impl Unreached {
    pub(super) fn is(error: &(dyn DatabaseError + 'static)) -> bool {
        let error: &(dyn StdError + 'static) = error;
        error.is::<Self>()
    }

    pub(super) fn of(error: sqlx::Error) -> sqlx::Error {
        match error {
            sqlx::Error::Database(error) if !Self::is(&*error) => sqlx::Error::Database(Box::new(Self(error))),
            error => error,
        }
    }
}

impl fmt::Debug for Unreached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Unreached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl StdError for Unreached {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

impl DatabaseError for Unreached {
    fn message(&self) -> &str {
        self.0.message()
    }

    fn code(&self) -> Option<Cow<'_, str>> {
        self.0.code()
    }

    // A service that downcasts gets the server's error.
    fn as_error(&self) -> &(dyn StdError + Send + Sync + 'static) {
        self.0.as_error()
    }

    fn as_error_mut(&mut self) -> &mut (dyn StdError + Send + Sync + 'static) {
        self.0.as_error_mut()
    }

    fn into_error(self: Box<Self>) -> BoxError {
        self.0.into_error()
    }

    fn constraint(&self) -> Option<&str> {
        self.0.constraint()
    }

    fn table(&self) -> Option<&str> {
        self.0.table()
    }

    fn kind(&self) -> ErrorKind {
        self.0.kind()
    }
}
