//! Errors in one line, with the failure, its cause, and advice. A URL is never printed, because it may contain a
//! password.

use std::error::Error as _;
use std::io::{IsTerminal as _, stderr, stdout};
use std::sync::LazyLock;
use std::time::Duration;

use pg_idempotency::operator::State;
use pg_idempotency::{Error, InvalidKey, Mode, SettleError, SetupError};

use crate::time::span;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("no database given; set DATABASE_URL or --database-url")]
    NoDatabase,
    #[error(
        "the database URL cannot be read; it should look like postgres://role@host/database; percent-encode each \
         special character of the password, such as %23 for # and %2F for /"
    )]
    MalformedUrl,
    #[error("cannot connect; check the database URL, and that the server is up")]
    Connection(#[source] sqlx::Error),
    #[error("the server refused the login; check the role, and its password in the database URL or PGPASSFILE")]
    Login(#[source] sqlx::Error),
    #[error("the server gave no answer within {}; check host, port and firewall", span(*.0))]
    Silence(Duration),
    #[error(
        "the server did not answer in time, and may still have carried out the command; before you repeat a decision, \
         look at the key with `show`"
    )]
    Unanswered,
    #[error(
        "the connection was lost during the decision, which may have taken effect; look at the key with `show` before \
         you repeat it"
    )]
    LostInDecision(#[source] sqlx::Error),
    #[error(transparent)]
    Idempotency(Error),
    #[error(transparent)]
    Setup(Box<SetupError>),
    #[error(
        "the server refused the role; a role that sweeps needs usage on the schema, select on its two tables, delete \
         and update (last_error) on idempotency.record; a role that settles needs select, update and delete there; if \
         row level security is on for them, the role also needs bypassrls"
    )]
    Refused(#[source] sqlx::Error),
    #[error(
        "the server refused the role; a role that migrates needs create on the database, or has to own the schema \
         idempotency; or let a DBA run what `migrate --print` prints"
    )]
    MayNotMigrate(#[source] sqlx::Error),
    #[error(
        "the server refused the role; a role that protects has to own the table, and needs usage on the schema \
         idempotency and select on idempotency._sqlx_migrations"
    )]
    MayNotProtect(#[source] sqlx::Error),
    #[error(
        "the disk of the server is full; free some space first, because a deletion needs space, too, and returns none \
         to the disk"
    )]
    Full(#[source] sqlx::Error),
    #[error(
        "the server stopped the statement; if the statement_timeout of the role is the cause, use a role with a longer \
         one, such as the operator's, or a smaller --batch-size for a sweep"
    )]
    Stopped(#[source] sqlx::Error),
    #[error("the server refused the statement")]
    Database(#[source] sqlx::Error),
    #[error(transparent)]
    Key(#[from] InvalidKey),
    #[error("there is no record of this key")]
    NoRecord,
    #[error("the record is under a live lease for {} more; its owner may be at work, so wait for it", span(*left))]
    Leased { left: Duration },
    #[error("nothing was done: the record's state is {state}; {why}")]
    NotToBeSettled { state: State, why: &'static str },
    #[error(
        "nothing was done: in doubt {}; look up the downstream key of each, which `show` prints, at the service that \
         it called; if it took effect, `resolve --step NAME` with its result, otherwise `release --step NAME`",
        if let [step] = &steps[..] { format!("is the step {step:?}") } else { format!("are the steps {steps:?}") }
    )]
    StepsInDoubt { steps: Vec<String> },
    #[error(
        "the operation is in mode {mode}, and has no steps; only an operation in steps has downstream keys of steps"
    )]
    NoSteps { mode: Mode },
    #[error("nothing was done: the step {step:?} is not in doubt: {why}; `show` lists the steps")]
    StepNotInDoubt { step: String, why: &'static str },
    #[error(
        "nothing was done now, because the record has changed since it was shown, perhaps by an earlier decision; look \
         again"
    )]
    Changed,
    #[error(
        "nothing was done: the question was not answered with yes; without a terminal, run `show`, and add --seen with \
         the value that it prints"
    )]
    NotConfirmed,
    #[error(
        "the response is not valid JSON, see line {line}, column {column}; give the JSON that the service would have \
         stored"
    )]
    NotJson {
        line: usize,
        column: usize,
        #[source]
        source: serde_json::Error,
    },
    #[error("cannot read the response from {path:?}; give a file of UTF-8 text")]
    ResponseFile {
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("a promise may be broken, see above")]
    Unhealthy,
    #[error("cannot write the result")]
    Output(#[source] std::io::Error),
    #[error(
        "refused to serve the console on {address}: everyone who reaches it could settle keys; give --token-file or \
         --user-header, or listen on 127.0.0.1"
    )]
    OpenConsole { address: std::net::SocketAddr },
    #[error("cannot use the token file {path:?}; the file should contain one line of at least 16 characters")]
    TokenFile {
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot append to the log file {path:?}; give a file that this user may write, in a directory that exists")]
    LogFile {
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot listen on {address}; does another process use it?")]
    Listen {
        address: std::net::SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot write the manual pages into {directory:?}; give a directory that exists")]
    Manual {
        directory: std::path::PathBuf,
        #[source]
        error: std::io::Error,
    },
    #[error("cannot listen for signals")]
    Signals(#[source] std::io::Error),
}

impl Failure {
    /// The exit code: 2 for wrong arguments, 1 for all other failures.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::NoDatabase
            | Self::MalformedUrl
            | Self::Key(_)
            | Self::NotJson { .. }
            | Self::ResponseFile { .. }
            | Self::OpenConsole { .. }
            | Self::TokenFile { .. }
            | Self::LogFile { .. }
            | Self::NotConfirmed => 2,
            _ => 1,
        }
    }

    /// The error and its causes. The text of the server's error occurs in several causes of sqlx, and is printed once.
    pub(crate) fn in_one_line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            // The text of a server's error ends with a line number of the server's source code.
            let text = error.to_string();
            let text = text.split(" at line ").next().unwrap_or_default();
            if !line.contains(text) {
                line = format!("{line}: {text}");
            }
            cause = error.source();
        }
        printable(&line)
    }
}

