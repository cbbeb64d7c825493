//! The steps of one attempt: what earlier attempts stored, and what this attempt has asked for.
//!
//! The memory of the attempt answers without a statement where it can. Where a step was asked for before and its end is
//! unknown, because its future was dropped or a COMMIT was not answered, the record decides.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool};
use tokio::time::timeout;

use super::leasing::Leasing;
use super::owner::Owner;
use super::protocol::unless_lost;
use super::retry::{committed, within_a_lease};
use super::step::{Step, decoded, encode_result, too_large};
use crate::error::{MAX_NAME_BYTES, MAX_STEPS, MAX_STEPS_BYTES};
use crate::record::{self, Record, StoredStep};
use crate::session::{Opening, in_pooled_transaction};
use crate::{Error, InvalidStep, Mode, observe};

tokio::task_local! {
    /// The tokens of the operations that are performing a step, around this future.
    static PERFORMING: Vec<i64>;
}

/// The steps of one attempt. Clones are of the same attempt.
#[derive(Clone, Debug)]
pub(crate) struct Steps {
    leasing: Leasing,
    pool: PgPool,
    owner: Owner,
    asked: Arc<Mutex<BTreeMap<String, Entry>>>,
}

/// One step in the memory of the attempt.
#[derive(Debug)]
struct Entry {
    known: Known,
    /// The size of the result that the record has, or may have. It is set before the result is stored, so steps side by
    /// side keep the limit of all results. It stays if nobody knows whether the result was stored.
    bytes: usize,
}

/// What this attempt knows of a step.
#[derive(Debug)]
enum Known {
    /// An earlier attempt has stored this result, and this attempt has not asked for it.
    Stored(String),
    /// It is being performed. At most once, it is `begun` from the moment at which the record may say so.
    Performing { begun: bool },
    /// Its result has been returned.
    Returned,
    /// It failed, or its future was dropped. The record may have a result.
    Ended,
    /// It may have taken effect, and must not be performed again.
    InDoubt,
}

/// A step that is to be performed. If it is dropped, the step has ended in an unknown way.
struct Asked<'s> {
    steps: &'s Steps,
    name: &'s str,
    /// What the attempt knows once this is dropped.
    ended: Known,
}

/// The answer to asking for a step.
enum Asking<'s, T> {
    Replayed(T),
    Perform(Asked<'s>),
}

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

impl Steps {
    pub(super) fn new(leasing: Leasing, pool: &PgPool, owner: Owner, stored: record::Steps) -> Self {
        let entries = stored.0.into_iter().map(|(name, step)| match step {
            StoredStep::Result(result) => (name, Entry { bytes: result.len(), known: Known::Stored(result) }),
            StoredStep::Begun => (name, Entry { bytes: 0, known: Known::InDoubt }),
        });
        Self { leasing, pool: pool.clone(), owner, asked: Arc::new(Mutex::new(entries.collect())) }
    }

    /// The names of the steps that may have taken effect and have no result.
    pub(super) fn in_doubt(&self) -> Vec<String> {
        self.names(|known| matches!(known, Known::InDoubt | Known::Performing { begun: true }))
    }

    /// The names of stored steps that this attempt has not asked for.
    pub(super) fn not_asked_for(&self) -> Vec<String> {
        self.names(|known| matches!(known, Known::Stored(_)))
    }

    fn names(&self, which: impl Fn(&Known) -> bool) -> Vec<String> {
        self.entries().iter().filter(|(_, step)| which(&step.known)).map(|(name, _)| name.clone()).collect()
    }

