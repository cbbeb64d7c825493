use std::io;

/// The reason why the check could not run. A finding is not an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that cannot be used.
    #[error("{0}")]
    Argument(String),
    /// The database cannot be reached.
    #[error("the database does not answer")]
    Database(#[source] sqlx::Error),
    /// The query or the command for the effects fails, or its result cannot be compared.
    #[error("the effects cannot be read: {0}")]
    Effects(String),
    /// The service does not start, or does not answer.
    #[error("{0}")]
    Service(String),
    /// No message came through the proxy.
    #[error(
        "the service answered, but it does not use the proxy: it has to connect to the database with the URL that the \
         check gives it (in DATABASE_URL, or the variable of --env)"
    )]
    Unproxied,
    /// The requests without an interruption fail, change nothing, or differ from each other.
    #[error("{0}")]
    Undisturbed(String),
    /// The proxy cannot listen, or the certificates of `sslrootcert` cannot be read.
    #[error("the proxy cannot be opened")]
    Proxy(#[source] io::Error),
}

impl Error {
    /// The error and its causes, in one line.
    #[must_use]
    pub fn in_one_line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            line.push_str(": ");
            line.push_str(&error.to_string());
            cause = error.source();
        }
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}
