//! The steps of an operation. A step in this database is performed exactly once. A step outside the database is
//! performed at least once or at most once.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;

use super::handle::{Lease, committed, time_to_end, within_a_lease};
use super::memory::{Recalled, StepState, decoded, encode_result, invalid};
use crate::background::{Panic, caught};
use crate::error::MAX_NAME_BYTES;
use crate::record::Opening;
use crate::session::{Session, bounded, in_pooled_transaction, or_closed};
use crate::{Error, InvalidStep, Misuse, Mode, observe, record};

tokio::task_local! {
    /// The current future runs inside steps of the operations with these tokens.
    static INSIDE_STEPS_OF: Vec<i64>;
}

/// A step outside the database, as its closure sees it.
#[derive(Debug)]
pub struct Step {
    downstream_key: String,
    took_no_effect: AtomicBool,
}

impl Step {
    fn new(downstream_key: String) -> Self {
        Self { downstream_key, took_no_effect: false.into() }
    }

    /// Returns a key for the next service: the same key in every attempt of this step, and another key for each other
    /// step. The key consists of 32 hexadecimal digits of a SHA-256 of the key, the fingerprint and the step's name.
    #[must_use]
    pub fn downstream_key(&self) -> &str {
        &self.downstream_key
    }

    /// Declares that the step had no effect, so that the step may be performed again. Without this declaration, a
    /// failed [`step_at_most_once`](Lease::step_at_most_once) is in doubt. Returns the error, so you can write
    /// `return Err(step.not_performed(error))`. **The declaration is final**, so call this method only if the step ends
    /// with this error.
    pub fn not_performed<E>(&self, error: E) -> E {
        self.took_no_effect.store(true, Ordering::Relaxed);
        error
    }
}

/// A step that is being performed. The drop of this value notes how the step has ended.
struct OpenStep<'l> {
    lease: &'l Lease,
    name: &'l str,
    /// The state of the step after the drop of this value.
    ended: StepState,
}

enum Opened<'l, T> {
    Replayed(T),
    Perform(OpenStep<'l>),
}

/// Why a step in this database has not stored its result.
enum Unfinished<E> {
    Failed(E),
    Panicked(Panic),
    /// The record already has a result of the step, or the claim is gone.
    NotStored,
}

impl<E: From<Error>> From<Error> for Unfinished<E> {
    fn from(error: Error) -> Self {
        Self::Failed(error.into())
    }
}

