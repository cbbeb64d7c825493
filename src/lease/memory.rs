//! What one attempt knows of its steps: the results that earlier attempts stored, and what this attempt has asked for.
//!
//! The memory of the attempt answers without a statement where it can. Where a step was asked for before and its end is
//! unknown, because its future was dropped or a COMMIT was not answered, the record decides.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::handle::Lease;
use super::step::{decoded, encode_result, too_large};
use crate::error::{MAX_NAME_BYTES, MAX_STEPS, MAX_STEPS_BYTES};
use crate::record::StoredSteps;
use crate::session::{Opening, answered, in_pooled_transaction};
use crate::{Error, InvalidStep, Mode, observe};

tokio::task_local! {
    /// The tokens of the operations that are performing a step, around this future.
    pub(super) static PERFORMING: Vec<i64>;
}

/// One step in the memory of the attempt.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) known: Known,
    /// The size of the result that the record has, or may have. It is set before the result is stored, so steps side by
    /// side keep the limit of all results. It stays if nobody knows whether the result was stored.
    pub(super) bytes: usize,
}

/// What this attempt knows of a step.
#[derive(Debug)]
pub(super) enum Known {
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
pub(super) struct OpenStep<'l> {
    lease: &'l Lease,
    pub(super) name: &'l str,
    /// What the attempt knows once this is dropped.
    pub(super) ended: Known,
}

/// The answer to asking for a step.
pub(super) enum Asking<'l, T> {
    Replayed(T),
    Perform(OpenStep<'l>),
}

/// The memory of an attempt that has asked for no step.
pub(super) fn remembered(stored: StoredSteps) -> BTreeMap<String, Entry> {
    let entries = stored.into_iter().map(|(name, result)| match result {
        Some(result) => (name, Entry { bytes: result.len(), known: Known::Stored(result) }),
        None => (name, Entry { bytes: 0, known: Known::InDoubt }),
    });
    entries.collect()
}

impl Lease {
    /// The names of the steps that may have taken effect and have no result.
    pub(super) fn steps_in_doubt(&self) -> Vec<String> {
        self.steps_that(|known| matches!(known, Known::InDoubt | Known::Performing { begun: true }))
    }

    /// The names of stored steps that this attempt has not asked for.
    pub(super) fn steps_not_asked_for(&self) -> Vec<String> {
        self.steps_that(|known| matches!(known, Known::Stored(_)))
    }

    fn steps_that(&self, which: impl Fn(&Known) -> bool) -> Vec<String> {
        self.entries().iter().filter(|(_, step)| which(&step.known)).map(|(name, _)| name.clone()).collect()
    }

    /// Asks for a step: returns its stored result, or says to perform it.
    pub(super) async fn ask_for_step<'l, T: DeserializeOwned>(&'l self, name: &'l str) -> Result<Asking<'l, T>, Error> {
        let refused = |problem| Err(Error::InvalidStep { step: name.to_owned(), problem });
        if self.leasing.policy.mode() != Mode::InSteps {
            return refused(InvalidStep::Policy);
        }
        if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains('\0') {
            return refused(InvalidStep::Name);
        }
        if PERFORMING.try_with(|tokens| tokens.contains(&self.token)).unwrap_or(false) {
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
                        observe::step(self.key.operation(), observe::REPLAYED);
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
            return Ok(Asking::Perform(OpenStep { lease: self, name, ended: Known::Ended }));
        };
        let mut asked = OpenStep { lease: self, name, ended: before };
        if let Some(value) = self.stored_result(&mut asked).await? {
            return Ok(Asking::Replayed(value));
        }
        asked.ended = Known::Ended;
        Ok(Asking::Perform(asked))
    }

    /// Reads the result of a step from the record. `None` means that the record has none under this claim.
    pub(super) async fn stored_result<T: DeserializeOwned>(
        &self,
        asked: &mut OpenStep<'_>,
    ) -> Result<Option<T>, Error> {
        let token = self.token;
        let stored = in_pooled_transaction(&self.pool, Opening::Plain, async |conn| -> Result<_, Error> {
            self.record().steps(conn, token).await
        });
        let mut steps = answered(self.leasing.claim_limit(&self.pool), stored).await?.ok_or(Error::LeaseLost)?;
        let found = steps.remove(asked.name);
        let bytes = found.iter().flatten().map(String::len).sum();
        self.entries().entry(asked.name.to_owned()).and_modify(|step| step.bytes = bytes);
        match found {
            Some(Some(result)) => {
                let value = decoded(asked.name, &result)?;
                asked.ended = Known::Returned;
                observe::step(self.key.operation(), observe::REPLAYED);
                Ok(Some(value))
            }
            Some(None) => {
                asked.ended = Known::InDoubt;
                Err(Error::StepInDoubt { step: asked.name.to_owned() })
            }
            None => Ok(None),
        }
    }

    /// The result as JSON text. Reserves its size, or refuses it if the operation would become too large.
    pub(super) fn encoded_result<T: Serialize + DeserializeOwned>(
        &self,
        name: &str,
        value: &T,
    ) -> Result<String, Error> {
        let result = encode_result(name, value)?;
        let mut entries = self.entries();
        let others: usize = entries.iter().filter(|(other, _)| *other != name).map(|(_, step)| step.bytes).sum();
        if others + result.len() > MAX_STEPS_BYTES {
            return Err(too_large(name));
        }
        entries.entry(name.to_owned()).and_modify(|step| step.bytes = result.len());
        Ok(result)
    }

    pub(super) fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Replaces what the attempt knows of a step. Its size stays.
pub(super) fn note(entries: &mut BTreeMap<String, Entry>, name: &str, known: Known) {
    let bytes = entries.get(name).map_or(0, |step| step.bytes);
    entries.insert(name.to_owned(), Entry { known, bytes });
}

impl OpenStep<'_> {
    pub(super) fn performed(&mut self) {
        self.ended = Known::Returned;
        observe::step(self.lease.key.operation(), observe::PERFORMED);
    }
}

impl Drop for OpenStep<'_> {
    fn drop(&mut self) {
        let ended = std::mem::replace(&mut self.ended, Known::Ended);
        // Here, because a future that is dropped leaves a step in doubt, too.
        if matches!(ended, Known::InDoubt) {
            observe::step(self.lease.key.operation(), observe::IN_DOUBT);
        }
        note(&mut self.lease.entries(), self.name, ended);
    }
}
