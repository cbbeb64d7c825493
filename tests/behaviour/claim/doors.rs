//! The ways to make a call in transaction mode, for one table of answers.

use std::time::Duration;

use pg_idempotency::{Error, Fingerprint, Idempotency, Key, Misuse, OnDuplicate, Outcome};
use rig::functions;
use sqlx::PgConnection;

use super::answers::{Expected, State};

const FIVE_SECONDS: OnDuplicate = OnDuplicate::Wait(Duration::from_secs(5));

/// The Rust functions, with these options, and the SQL functions.
#[derive(Clone, Copy, Debug)]
pub(super) enum Door {
    Rust(Idempotency),
    Sql { wait: Option<&'static str> },
}

impl Door {
    pub(super) fn all() -> anyhow::Result<Vec<Self>> {
        let mut doors = Vec::new();
        for kind in [FIVE_SECONDS, OnDuplicate::Reject] {
            let options = Idempotency::new().on_duplicate(kind);
            doors.push(Self::Rust(options));
        }
        doors.extend([None, Some("0")].map(|wait| Self::Sql { wait }));
        Ok(doors)
    }

    pub(super) fn waits(self) -> bool {
        match self {
            Self::Rust(options) => options == Idempotency::new().on_duplicate(FIVE_SECONDS),
            Self::Sql { wait } => wait.is_none(),
        }
    }

    /// Makes the call, and performs where it is told to.
    pub(super) async fn call(self, conn: &mut PgConnection, key: &Key, state: State) -> anyhow::Result<Expected> {
        let expected = match self {
            Self::Rust(options) => {
                let perform = async |_: &mut PgConnection| -> Result<String, Error> { Ok("second".to_owned()) };
                match options.ensure(&mut *conn, key, "body", perform).await {
                    Ok(Outcome::Performed(response)) => {
                        assert_eq!(response, "second");
                        Expected::TakenOver { attempt: 0 }
                    }
                    Ok(Outcome::Replayed(response)) => {
                        assert_eq!(response, "first");
                        Expected::Replayed
                    }
                    Err(Error::OtherMode { stored, asked, .. }) => {
                        assert_eq!((&*stored.to_string(), &*asked.to_string()), (state.mode, "transaction"));
                        Expected::OtherMode
                    }
                    Err(Error::Misuse(Misuse::AlreadyInTransaction)) => Expected::AlreadyInTransaction,
                    Err(Error::KeyReused { .. }) => Expected::KeyReused,
                    Err(Error::Indeterminate { attempt, token, .. }) => {
                        assert_eq!((attempt, token), (3, 1));
                        Expected::Indeterminate
                    }
                    Err(error) => panic!("{state:?}: {error:?}"),
                }
            }
            Self::Sql { wait } => {
                let asked = Fingerprint::of_json("body")?;
                let answer = functions::ensure(conn, key, asked.as_bytes(), wait).await?;
                assert_eq!(answer.token.is_some(), answer.outcome == "claimed", "{answer:?}");
                assert_eq!(answer.body.as_deref(), (answer.outcome == "replayed").then_some(&br#""first""#[..]));
                match &*answer.outcome {
                    "claimed" => {
                        functions::complete(conn, key, answer.token, (None, None, Some(br#""second""#))).await?;
                        Expected::TakenOver { attempt: 0 }
                    }
                    "replayed" => Expected::Replayed,
                    "other_mode" => Expected::OtherMode,
                    "already_in_transaction" => Expected::AlreadyInTransaction,
                    "key_reused" => Expected::KeyReused,
                    "indeterminate" => Expected::Indeterminate,
                    other => panic!("{state:?}: {other}"),
                }
            }
        };
        let Expected::TakenOver { .. } = expected else { return Ok(expected) };
        let stored = "select attempt from idempotency.record where completed_at is not null and token <> 1";
        Ok(Expected::TakenOver { attempt: sqlx::query_scalar(stored).fetch_one(conn).await? })
    }
}