    pub(crate) async fn in_database<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let mut asked = match self.ask(name).await? {
            Asking::Replayed(value) => return Ok(value),
            Asking::Perform(asked) => asked,
        };
        let finished = in_pooled_transaction(&self.pool, self.durable(), async |conn| -> Result<_, Unfinished<E>> {
            let value = self.inside(perform(&mut *conn)).await.map_err(Unfinished::Failed)?;
            let result = self.encoded(name, &value)?;
            // Last, because it locks the record, and a heartbeat would wait for it.
            if self.record().finish_step(conn, self.owner.token, self.attempt(), name, &result).await? {
                Ok(value)
            } else if record::is_open(conn).await? {
                Err(Unfinished::NotStored)
            } else {
                Err(Error::NotInTransaction.into())
            }
        });
        match unless_lost(&self.owner, finished).await.unwrap_or(Err(Error::LeaseLost.into())) {
            Ok(value) => {
                asked.performed();
                Ok(value)
            }
            Err(Unfinished::NotStored) => match self.stored(&mut asked).await? {
                Some(value) => Ok(value),
                None => Err(Error::LeaseLost.into()),
            },
            Err(Unfinished::Failed(error)) => Err(error),
        }
    }

    pub(crate) async fn at_least_once<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Step) -> Result<T, E>,
    {
        let asked = match self.ask(name).await? {
            Asking::Replayed(value) => return Ok(value),
            Asking::Perform(asked) => asked,
        };
        let step = self.step(name);
        let performed = unless_lost(&self.owner, self.inside(perform(&step))).await;
        let value = performed.ok_or(Error::LeaseLost)??;
        Ok(self.finish(asked, value).await?)
    }

    pub(crate) async fn at_most_once<T, E, F>(&self, name: &str, perform: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Step) -> Result<T, E>,
    {
        let mut asked = match self.ask(name).await? {
            Asking::Replayed(value) => return Ok(value),
            Asking::Perform(asked) => asked,
        };
        // From here on the record may say that the step was begun.
        asked.ended = Known::InDoubt;
        note(&mut self.entries(), name, Known::Performing { begun: true });
        let begun = unless_lost(&self.owner, self.begin(name)).await.unwrap_or(Err(Error::LeaseLost));
        if !matches!(begun, Ok(true)) || self.owner.is_lost() {
            return match begun {
                Ok(false) => match self.stored(&mut asked).await? {
                    Some(value) => Ok(value),
                    None => Err(Error::LeaseLost.into()),
                },
                begun => {
                    // Nothing was performed, so nobody has to find out. If this fails, the step stays in doubt.
                    if let Ok(Ok(())) = timeout(self.leasing.policy.lease(), self.retract(name)).await {
                        asked.ended = Known::Ended;
                    }
                    Err(begun.err().unwrap_or(Error::LeaseLost).into())
                }
            };
        }
        let step = self.step(name);
        match unless_lost(&self.owner, self.inside(perform(&step))).await.ok_or(Error::LeaseLost)? {
            Ok(value) => Ok(self.finish(asked, value).await?),
            Err(error) => {
                if step.took_no_effect.into_inner()
                    && within_a_lease(self.leasing.policy.lease(), || self.retract(name)).await.is_ok()
                {
                    asked.ended = Known::Ended;
                }
                Err(error)
            }
        }
    }

    /// Asks for a step: returns its stored result, or says to perform it.
    async fn ask<'s, T: DeserializeOwned>(&'s self, name: &'s str) -> Result<Asking<'s, T>, Error> {
        let refused = |problem| Err(Error::InvalidStep { step: name.to_owned(), problem });
        if self.leasing.policy.mode() != Mode::InSteps {
            return refused(InvalidStep::Policy);
        }
        if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains('\0') {
            return refused(InvalidStep::Name);
        }
        if PERFORMING.try_with(|tokens| tokens.contains(&self.owner.token)).unwrap_or(false) {
            return refused(InvalidStep::Nested);
        }
        let before = {
            let mut entries = self.entries();
            let before = match entries.get_mut(name) {
                Some(Entry { known: Known::Performing { .. } | Known::Returned, .. }) => {
                    return refused(InvalidStep::Repeated);
                }
                Some(step) => match &step.known {
                    Known::Stored(result) => {
                        let value = decoded(name, result)?;
                        step.known = Known::Returned;
                        observe::step(self.owner.key.operation(), observe::REPLAYED);
                        return Ok(Asking::Replayed(value));
                    }
                    Known::InDoubt => Some(Known::InDoubt),
                    _ => Some(Known::Ended),
                },
                None => None,
            };
            // A step that has ended, and may have a stored result, is one of them.
            let counts =
                |other: &str, step: &Entry| other != name && (step.bytes > 0 || !matches!(step.known, Known::Ended));
            if entries.iter().filter(|(other, step)| counts(other, step)).count() >= MAX_STEPS {
                return refused(InvalidStep::TooLarge);
            }
            note(&mut entries, name, Known::Performing { begun: false });
            before
        };
        let Some(before) = before else {
            return Ok(Asking::Perform(Asked { steps: self, name, ended: Known::Ended }));
        };
        let mut asked = Asked { steps: self, name, ended: before };
        if let Some(value) = self.stored(&mut asked).await? {
            return Ok(Asking::Replayed(value));
        }
        asked.ended = Known::Ended;
        Ok(Asking::Perform(asked))
    }

    /// Reads the result of a step from the record. `None` means that the record has none under this claim.
    async fn stored<T: DeserializeOwned>(&self, asked: &mut Asked<'_>) -> Result<Option<T>, Error> {
        let token = self.owner.token;
        let stored = in_pooled_transaction(&self.pool, Opening::Plain, async |conn| -> Result<_, Error> {
            self.record().steps(conn, token).await
        });
        let mut steps = stored.await?.ok_or(Error::LeaseLost)?;
        let found = steps.0.remove(asked.name);
        self.entries().entry(asked.name.to_owned()).and_modify(|step| {
            step.bytes = if let Some(StoredStep::Result(result)) = &found { result.len() } else { 0 };
        });
        match found {
            Some(StoredStep::Result(result)) => {
                let value = decoded(asked.name, &result)?;
                asked.ended = Known::Returned;
                observe::step(self.owner.key.operation(), observe::REPLAYED);
                Ok(Some(value))
            }
            Some(StoredStep::Begun) => {
                asked.ended = Known::InDoubt;
                Err(Error::StepInDoubt { step: asked.name.to_owned() })
            }
            None => Ok(None),
        }
    }

    /// Runs the closure of a step, so that a step inside it is noticed.
    async fn inside<R>(&self, performing: impl Future<Output = R>) -> R {
        let mut tokens = PERFORMING.try_with(Vec::clone).unwrap_or_default();
        tokens.push(self.owner.token);
        PERFORMING.scope(tokens, performing).await
    }

    /// Stores the result of a step outside the database, and returns the value that is stored: if an earlier call of
    /// this attempt has stored one, that value.
    async fn finish<T>(&self, mut asked: Asked<'_>, value: T) -> Result<T, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        let (name, token) = (asked.name, self.owner.token);
        let result = self.encoded(name, &value)?;
        let (record, attempt, text) = (self.record(), self.attempt(), result.as_str());
        let is_new = within_a_lease(self.leasing.policy.lease(), || {
            in_pooled_transaction(&self.pool, self.durable(), async move |conn| -> Result<_, Error> {
                record.finish_step(conn, token, attempt, name, text).await
            })
        });
        if is_new.await? {
            asked.performed();
            return Ok(value);
        }
        self.stored(&mut asked).await?.ok_or(Error::LeaseLost)
    }

    async fn begin(&self, name: &str) -> Result<bool, Error> {
        in_pooled_transaction(&self.pool, self.durable(), async |conn| -> Result<_, Error> {
            self.record().begin_step(conn, self.owner.token, self.attempt(), name).await
        })
        .await
    }

    async fn retract(&self, name: &str) -> Result<(), Error> {
        committed(&self.pool, Opening::Plain, async |conn| {
            self.record().retract_step(conn, self.owner.token, name).await
        })
        .await
    }

    /// The result as JSON text. Reserves its size, or refuses it if the operation would become too large.
    fn encoded<T: Serialize + DeserializeOwned>(&self, name: &str, value: &T) -> Result<String, Error> {
        let result = encode_result(name, value)?;
        let mut entries = self.entries();
        let others: usize = entries.iter().filter(|(other, _)| *other != name).map(|(_, step)| step.bytes).sum();
        if others + result.len() > MAX_STEPS_BYTES {
            return Err(too_large(name));
        }
        entries.entry(name.to_owned()).and_modify(|step| step.bytes = result.len());
        Ok(result)
    }

    fn step(&self, name: &str) -> Step {
        Step { name: name.to_owned(), downstream_key: self.owner.downstream_key_of(name), took_no_effect: false.into() }
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn durable(&self) -> Opening {
        Opening::durable(self.leasing.deployment)
    }

    fn attempt(&self) -> i32 {
        i32::try_from(self.owner.attempt).unwrap_or(i32::MAX)
    }

    fn record(&self) -> Record<'_> {
        Record { key: &self.owner.key, deployment: self.leasing.deployment }
    }
}

/// Replaces what the attempt knows of a step. Its size stays.
fn note(entries: &mut BTreeMap<String, Entry>, name: &str, known: Known) {
    let bytes = entries.get(name).map_or(0, |step| step.bytes);
    entries.insert(name.to_owned(), Entry { known, bytes });
}

impl Asked<'_> {
    fn performed(&mut self) {
        self.ended = Known::Returned;
        observe::step(self.steps.owner.key.operation(), observe::PERFORMED);
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let ended = std::mem::replace(&mut self.ended, Known::Ended);
        // Here, because a future that is dropped leaves a step in doubt, too.
        if matches!(ended, Known::InDoubt) {
            observe::step(self.steps.owner.key.operation(), observe::IN_DOUBT);
        }
        note(&mut self.steps.entries(), self.name, ended);
    }
}
