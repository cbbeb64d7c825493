//! Tests that compare the table of errors in the documentation with the code.

use std::borrow::Cow;
use std::time::Duration;

use chrono::DateTime;
use sqlx::error::{DatabaseError, ErrorKind};

use super::sqlstate;
use crate::state::Version;
use crate::{BoxError, Error, Incompatible, InvalidBody, InvalidRequest, InvalidStep, Key, Misuse, Mode};

/// The name of its row. A new variant does not compile before it has one.
fn row(error: &Error) -> &'static str {
    match error {
        Error::KeyReused { .. } => "KeyReused",
        Error::InFlight { .. } => "InFlight",
        Error::Indeterminate { .. } => "Indeterminate",
        Error::Exhausted { .. } => "Exhausted",
        Error::LeaseLost => "LeaseLost",
        Error::Retryable(_) => "Retryable",
        Error::Database(cause) if ended_by_the_server(cause) => "Database, 57014 or 55P03",
        Error::Database(_) if error.is_transient() => "Database, transient",
        Error::Database(_) => "Database, any other",
        Error::SchemaMissing { .. } => "SchemaMissing",
        Error::Unanswered => "Unanswered",
        Error::Misuse(Misuse::NoRandomness { .. }) => "Misuse, no randomness",
        Error::StepInDoubt { .. } => "StepInDoubt",
        Error::Misuse(Misuse::Step { .. }) => "Misuse, a step",
        Error::Misuse(Misuse::Options { .. }) => "Misuse, options that do not fit",
        Error::Undecodable { .. } => "Undecodable",
        Error::Unencodable { .. } => "Unencodable",
        Error::InvalidRequest(InvalidRequest::Key(_)) => "InvalidRequest, the key",
        Error::InvalidRequest(InvalidRequest::Body(_)) => "InvalidRequest, the body",
        Error::OtherMode { .. } => "OtherMode",
        Error::Incompatible(Incompatible::UnknownFingerprint { .. }) => "Incompatible, a fingerprint",
        Error::Incompatible(Incompatible::UnknownMode { .. }) => "Incompatible, a mode",
        Error::Incompatible(Incompatible::Schema { .. }) => "Incompatible, the schema",
        Error::Misuse(Misuse::TransactionAborted(_)) => "Misuse, an aborted transaction",
        Error::Misuse(Misuse::NotInTransaction) => "Misuse, no transaction",
        Error::Misuse(Misuse::ClaimSwallowed) => "Misuse, a swallowed claim",
        Error::Misuse(Misuse::TooManyKeys { .. }) => "Misuse, too many keys",
        Error::Misuse(Misuse::AlreadyInTransaction) => "Misuse, the same key twice",
        Error::OutlivedRetention => "OutlivedRetention",
        Error::Misuse(Misuse::NestedTransaction) => "Misuse, a nested transaction",
    }
}

const SCOPE: &str = "tenant-of-nobody-else";
const VALUE: &str = "value-that-is-a-secret";

fn ended_by_the_server(error: &sqlx::Error) -> bool {
    matches!(sqlstate(error).as_deref(), Some("57014" | "55P03"))
}

/// An error of the server with this SQLSTATE.
#[derive(Debug, thiserror::Error)]
#[error("an error of the server")]
struct Sqlstate(&'static str);

impl DatabaseError for Sqlstate {
    fn message(&self) -> &str {
        "an error of the server"
    }

    fn code(&self) -> Option<Cow<'_, str>> {
        Some(self.0.into())
    }

    fn as_error(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        self
    }

    fn as_error_mut(&mut self) -> &mut (dyn std::error::Error + Send + Sync + 'static) {
        self
    }

    fn into_error(self: Box<Self>) -> BoxError {
        self
    }

    fn kind(&self) -> ErrorKind {
        ErrorKind::Other
    }
}

fn samples() -> Vec<Error> {
    let key = || Key::new(SCOPE, "operation", VALUE).expect("a key");
    let cause = || sqlx::Error::RowNotFound;
    let undone = || BoxError::from("undone");
    vec![
        Error::KeyReused { key: key() },
        Error::InFlight { retry_after: Duration::ZERO },
        Error::Indeterminate {
            attempt: 1,
            claimed_at: DateTime::UNIX_EPOCH,
            last_error: None,
            token: 0,
            version: Box::new(Version::sample()),
            steps: vec![],
        },
        Error::Exhausted { attempts: 1, last_error: None, token: 0, version: Box::new(Version::sample()) },
        Error::LeaseLost,
        Error::Retryable(cause()),
        Error::Database(sqlx::Error::PoolTimedOut),
        Error::Database(Sqlstate("57014").into()),
        Error::Database(cause()),
        Error::SchemaMissing { source: undone() },
        Error::Unanswered,
        Error::Misuse(Misuse::NoRandomness { source: undone() }),
        Error::StepInDoubt { step: "text".to_owned() },
        Error::Misuse(Misuse::Step { step: "text".to_owned(), problem: InvalidStep::Name }),
        Misuse::options("it is unlimited"),
        Error::Undecodable { step: None, source: undone() },
        Error::Unencodable { source: undone() },
        Error::InvalidRequest(InvalidRequest::Key(
            Key::new(SCOPE, "operation", format!("{VALUE}\0")).expect_err("a control character"),
        )),
        Error::InvalidRequest(InvalidRequest::Body(InvalidBody::Serialize("text".to_owned()))),
        Error::OtherMode { key: key(), stored: Mode::Mark, asked: Mode::Transaction },
        Error::Incompatible(Incompatible::UnknownFingerprint { version: 9 }),
        Error::Incompatible(Incompatible::UnknownMode { mode: "later".to_owned() }),
        Error::Incompatible(Incompatible::Schema { problem: "a stranger owns it".to_owned() }),
        Error::Misuse(Misuse::TransactionAborted(cause())),
        Error::Misuse(Misuse::NotInTransaction),
        Error::Misuse(Misuse::ClaimSwallowed),
        Error::Misuse(Misuse::TooManyKeys { keys: 101 }),
        Error::Misuse(Misuse::AlreadyInTransaction),
        Error::OutlivedRetention,
        Error::Misuse(Misuse::NestedTransaction),
    ]
}

