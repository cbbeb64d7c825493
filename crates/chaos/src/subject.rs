//! What is put under faults: the crate, or a variant of its protocol that is broken on purpose.

use std::str::FromStr;
use std::time::Duration;

use pg_idempotency::testing::cancel_after;
use pg_idempotency::{Deployment, Error, Idempotency, InFlight, Key, Outcome, RoundTrips, Verdict};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};

use crate::error_checker::{APART, INDETERMINATE};
use crate::history::What;
use crate::mutant::Mutant;
use crate::release_checker::SCHEMA_MISSING;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    Crate,
    Mutant(Mutant),
}

/// By which of the crate's doors a call comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Door {
    Run,
    /// In the fewest round trips.
    RunFewest,
    /// After a look for what is stored.
    RunSelectFirst,
    RunIsolated,
    /// A transaction of the caller's. Its `begin` is sqlx's, which is not safe to drop: not where futures are dropped.
    OwnTransaction,
}

pub(crate) const SAFE_TO_DROP: &[Door] = &[Door::Run, Door::RunFewest, Door::RunSelectFirst, Door::RunIsolated];
pub(crate) const EVERY_DOOR: &[Door] =
    &[Door::Run, Door::RunFewest, Door::RunSelectFirst, Door::RunIsolated, Door::OwnTransaction];

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) key: String,
    /// The name of the call, which is its response too.
    pub(crate) call: String,
    pub(crate) door: Door,
    pub(crate) reject: bool,
    /// Whether `perform` is to fail, after its effect.
    pub(crate) fails: bool,
    /// How `perform` is to end the transaction that it is in, after its effect and before another one.
    pub(crate) ends: Option<Ends>,
    pub(crate) retention: Duration,
    pub(crate) prepared: bool,
    pub(crate) distributed: bool,
}

impl Request {
    pub(crate) fn new(key: &str, call: &str) -> Self {
        Self {
            key: key.to_owned(),
            call: call.to_owned(),
            door: Door::Run,
            reject: false,
            fails: false,
            ends: None,
            retention: pg_idempotency::DEFAULT_RETENTION,
            prepared: true,
            distributed: false,
        }
    }

    pub(crate) fn key(&self) -> Key {
        key(&self.key)
    }

    pub(crate) fn deployment(&self) -> Deployment {
        Deployment::new().with_prepared_statements(self.prepared).with_distributed(self.distributed)
    }

    fn options(&self) -> Result<Idempotency, Error> {
        let options = Idempotency::new().with_deployment(self.deployment()).with_retention(self.retention)?;
        let options = options.with_round_trips(match self.door {
            Door::RunSelectFirst => RoundTrips::SelectFirst,
            Door::RunFewest => RoundTrips::Fewest,
            _ => RoundTrips::Plain,
        });
        Ok(if self.reject { options.with_in_flight(InFlight::Reject)? } else { options })
    }

    pub(crate) async fn effect(&self, conn: &mut PgConnection) -> Result<String, Failure> {
        self.insert(conn, &self.call).await?;
        if let Some(ends) = self.ends {
            ends.end_transaction(conn).await?;
            self.insert(conn, &format!("{}{APART}", self.call)).await?;
        }
        if self.fails { Err(Failure::AskedFor) } else { Ok(self.call.clone()) }
    }

    async fn insert(&self, conn: &mut PgConnection, call: &str) -> sqlx::Result<()> {
        sqlx::query("insert into effect (key, call) values ($1::text, $2::text)")
            .persistent(self.prepared)
            .bind(&self.key)
            .bind(call)
            .execute(conn)
            .await
            .map(drop)
    }
}

/// How a `perform` ends the transaction that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    Commit,
    CommitAndBegin,
    Rollback,
    /// A nested `begin` that is dropped while it waits: sqlx rolls back the outer transaction then.
    DroppedBegin,
}

impl Ends {
    async fn end_transaction(self, conn: &mut PgConnection) -> sqlx::Result<()> {
        match self {
            Self::Commit => conn.execute("commit").await.map(drop),
            Self::CommitAndBegin => conn.execute(sqlx::raw_sql("commit; begin")).await.map(drop),
            Self::Rollback => conn.execute("rollback").await.map(drop),
            Self::DroppedBegin => {
                // The answer to the sleep comes first, so the begin waits for sure.
                cancel_after(1, conn.execute("select pg_sleep(0.02)")).await;
                cancel_after(1, conn.begin()).await;
                Ok(())
            }
        }
    }

    /// Whether the claim is committed with it.
    pub(crate) fn commits(self) -> bool {
        matches!(self, Self::Commit | Self::CommitAndBegin)
    }
}

/// Each key has a scope of its own, so that the keys are on all nodes of a distributed table.
pub(crate) fn key(value: &str) -> Key {
    Key::new(value, "chaos", value).expect("a valid key")
}

