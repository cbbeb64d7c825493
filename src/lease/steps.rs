//! The steps of an operation: in this database exactly once, outside at least once or at most once.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;
use tokio::time::timeout;

use super::handle::Lease;
use super::memory::{Asking, Known, OpenStep, PERFORMING, note};
use super::protocol::unless_lost;
use super::retry::{committed, within_a_lease};
use super::step::Step;
use crate::Error;
use crate::record;
use crate::session::{Opening, in_pooled_transaction};

/// Why a step in the database did not commit.
enum Unfinished<E> {
    Failed(E),
    /// Its result is stored already, or the claim is gone.
    NotStored,
}

impl<E: From<Error>> From<Error> for Unfinished<E> {
    fn from(error: Error) -> Self {
        Self::Failed(error.into())
    }
}

impl Lease {
    /// Performs a step in this database, exactly once: `perform` and the step's result commit together. A later attempt
    /// gets the stored result, and does not perform the step again. The transaction is the step's own, with
    /// `synchronous_commit = on`.
    ///
    /// The name is the identity of the step. It must be unique in the operation, and remain the same in later releases:
    /// a step with a new name is performed again. Code between steps runs in each attempt.
    ///
    /// Above READ COMMITTED, a step that is longer than a third of the lease always ends in SQLSTATE 40001, and so do
    /// two steps side by side, because the renewal and each step change the same record. The step holds a connection while
    /// the renewal needs another: a pool of one connection makes a long step lose its lease.
    ///
    /// # Errors
    ///
    /// - An error of `perform` comes back unchanged, and the step's transaction is rolled back. Errors are not stored:
    ///   this attempt or the next may ask for the step again. If a failure is final, return it as a value.
    /// - [`InvalidStep`](Error::InvalidStep): nothing was stored.
    /// - [`Undecodable`](Error::Undecodable): the stored result has another type. [`Unencodable`](Error::Unencodable).
    /// - [`LeaseLost`](Error::LeaseLost): the step was rolled back, or its COMMIT was on the way.
    /// - [`NotInTransaction`](Error::NotInTransaction): `perform` has ended the step's transaction, and nothing was
    ///   stored. What `perform` has written outside the transaction stays.
    /// - Errors of the database. If the COMMIT was not answered, ask for the step again: it returns the result if it
    ///   was stored.
    ///
    /// # Cancellation
    ///
    /// The step is rolled back, or stored. This attempt may ask for it again.
    pub async fn step<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let mut asked = match self.ask_for_step(name).await? {
            Asking::Replayed(value) => return Ok(value),
            Asking::Perform(asked) => asked,
        };
        let finished = in_pooled_transaction(&self.pool, self.durable(), async |conn| -> Result<_, Unfinished<E>> {
            let value = self.inside_a_step(perform(&mut *conn)).await.map_err(Unfinished::Failed)?;
            let result = self.encoded_result(name, &value)?;
            // Last, because it locks the record, and a heartbeat would wait for it.
            if self.record().finish_step(conn, self.token, self.attempt, name, &result).await? {
                Ok(value)
            } else if record::is_open(conn).await? {
                Err(Unfinished::NotStored)
            } else {
                Err(Error::NotInTransaction.into())
            }
        });
        match unless_lost(self, finished).await.unwrap_or(Err(Error::LeaseLost.into())) {
            Ok(value) => {
                asked.performed();
                Ok(value)
            }
            Err(Unfinished::NotStored) => match self.stored_result(&mut asked).await? {
                Some(value) => Ok(value),
                None => Err(Error::LeaseLost.into()),
            },
            Err(Unfinished::Failed(error)) => Err(error),
        }
    }

    /// Performs a step outside the database, and stores its result. After a crash in its middle a later attempt
    /// performs it again, with the same [`Step::downstream_key`]: **the effect can happen twice**, unless the other
    /// service deduplicates by that key.
    ///
    /// The result is stored by tries for the length of one lease, as in [`complete`](super::LeaseOwner::complete).
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step). If the result could not be stored, the effect has happened.
    ///
    /// # Cancellation
    ///
    /// As after a crash: this attempt or a later one performs the step again, unless its result was stored.
    pub async fn step_at_least_once<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Step) -> Result<T, E>,
    {
        let asked = match self.ask_for_step(name).await? {
            Asking::Replayed(value) => return Ok(value),
            Asking::Perform(asked) => asked,
        };
        let step = Step::of(self, name);
        let performed = unless_lost(self, self.inside_a_step(perform(&step))).await;
        let value = performed.ok_or(Error::LeaseLost)??;
        Ok(self.finish_step(asked, value).await?)
    }

    /// Performs a step outside the database at most once. Before the effect, the record stores durably that the step
    /// was begun. After a crash in its middle, **nobody knows whether it took effect**: later calls return
    /// [`Indeterminate`](Error::Indeterminate) with the names of all steps in doubt, until a
    /// [`Reconciler`](super::Reconciler) settles each, or an operator calls
    /// [`resolve_step`](crate::operator::resolve_step) or [`release_step`](crate::operator::release_step).
    ///
    /// # Errors
    ///
    /// As [`step_at_least_once`](Self::step_at_least_once), and [`StepInDoubt`](Error::StepInDoubt) if this attempt has
    /// begun it before. An error of `perform` leaves the step in doubt too, unless `perform` declares with
    /// [`Step::not_performed`] that it took no effect.
    ///
    /// # Cancellation
    ///
    /// As after a crash: the step stays in doubt, unless it was not begun, or its result was stored.
    pub async fn step_at_most_once<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Step) -> Result<T, E>,
    {
        let mut asked = match self.ask_for_step(name).await? {
            Asking::Replayed(value) => return Ok(value),
            Asking::Perform(asked) => asked,
        };
        // From here on the record may say that the step was begun.
        asked.ended = Known::InDoubt;
        note(&mut self.entries(), name, Known::Performing { begun: true });
        let begun = unless_lost(self, self.begin_step(name)).await.unwrap_or(Err(Error::LeaseLost));
        if !matches!(begun, Ok(true)) || self.is_lost() {
            return match begun {
                Ok(false) => match self.stored_result(&mut asked).await? {
                    Some(value) => Ok(value),
                    None => Err(Error::LeaseLost.into()),
                },
                begun => {
                    // Nothing was performed, so nobody has to find out. If this fails, the step stays in doubt.
                    if let Ok(Ok(())) = timeout(self.leasing.policy.lease(), self.retract_step(name)).await {
                        asked.ended = Known::Ended;
                    }
                    Err(begun.err().unwrap_or(Error::LeaseLost).into())
                }
            };
        }
        let step = Step::of(self, name);
        match unless_lost(self, self.inside_a_step(perform(&step))).await.ok_or(Error::LeaseLost)? {
            Ok(value) => Ok(self.finish_step(asked, value).await?),
            Err(error) => {
                if step.took_no_effect.into_inner()
                    && within_a_lease(self.leasing.policy.lease(), || self.retract_step(name)).await.is_ok()
                {
                    asked.ended = Known::Ended;
                }
                Err(error)
            }
        }
    }

    /// Runs the closure of a step, so that a step inside it is noticed.
    async fn inside_a_step<R>(&self, performing: impl Future<Output = R>) -> R {
        let mut tokens = PERFORMING.try_with(Vec::clone).unwrap_or_default();
        tokens.push(self.token);
        PERFORMING.scope(tokens, performing).await
    }

    /// Stores the result of a step outside the database, and returns the value that is stored: if an earlier call of
    /// this attempt has stored one, that value.
    async fn finish_step<T>(&self, mut asked: OpenStep<'_>, value: T) -> Result<T, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        let (name, token) = (asked.name, self.token);
        let result = self.encoded_result(name, &value)?;
        let (record, attempt, text) = (self.record(), self.attempt, result.as_str());
        let is_new = within_a_lease(self.leasing.policy.lease(), || {
            in_pooled_transaction(&self.pool, self.durable(), async move |conn| -> Result<_, Error> {
                record.finish_step(conn, token, attempt, name, text).await
            })
        });
        if is_new.await? {
            asked.performed();
            return Ok(value);
        }
        self.stored_result(&mut asked).await?.ok_or(Error::LeaseLost)
    }

    async fn begin_step(&self, name: &str) -> Result<bool, Error> {
        in_pooled_transaction(&self.pool, self.durable(), async |conn| -> Result<_, Error> {
            self.record().begin_step(conn, self.token, self.attempt, name).await
        })
        .await
    }

    async fn retract_step(&self, name: &str) -> Result<(), Error> {
        committed(&self.pool, Opening::Plain, async |conn| self.record().retract_step(conn, self.token, name).await)
            .await
    }

    fn durable(&self) -> Opening {
        Opening::durable(self.leasing.deployment)
    }
}