/// Name, whether transient, HTTP status, what to do.
fn table() -> Vec<[&'static str; 4]> {
    let cells = |line: &'static str| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        std::array::from_fn(|_| cells.next().expect("four columns"))
    };
    include_str!("../../../src/error/table.md").lines().skip(2).map(cells).collect()
}

#[test]
fn no_text_of_an_error_contains_the_scope_or_the_value_of_a_key() {
    let texts = |error: Error| {
        let mut texts = vec![error.to_string(), format!("{error:?}")];
        #[cfg(feature = "http")]
        let error = crate::http::Rejection::of(error);
        let mut cause: Option<&dyn std::error::Error> = Some(&error);
        while let Some(error) = cause {
            texts.push(error.to_string());
            cause = error.source();
        }
        texts.join("\n")
    };
    for error in samples() {
        let text = texts(error);
        assert!(!text.contains(SCOPE) && !text.contains(VALUE), "{text}");
    }
    let reused = Error::KeyReused { key: Key::new(SCOPE, "POST /orders", VALUE).expect("a key") };
    assert!(reused.to_string().contains("POST /orders"), "the operation helps to find the mistake: {reused}");
    assert!(matches!(reused, Error::KeyReused { key } if key.value() == VALUE), "programs have the key");
}

#[test]
fn a_connection_that_is_lost_is_transient() {
    let io = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
    for state in ["08006", "25006", "25P03", "53300", "55P03", "57014", "57P01", "58000"] {
        let error = Error::Database(Sqlstate(state).into());
        assert!(error.is_transient(), "{state}");
        assert_eq!(error.to_string(), "the database failed; ask again with the same key", "{state}");
    }
    for lost in [sqlx::Error::PoolTimedOut, sqlx::Error::PoolClosed, sqlx::Error::Protocol(String::new()), io.into()] {
        assert!(Error::Database(lost).is_transient());
    }
    let refused = ["22P05", "23505", "26000", "28P01", "42501", "58030", "58P01"].map(|state| Sqlstate(state).into());
    for refused in refused.into_iter().chain([sqlx::Error::RowNotFound, sqlx::Error::ColumnNotFound(String::new())]) {
        let refused = Error::Database(refused);
        assert!(!refused.is_transient() && !refused.to_string().contains("ask again"), "{refused}");
    }
}

#[test]
fn the_table_of_errors_is_what_the_code_does() {
    let table = table();
    let mut named = Vec::new();
    for error in samples() {
        let (variant, kind) = row(&error).split_once(", ").unwrap_or((row(&error), ""));
        let name = format!("[`{variant}`](Error::{variant}){}{kind}", if kind.is_empty() { "" } else { ", " });
        let told = table.iter().find(|cells| cells[0] == name).unwrap_or_else(|| panic!("no row {name}"));
        assert_eq!(told[1], if error.is_transient() { "yes" } else { "no" }, "{name}");
        // A client repeats a request after a 503, or after a 409 with `Retry-After`, and after no other status.
        let statuses = told[2].split("; ").map(|told| told.split(' ').next().and_then(|status| status.parse().ok()));
        let statuses: Vec<u16> = statuses.collect::<Option<_>>().unwrap_or_else(|| panic!("{name}: {}", told[2]));
        let status = statuses[0];
        let repeated = status == 503 || matches!(error, Error::InFlight { .. });
        assert_eq!(repeated, error.is_transient(), "{name}: {status}");
        assert!(!told[3].is_empty(), "{name}");
        // The layer refuses a client's invalid value itself. The other parts of a key are the service's.
        let by_client = matches!(error, Error::InvalidRequest(InvalidRequest::Key(_)));
        assert_eq!(statuses.len(), if by_client { 2 } else { 1 }, "{name}: {}", told[2]);
        #[cfg(feature = "http")]
        {
            if let Error::InvalidRequest(InvalidRequest::Key(invalid)) = error {
                let refused = crate::http::Rejection::of_key(invalid);
                assert_eq!(refused.status().as_u16(), status, "{name}: the layer's status for a client");
            }
            let of_service = crate::http::Rejection::of(error).status().as_u16();
            assert_eq!(Some(&of_service), statuses.last(), "{name}: the layer's status");
        }
        named.push(name);
    }
    let rows: Vec<_> = table.iter().map(|cells| cells[0]).collect();
    assert_eq!(rows, named, "each row once, in the order of the samples");
}