/// Why a call gave no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("perform failed, as it was asked to")]
    AskedFor,
    #[error("a mutant refused: {0}")]
    Mutant(&'static str),
    #[error("a mutant told: {0}")]
    Barred(&'static str),
    #[error("the claim's transaction is gone, as a mutant tells it")]
    Torn,
    #[error(transparent)]
    Of(#[from] Error),
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Of(error.into())
    }
}

impl Subject {
    pub(crate) async fn call(self, pool: &PgPool, request: &Request) -> What {
        ending(self.attempt(pool, request).await)
    }

    pub(crate) async fn attempt(self, pool: &PgPool, request: &Request) -> Result<Outcome<String>, Failure> {
        match self {
            Self::Crate => by_the_crate(pool, request).await,
            Self::Mutant(mutant) if mutant.is_of_the_schema() => by_the_crate(pool, request).await,
            Self::Mutant(mutant) => mutant.call(pool, request).await,
        }
    }

    /// In a transaction of the caller's, who commits.
    pub(crate) async fn within(self, conn: &mut PgConnection, request: &Request) -> Result<Outcome<String>, Failure> {
        match self {
            Self::Mutant(mutant) if !mutant.is_of_the_schema() => mutant.perform(conn, request).await,
            _ => {
                let body = request.key.as_str();
                request.options()?.ensure(conn, &request.key(), body, async |conn| request.effect(conn).await).await
            }
        }
    }

    pub(crate) fn mutant(self) -> Option<Mutant> {
        match self {
            Self::Crate => None,
            Self::Mutant(mutant) => Some(mutant),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Crate => "crate",
            Self::Mutant(mutant) => mutant.name(),
        }
    }
}

impl FromStr for Subject {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Self> {
        if name == "crate" { Ok(Self::Crate) } else { Ok(Self::Mutant(name.parse()?)) }
    }
}

async fn by_the_crate(pool: &PgPool, request: &Request) -> Result<Outcome<String>, Failure> {
    let (options, key) = (request.options()?, request.key());
    let body = request.key.as_str();
    match request.door {
        Door::Run | Door::RunFewest | Door::RunSelectFirst => {
            options.run(pool, &key, body, async |conn| request.effect(conn).await).await
        }
        Door::RunIsolated => {
            let perform = async |conn: &mut PgConnection| -> Result<_, Failure> {
                Ok(Verdict::Keep(request.effect(conn).await?))
            };
            options.run_isolated(pool, &key, body, perform).await
        }
        Door::OwnTransaction => {
            let mut tx = pool.begin().await?;
            match options.ensure(&mut tx, &key, body, async |conn| request.effect(conn).await).await {
                Ok(outcome) => {
                    tx.commit().await?;
                    Ok(outcome)
                }
                Err(error) => {
                    let _ = tx.rollback().await;
                    Err(error)
                }
            }
        }
    }
}

/// What the caller may conclude from it.
pub(crate) fn ending(result: Result<Outcome<String>, Failure>) -> What {
    match result {
        Ok(Outcome::Performed(response)) => What::Performed(response),
        Ok(Outcome::Replayed(response)) => What::Replayed(response),
        Err(Failure::AskedFor) => What::Refused("asked for".to_owned()),
        Err(Failure::Mutant(why)) => What::Refused(why.to_owned()),
        Err(Failure::Barred(why)) => What::Barred(why.to_owned()),
        Err(Failure::Torn) => What::Refused("torn".to_owned()),
        Err(Failure::Of(error)) => match &error {
            Error::InFlight { .. } => What::Refused("in flight".to_owned()),
            Error::UnknownTransaction => What::Refused("somebody's transaction".to_owned()),
            Error::OutlivedRetention => What::Refused("outlived its retention".to_owned()),
            Error::Retryable(_) => What::Refused("retryable".to_owned()),
            // An error of the COMMIT among them.
            Error::Database(cause) => What::Unknown(cause.to_string()),
            Error::Unanswered => What::Unknown("unanswered".to_owned()),
            Error::Indeterminate { .. } => What::Barred(INDETERMINATE.to_owned()),
            Error::UnknownFingerprint { .. } => What::Barred("unknown fingerprint".to_owned()),
            Error::UnknownMode { .. } => What::Barred("unknown mode".to_owned()),
            Error::SchemaMissing { .. } => What::Barred(SCHEMA_MISSING.to_owned()),
            // In lease mode an effect is there, and its result is not.
            Error::LeaseLost => What::Unknown("lease lost".to_owned()),
            Error::StepInDoubt { .. } => What::Unknown("a step in doubt".to_owned()),
            wrong => What::Wrong(format!("{wrong}")),
        },
    }
}
