//! One call in transaction mode, and what its caller may conclude from the result.

use std::error::Error as _;

use pg_idempotency::http::Rejection;
use pg_idempotency::{Error, Fingerprint, Idempotency, Key, OnDuplicate, Outcome};
use sqlx::PgConnection;

use crate::history::What;
use crate::random::Random;

/// The suffix of the name of a call through the SQL functions.
pub(crate) const THROUGH_SQL: &str = "-sql";
/// The prefix of the keys for which callers of the SQL functions ask, too; none of world.rs begins so.
pub(crate) const KEYS_OF_BOTH_DOORS: &str = "both-";
/// What a caller is told about a claim whose owner is gone.
pub(crate) const INDETERMINATE: &str = "indeterminate";

/// The function of the crate that a call uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Door {
    Run,
    /// After a look for a stored response.
    RunReplayFirst,
    RunNested,
    /// In a transaction of the caller. Its `begin` is sqlx's, which is not safe to drop.
    OwnTransaction,
    /// Over HTTP, to a handler behind the layer.
    Layer,
    /// The same, after a look for a stored response.
    LayerReplayFirst,
    /// The SQL functions.
    Sql,
    /// The SQL function that claims, calls a function for the effect, and completes, in one statement.
    SqlRun,
}

pub(crate) const SAFE_TO_DROP: &[Door] = &[Door::Run, Door::RunReplayFirst, Door::RunNested];
pub(crate) const EVERY_DOOR: &[Door] = &[Door::Run, Door::RunReplayFirst, Door::RunNested, Door::OwnTransaction];

pub(crate) const OVER_HTTP: &[Door] = &[Door::Layer, Door::LayerReplayFirst];

/// The keys of requests over HTTP: their fingerprint covers the method and the path too.
pub(crate) fn is_over_http(key: &str) -> bool {
    key.ends_with(['1', '3', '5', '7', '9'])
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) key: String,
    /// The name of the call, which is also its response.
    pub(crate) call: String,
    pub(crate) door: Door,
    pub(crate) reject: bool,
    /// `perform` fails, after its effect.
    pub(crate) fails: bool,
    /// The call's future is dropped after so many polls.
    pub(crate) polls: Option<usize>,
}

impl Request {
    pub(crate) fn new(key: &str, call: &str) -> Self {
        Self {
            key: key.to_owned(),
            call: call.to_owned(),
            door: if is_over_http(key) { OVER_HTTP[0] } else { Door::Run },
            reject: false,
            fails: false,
            polls: None,
        }
    }

    /// Chooses one of these doors, or one for the keys of requests over HTTP, or the SQL functions for half of the
    /// calls that share their keys with them.
    pub(crate) fn enter(&mut self, random: &mut Random, doors: &[Door]) {
        self.door = random.of(if is_over_http(&self.key) { OVER_HTTP } else { doors });
        if self.is_portable() {
            self.reject = random.one_in(4);
            if random.one_in(2) {
                self.door = random.of(&[Door::Sql, Door::SqlRun]);
                self.call.push_str(THROUGH_SQL);
            }
        }
    }

    /// Whether callers of the SQL functions ask for its key, too.
    pub(crate) fn is_portable(&self) -> bool {
        self.key.starts_with(KEYS_OF_BOTH_DOORS)
    }

    /// The request in the form that every language can compute, which the layer computes too.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        format!("POST /\n{}", self.key).into_bytes()
    }

    pub(crate) fn fingerprint(&self) -> Fingerprint {
        if self.is_portable() {
            return Fingerprint::of_bytes(&self.bytes());
        }
        Fingerprint::of_json(&self.key).expect("a string")
    }

    pub(crate) fn options(&self) -> Idempotency {
        let options =
            Idempotency::new().replay_first(matches!(self.door, Door::RunReplayFirst | Door::LayerReplayFirst));
        if self.reject { options.on_duplicate(OnDuplicate::Reject) } else { options }
    }

    pub(crate) async fn effect(&self, conn: &mut PgConnection) -> Result<String, Failure> {
        let insert = sqlx::query("insert into effect (key, call) values ($1::text, $2::text)");
        insert.bind(&self.key).bind(&self.call).execute(conn).await?;
        if self.fails { Err(Failure::AskedFor) } else { Ok(self.call.clone()) }
    }
}

pub(crate) fn key(value: &str) -> Key {
    Key::new(value, "chaos", value).expect("a valid key")
}

/// Why a call returned no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("perform failed, as the request says")]
    AskedFor,
    #[error("refused, with nothing performed: {0}")]
    Refused(&'static str),
    #[error("{0}")]
    Barred(&'static str),
    #[error(transparent)]
    Rejected(#[from] Rejection),
    #[error(transparent)]
    Of(#[from] Error),
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Of(error.into())
    }
}

/// What the caller may conclude from a result.
pub(crate) fn ending(result: Result<Outcome<String>, Failure>) -> What {
    match result {
        Ok(Outcome::Performed(response)) => What::Performed(response),
        Ok(Outcome::Replayed(response)) => What::Replayed(response),
        Err(Failure::AskedFor) => What::Refused("as the request says".to_owned()),
        Err(Failure::Refused(why)) => What::Refused(why.to_owned()),
        Err(Failure::Barred(why)) => What::Barred(why.to_owned()),
        Err(Failure::Rejected(rejection)) => of_rejection(&rejection),
        Err(Failure::Of(error)) => of_error(&error),
    }
}

fn of_error(error: &Error) -> What {
    match error {
        Error::InFlight { .. } => What::Refused("in flight".to_owned()),
        Error::OutlivedRetention => What::Refused("outlived its retention".to_owned()),
        Error::Retryable(_) => What::Refused("retryable".to_owned()),
        // The error may be one of the COMMIT.
        Error::Database(cause) => What::Unknown(cause.to_string()),
        Error::Unanswered => What::Unknown("unanswered".to_owned()),
        Error::Indeterminate { .. } => What::Barred(INDETERMINATE.to_owned()),
        Error::Exhausted { .. } => What::Barred("exhausted".to_owned()),
        // In lease mode there is an effect without a result.
        Error::LeaseLost => What::Unknown("lease lost".to_owned()),
        Error::StepInDoubt { .. } => What::Unknown("a step in doubt".to_owned()),
        wrong => What::Wrong(format!("{wrong}")),
    }
}

fn of_rejection(rejection: &Rejection) -> What {
    match rejection {
        Rejection::InFlight { .. } | Rejection::Overloaded { .. } | Rejection::TooManyRequests { .. } => {
            What::Refused(rejection.kind().to_owned())
        }
        Rejection::Indeterminate { .. } => What::Barred(INDETERMINATE.to_owned()),
        Rejection::Unavailable(error) => of_error(error),
        Rejection::Misconfigured(mistake) => match mistake.downcast_ref() {
            // After a refusal of the database, the end of the COMMIT is known.
            None | Some(Error::Database(_)) => What::Wrong(format!("{mistake}: {:?}", mistake.source())),
            Some(error) => of_error(error),
        },
        wrong => What::Wrong(format!("{wrong}")),
    }
}