impl Lease {
    /// Performs a step in this database, exactly once: `perform` and the step's result commit together, in a
    /// transaction of the step. A later attempt gets the stored result. The transaction raises a `synchronous_commit`
    /// of `off` or `local` to `on`.
    ///
    /// The name is the identity of the step. The name must be unique in the operation, and stay the same in later
    /// releases, because a step with a new name is performed again. Code between steps runs in each attempt.
    ///
    /// Use READ COMMITTED, because the renewal and each step change the same record. At a higher isolation level, a
    /// step that takes longer than a third of the lease fails with SQLSTATE 40001. At such a level, one of two
    /// concurrent steps fails with the same error. The step holds a connection while the renewal needs another
    /// connection. So with a pool of one connection, a long step loses its lease.
    ///
    /// # Errors
    ///
    /// - An error of `perform` is returned unchanged, and the step's transaction is rolled back. Errors are not stored:
    ///   this attempt or the next may call the step again. Return a final failure as a value.
    /// - [`Misuse::Step`](crate::Misuse::Step): nothing was stored.
    /// - [`Undecodable`](Error::Undecodable): the stored result has another type. [`Unencodable`](Error::Unencodable).
    /// - [`LeaseLost`](Error::LeaseLost): the step was rolled back, or its COMMIT was already sent.
    /// - [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction): `perform` has ended the step's transaction.
    /// - Errors of the database. If the COMMIT was not answered, call the step again. The call returns the result if
    ///   the result was stored.
    ///
    /// # What ends the transaction early
    ///
    /// `perform` must not end the step's transaction by a COMMIT, a ROLLBACK, or a nested `conn.begin()` that fails or
    /// is dropped: see [`ensure_idempotent`](crate::ensure_idempotent()#what-ends-the-claim-early). Writes of `perform`
    /// may then be committed without the step's result. So **the step is in doubt**, whether `perform` returns a value
    /// or an error, or panics. No attempt performs the step again until an
    /// [operator](crate::operator::Shown::step) has settled it. A [`Reconciler`](super::Reconciler) leaves the step to
    /// a person, because its provider has never seen the step.
    ///
    /// The crate notices this after `perform`, and stores the doubt before the step returns. **The next attempt
    /// performs the step again** if the process dies, the future is dropped or the lease is lost between a COMMIT of
    /// `perform` and this moment, or if the database cannot store the doubt.
    ///
    /// # Cancellation
    ///
    /// The step is rolled back, or its result is stored. This attempt may call the step again. A future that is dropped
    /// after a COMMIT of `perform` itself [leaves committed writes](#what-ends-the-transaction-early). If `perform`
    /// drops the future of a raw `copy … from stdin` and goes on, the step waits without an end, and the lease lives
    /// on.
    pub async fn step<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let mut open = match self.open_step(name).await? {
            Opened::Replayed(value) => return Ok(value),
            Opened::Perform(open) => open,
        };
        let begun = self.unless_lost(Session::begun(&self.pool, Opening::DURABLE)).await;
        let mut session = begun.unwrap_or(Err(Error::LeaseLost))?;
        let unfinished = match self.unless_lost(caught(self.perform_and_finish(&mut session, name, perform))).await {
            None => return Err(Error::LeaseLost.into()),
            Some(Ok(Ok(value))) => {
                self.unless_lost(session.commit()).await.unwrap_or(Err(Error::LeaseLost))?;
                open.performed();
                return Ok(value);
            }
            Some(Ok(Err(unfinished))) => unfinished,
            Some(Err(panic)) => Unfinished::Panicked(panic),
        };
        let checking_and_ending = async {
            let is_gone = is_gone(&mut session).await;
            session.roll_back().await;
            drop(session);
            is_gone
        };
        // Not under the lease: after the loss of the lease, too, the step must not be performed again.
        if or_closed(self.options.claim_limit(&self.pool), checking_and_ending).await == Some(true) {
            self.leave_in_doubt(&mut open).await;
        }
        match unfinished {
            Unfinished::Failed(error) => Err(error),
            Unfinished::Panicked(panic) => resume_unwind(panic),
            Unfinished::NotStored if matches!(open.ended, StepState::InDoubt) => {
                Err(Error::Misuse(Misuse::NotInTransaction).into())
            }
            Unfinished::NotStored => match self.stored_result(&mut open).await? {
                Some(value) => Ok(value),
                None => Err(Error::LeaseLost.into()),
            },
        }
    }

    /// Runs `perform` and stores its result, in the transaction of the step.
    async fn perform_and_finish<T, E, F>(
        &self,
        session: &mut Session,
        name: &str,
        perform: F,
    ) -> Result<T, Unfinished<E>>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let value = self.inside_a_step(perform(&mut *session)).await.map_err(Unfinished::Failed)?;
        let result = self.encoded_result(name, &value)?;
        // This statement is the last statement of the step, because it locks the record, and a renewal would wait for
        // the lock.
        match self.record().finish_step(session, self.token, self.attempt, name, &result).await {
            Ok(true) => Ok(value),
            Ok(false) => Err(Unfinished::NotStored),
            Err(error) => {
                session.note(&error);
                Err(error.into())
            }
        }
    }

    /// Performs a step outside the database, and then stores its result, in the same way as
    /// [`complete`](super::LeaseOwner::complete) stores the result of the operation. After a crash in the middle of the
    /// step, a later attempt performs the step again, with the same [`Step::downstream_key`]. **The effect can happen
    /// twice**, unless the other service deduplicates by that key.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`step`](Self::step). If the result could not be stored, the effect has nevertheless
    /// happened.
    ///
    /// # Cancellation
    ///
    /// As after a crash, this attempt or a later attempt performs the step again, unless the result of the step was
    /// stored.
    pub async fn step_at_least_once<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Step) -> Result<T, E>,
    {
        let open = match self.open_step(name).await? {
            Opened::Replayed(value) => return Ok(value),
            Opened::Perform(open) => open,
        };
        let step = Step::new(self.key.downstream(self.fingerprint.as_bytes(), name));
        let performed = self.unless_lost(self.inside_a_step(perform(&step))).await;
        let value = performed.ok_or(Error::LeaseLost)??;
        Ok(self.finish_step(open, value).await?)
    }

    /// Performs a step outside the database at most once. Before the effect, the record stores durably that the step
    /// was begun. After a crash in the middle of the step, **it is unknown whether the step took effect**. Later calls
    /// of the operation return [`Indeterminate`](Error::Indeterminate) with the names of all steps in doubt, until a
    /// [`Reconciler`](super::Reconciler) or an [operator](crate::operator::Shown::step) has settled each of these
    /// steps.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`step_at_least_once`](Self::step_at_least_once). Also returns
    /// [`StepInDoubt`](Error::StepInDoubt) if this attempt has already begun the step. An error of `perform` also
    /// leaves the step in doubt, unless `perform` declares with [`Step::not_performed`] that the step had no effect.
    ///
    /// # Cancellation
    ///
    /// As after a crash, the step stays in doubt if it was begun and its result was not stored.
    pub async fn step_at_most_once<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Step) -> Result<T, E>,
    {
        let mut open = match self.open_step(name).await? {
            Opened::Replayed(value) => return Ok(value),
            Opened::Perform(open) => open,
        };
        // From now on, the step may be stored as begun, even if the statement below fails.
        open.ended = StepState::InDoubt;
        self.steps.note(name, StepState::Performing { begun: true });
        // Without this limit, the statement could wait on a vanished connection for ever, because the renewal has
        // connections of its own and would keep the lease.
        let beginning = bounded(self.options.claim_limit(&self.pool), self.begin_step(name));
        let begun = self.unless_lost(beginning).await.unwrap_or(Err(Error::LeaseLost));
        if !matches!(begun, Ok(true)) || self.is_lost() {
            return match begun {
                Ok(false) => match self.stored_result(&mut open).await? {
                    Some(value) => Ok(value),
                    None => Err(Error::LeaseLost.into()),
                },
                begun => {
                    // Nothing was performed, so the step is retracted. If the retraction fails, the step stays in
                    // doubt.
                    if bounded(time_to_end(self.options.policy.lease()), self.retract_step(name)).await.is_ok() {
                        open.ended = StepState::Ended;
                    }
                    Err(begun.err().unwrap_or(Error::LeaseLost).into())
                }
            };
        }
        let step = Step::new(self.key.downstream(self.fingerprint.as_bytes(), name));
        match self.unless_lost(self.inside_a_step(perform(&step))).await.ok_or(Error::LeaseLost)? {
            Ok(value) => Ok(self.finish_step(open, value).await?),
            Err(error) => {
                if step.took_no_effect.into_inner()
                    && within_a_lease(self.options.policy.lease(), || self.retract_step(name)).await.is_ok()
                {
                    open.ended = StepState::Ended;
                }
                Err(error)
            }
        }
    }

    /// Finds the stored result of a step, or notes that this call performs the step.
    async fn open_step<'l, T: DeserializeOwned>(&'l self, name: &'l str) -> Result<Opened<'l, T>, Error> {
        self.note_use();
        if self.mode() != Mode::InSteps {
            return Err(invalid(name, InvalidStep::Policy));
        }
        if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains('\0') {
            return Err(invalid(name, InvalidStep::Name));
        }
        if INSIDE_STEPS_OF.try_with(|tokens| tokens.contains(&self.token)).unwrap_or(false) {
            return Err(invalid(name, InvalidStep::Nested));
        }
        let before = match self.steps.recall(name)? {
            Recalled::Replayed(value) => {
                observe::step(self.key.operation(), observe::REPLAYED);
                return Ok(Opened::Replayed(value));
            }
            Recalled::Perform { before } => before,
        };
        let mut open = OpenStep { lease: self, name, ended: StepState::Ended };
        if let Some(before) = before {
            open.ended = before;
            if let Some(value) = self.stored_result(&mut open).await? {
                return Ok(Opened::Replayed(value));
            }
            open.ended = StepState::Ended;
        }
        Ok(Opened::Perform(open))
    }

    /// Reads the result of a step from the record. Returns `None` if the record does not contain the step. Returns an
    /// error if the step is in doubt, or if the claim is gone.
    async fn stored_result<T: DeserializeOwned>(&self, open: &mut OpenStep<'_>) -> Result<Option<T>, Error> {
        let token = self.token;
        let stored = in_pooled_transaction(&self.pool, Opening::PLAIN, async |conn| -> Result<_, Error> {
            self.record().steps(conn, token).await
        });
        let mut steps = bounded(self.options.claim_limit(&self.pool), stored).await?.ok_or(Error::LeaseLost)?;
        let found = steps.remove(open.name);
        self.steps.resize(open.name, found.iter().flatten().map(String::len).sum());
        match found {
            Some(Some(result)) => {
                let value = decoded(open.name, &result)?;
                open.ended = StepState::Returned;
                observe::step(self.key.operation(), observe::REPLAYED);
                Ok(Some(value))
            }
            Some(None) => {
                open.ended = StepState::InDoubt;
                Err(Error::StepInDoubt { step: open.name.to_owned() })
            }
            None => Ok(None),
        }
    }

    /// Returns the result as JSON text, and reserves the size of the result. Refuses the result if all results of the
    /// operation together would become too large.
    fn encoded_result<T: Serialize + DeserializeOwned>(&self, name: &str, value: &T) -> Result<String, Error> {
        let result = encode_result(name, value)?;
        self.steps.reserve(name, result.len())?;
        Ok(result)
    }

    /// Runs the closure of a step, so that a call of a step inside this closure is noticed.
    async fn inside_a_step<R>(&self, performing: impl Future<Output = R>) -> R {
        let mut tokens = INSIDE_STEPS_OF.try_with(Vec::clone).unwrap_or_default();
        tokens.push(self.token);
        INSIDE_STEPS_OF.scope(tokens, performing).await
    }

    /// Stores the result of a step outside the database, and returns the stored value. If an earlier call of this
    /// attempt has already stored a result, the function returns that result.
    async fn finish_step<T>(&self, mut open: OpenStep<'_>, value: T) -> Result<T, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        let (name, token) = (open.name, self.token);
        let result = self.encoded_result(name, &value)?;
        let (record, attempt, text) = (self.record(), self.attempt, result.as_str());
        let is_new = within_a_lease(self.options.policy.lease(), || {
            in_pooled_transaction(&self.pool, Opening::DURABLE, async move |conn| -> Result<_, Error> {
                record.finish_step(conn, token, attempt, name, text).await
            })
        });
        if is_new.await? {
            open.performed();
            return Ok(value);
        }
        self.stored_result(&mut open).await?.ok_or(Error::LeaseLost)
    }

    /// Stores that a step in this database is in doubt, because `perform` has ended the step's transaction. Writes of
    /// `perform` may be committed without the step's result, so no attempt may perform the step again.
    ///
    /// The caller gets the error of the step. So this function only logs its own error, after which the next attempt
    /// may perform the step again, as after a crash at this moment.
    async fn leave_in_doubt(&self, open: &mut OpenStep<'_>) {
        // If the statement fails or is dropped, the owner at least does not release the claim.
        open.ended = StepState::InDoubt;
        self.steps.note(open.name, StepState::Performing { begun: true });
        let (record, token, attempt, name) = (self.record(), self.token, self.attempt, open.name);
        let retention = self.options.retention;
        let noted = within_a_lease(self.options.policy.lease(), || {
            committed(&self.pool, Opening::DURABLE, async move |conn| {
                record.leave_step_in_doubt(conn, token, attempt, name, retention).await
            })
        });
        let (operation, error) = (self.key.operation(), noted.await.err());
        let error = error.as_ref().map(|error| error as &dyn std::error::Error);
        tracing::error!(
            operation,
            token,
            step = name,
            error,
            "{}",
            if error.is_none() {
                "a step has ended its own transaction, so its writes may be committed without its result; a person has \
                 to settle the step; do not commit, roll back or drop a pending begin inside a step"
            } else {
                "a step has ended its own transaction, so its writes may be committed without its result, and this \
                 could not be stored; the next attempt may perform the step again"
            }
        );
    }

    async fn begin_step(&self, name: &str) -> Result<bool, Error> {
        in_pooled_transaction(&self.pool, Opening::DURABLE, async |conn| -> Result<_, Error> {
            self.record().begin_step(conn, self.token, self.attempt, name, self.options.retention).await
        })
        .await
    }

    async fn retract_step(&self, name: &str) -> Result<(), Error> {
        committed(&self.pool, Opening::PLAIN, async |conn| self.record().retract_step(conn, self.token, name).await)
            .await
    }
}