/// Writes foreign text in one line. Escapes characters that would start another line, would control the terminal, would
/// change the direction of writing, or would be invisible. Escapes all characters beyond ASCII for a terminal that does
/// not read UTF-8, because such a terminal takes some of their bytes as control characters.
pub(crate) fn printable(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut line, character| {
        match character {
            '\n' => line.push(' '),
            '"' | '\'' | '\\' => line.push(character),
            other if *IS_ASCII_TERMINAL => line.extend(other.escape_default()),
            other => line.extend(other.escape_debug()),
        }
        line
    })
}

/// Whether standard output or standard error is a terminal, and the locale is not in UTF-8. A file or a pipe always
/// gets UTF-8.
static IS_ASCII_TERMINAL: LazyLock<bool> = LazyLock::new(|| {
    let variables = ["LC_ALL", "LC_CTYPE", "LANG"].map(|name| std::env::var(name).unwrap_or_default());
    let locale = variables.into_iter().find(|locale| !locale.is_empty()).unwrap_or_default().to_lowercase();
    let is_terminal = stdout().is_terminal() || stderr().is_terminal();
    is_terminal && !locale.contains("utf-8") && !locale.contains("utf8")
});

/// The failure of an attempt to connect. SQLSTATE class 28 means that the server refused the login.
pub(crate) fn of_connecting(error: sqlx::Error) -> Failure {
    match error.as_database_error().and_then(|cause| cause.code()) {
        Some(code) if code.starts_with("28") => Failure::Login(error),
        _ => Failure::Connection(error),
    }
}

/// Changes the advice, because a role needs other rights to create a schema than to use the schema.
pub(crate) fn of_migrating(failure: Failure) -> Failure {
    match failure {
        Failure::Refused(cause) => Failure::MayNotMigrate(cause),
        failure => failure,
    }
}

/// Changes the advice, because a role that protects a table has to own the table. The rights of a janitor are not
/// enough.
pub(crate) fn of_protecting(failure: Failure) -> Failure {
    match failure {
        Failure::Refused(cause) => Failure::MayNotProtect(cause),
        failure => failure,
    }
}

impl From<SetupError> for Failure {
    fn from(error: SetupError) -> Self {
        match error {
            SetupError::Other(error) => error.into(),
            error => Self::Setup(error.into()),
        }
    }
}

impl From<SettleError> for Failure {
    fn from(error: SettleError) -> Self {
        match error {
            SettleError::Other(error) => error.into(),
            // The record still existed a moment ago.
            _ => Self::Changed,
        }
    }
}

/// The advice in the library's errors is for a caller with a key, and does not help an operator. SQLSTATE 42501 means
/// that the role lacks a right, which an administrator can grant.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Database(cause) => match cause.as_database_error().and_then(|cause| cause.code()).as_deref() {
                Some("42501") => Self::Refused(cause),
                Some("53100") => Self::Full(cause),
                Some("57014") => Self::Stopped(cause),
                // A pool connects when it is first used, so a statement can fail because of its connection. These
                // SQLSTATE codes and classes mean a lost connection, a refused login, a wrong database, too many
                // connections, or a server that is starting or stopping.
                Some(code) if ["08", "28", "3D", "53300", "57P"].iter().any(|class| code.starts_with(class)) => {
                    of_connecting(cause)
                }
                Some(_) => Self::Database(cause),
                None => match cause {
                    sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::Tls(_) => Self::Connection(cause),
                    cause => Self::Database(cause),
                },
            },
            Error::Unanswered => Self::Unanswered,
            error => Self::Idempotency(error),
        }
    }
}