/// How often a step whose `perform` has failed is open whether its transaction is gone. One statement whose future
/// `perform` has dropped, and one ROLLBACK that sqlx has queued, may have failed. The next statement then gets their
/// error.
const QUESTIONS: usize = 3;

/// Whether `perform` has ended the transaction of the step. COMMIT and ROLLBACK count alike, because writes in
/// autocommit after a ROLLBACK are committed. In an aborted transaction the question fails. Such a transaction is not
/// gone, and neither is the transaction of a lost connection, which the server rolls back.
async fn is_gone(conn: &mut PgConnection) -> bool {
    for _ in 0..QUESTIONS {
        match record::is_open(conn).await {
            Ok(is_open) => return !is_open,
            Err(Error::Misuse(Misuse::TransactionAborted(_))) => return false,
            Err(_) => {}
        }
    }
    false
}

impl OpenStep<'_> {
    fn performed(&mut self) {
        self.ended = StepState::Returned;
        observe::step(self.lease.key.operation(), observe::PERFORMED);
    }
}

impl Drop for OpenStep<'_> {
    fn drop(&mut self) {
        let ended = std::mem::replace(&mut self.ended, StepState::Ended);
        // The metric counts a step in doubt here, because a dropped future also leaves the step in doubt.
        if matches!(ended, StepState::InDoubt) {
            observe::step(self.lease.key.operation(), observe::IN_DOUBT);
        }
        self.lease.steps.note(self.name, ended);
    }
}
