//! The owner of a lease: its renewal, and the ways to end it.

use std::fmt::Display;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgPool;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::handle::{Deadline, Lease, committed, within_a_lease};
use super::options::LeaseOptions;
use super::step::Memory;
use super::unbegun::Unbegun;
use crate::background::caught;
use crate::observe::{Failure, call_span, counted};
use crate::outcome::{Response, encode};
use crate::record::{Claim, StoredSteps};
use crate::session::{ANSWER_TIME, Opening, bounded, in_pooled_transaction};
use crate::{Error, Fingerprint, Key, observe};

/// The right and the duty to do the work of one key. The lease is renewed until it is completed, released, lost or
/// dropped. The owner dereferences to the [`Lease`].
///
/// End it with [`complete`](Self::complete) or [`release`](Self::release). **If it is dropped, the claim lapses**, and
/// a warning is logged. The [`Policy`](super::Policy) then decides what the next caller does. Nothing is undone,
/// because it is unknown whether the work took effect.
#[derive(Debug)]
#[must_use = "a lease that is dropped is neither completed nor released"]
pub struct LeaseOwner {
    lease: Lease,
    renewal: AbortHandle,
    ended: bool,
    unbegun: Unbegun,
}

pub(super) struct Won {
    pub(super) claim: Claim,
    /// The steps of earlier attempts.
    pub(super) steps: StoredSteps,
    /// Made before the COMMIT of the claim is sent.
    pub(super) unbegun: Unbegun,
}

impl Deref for LeaseOwner {
    type Target = Lease;

    fn deref(&self) -> &Lease {
        &self.lease
    }
}

impl LeaseOwner {
    pub(super) fn new(
        leasing: LeaseOptions,
        pool: &PgPool,
        key: &Key,
        fingerprint: Fingerprint,
        won: Won,
        claimed_at: Instant,
    ) -> Self {
        let Won { claim, steps, unbegun } = won;
        let lease = Lease {
            leasing,
            pool: pool.clone(),
            key: key.clone(),
            fingerprint,
            token: claim.token,
            attempt: claim.attempt,
            deadline: Arc::new(Deadline::of(claimed_at, leasing.policy.lease())),
            not_performed: Arc::default(),
            steps: Arc::new(Memory::of(steps)),
        };
        let renewal = tokio::spawn(renew(lease.clone(), claimed_at)).abort_handle();
        Self { lease, renewal, ended: false, unbegun }
    }

    /// The work begins at this moment. If an owner is dropped before, its claim is released and does not count as an
    /// attempt.
    pub(crate) fn begin(&mut self) {
        self.unbegun.begin();
    }

    /// Does the work, and stores its result or releases the claim.
    pub(super) async fn work<T, E>(mut self, work: impl AsyncFnOnce(&Lease) -> Result<T, E>) -> Result<T, Failure<E>>
    where
        T: Serialize + DeserializeOwned,
        E: Display,
    {
        let lease = self.lease.clone();
        // The lease may be lost before the work is polled.
        let working = async {
            self.begin();
            work(&lease).await
        };
        let working = lease.unless_lost(caught(working));
        match observe::performing(lease.mode(), lease.key.operation(), working).await {
            None => Err(self.failed(Error::LeaseLost).into()),
            Some(Ok(Ok(response))) => {
                let encoded = encode(&response).map_err(|error| self.failed(error))?;
                self.complete_encoded(&encoded).await?;
                Ok(response)
            }
            Some(Ok(Err(error))) => {
                // The alternate form (`#`), because with it anyhow prints the causes too.
                self.fail(&format!("{error:#}")).await;
                Err(Failure::Perform(error))
            }
            Some(Err(panic)) => {
                self.fail("the work panicked").await;
                Err(Failure::Panicked(panic))
            }
        }
    }

    /// Stores the result. Every retry gets it, for the retention, counted from now. After an error of the database,
    /// tries again for the length of one lease.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`] if another owner has the claim, or has had it; [`Error::Unencodable`]; errors of the
    /// database. After an error the claim lapses.
    ///
    /// # Cancellation
    ///
    /// The result is stored, or the claim lapses.
    pub fn complete<T>(self, response: &T) -> impl Future<Output = Result<(), Error>> + Send + use<T>
    where
        T: Serialize + DeserializeOwned,
    {
        // Before the first await, because a reference across it would demand `T: Sync`.
        let encoded = encode(response);
        async move { self.complete_encoded(&encoded?).await }
    }

    pub(crate) async fn complete_encoded(self, encoded: &Response) -> Result<(), Error> {
        let (mode, key) = (self.mode(), self.key.clone());
        let span = call_span!("lease.complete", mode, key);
        let outcome = |stored: &Result<_, Error>| stored.as_ref().map_or_else(Error::outcome, |()| observe::PERFORMED);
        counted(span, mode, key.operation(), self.store(encoded), outcome).await
    }

    async fn store(mut self, encoded: &Response) -> Result<(), Error> {
        let LeaseOptions { policy, retention, .. } = self.leasing;
        let (record, token) = (self.record(), self.token);
        let stored = within_a_lease(policy.lease(), || {
            committed(&self.pool, self.durable(), async move |conn| {
                record.complete_lease(conn, token, encoded, retention).await
            })
        })
        .await;
        self.ended = matches!(stored, Ok(()) | Err(Error::LeaseLost));
        stored?;
        let not_asked_for = self.steps.not_asked_for();
        if !not_asked_for.is_empty() {
            tracing::warn!(
                operation = self.key.operation(),
                steps = ?not_asked_for,
                "an operation completed without calling steps that an earlier attempt had stored; was a step renamed?"
            );
        }
        let in_doubt = self.steps.in_doubt();
        if !in_doubt.is_empty() {
            tracing::warn!(
                operation = self.key.operation(),
                token = self.token,
                steps = ?in_doubt,
                "an operation completed with steps in doubt, which cannot be settled any more; return the error of a \
                 step"
            );
        }
        Ok(())
    }

    /// Releases the claim: the next caller may claim at once, under every policy, if attempts are left. Use this only
    /// for work that had no effect, or whose effect may repeat. If a step is in doubt, the operation is indeterminate
    /// instead. The record keeps `reason`.
    ///
    /// All clones of the [`Lease`] are lost before the release is sent. It is tried once, for the length of one lease,
    /// but at most a minute. If it fails, the claim lapses.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    ///
    /// # Cancellation
    ///
    /// The claim is released, or lapses.
    pub async fn release(self, reason: &str) -> Result<(), Error> {
        self.release_and(reason, true).await
    }

    async fn release_and(mut self, reason: &str, keeps_request: bool) -> Result<(), Error> {
        // Another owner may work as soon as the release has committed, even before this owner learns it.
        self.deadline.end();
        let giving_up = committed(&self.pool, self.durable(), async |conn| {
            self.record().release_lease(conn, self.token, reason, keeps_request).await
        });
        let released = self.for_a_lease(giving_up).await;
        self.ended = released.is_ok() || matches!(released, Err(Error::LeaseLost));
        released
    }

    /// Ends the attempt of work that failed, as the policy says. Ignores an error of the statement: the caller needs
    /// the error of the work, and the claim lapses.
    pub(crate) async fn fail(self, reason: &str) {
        self.end_failed();
        let _ = self.release_or_lapse(reason, true).await;
    }

    /// As [`fail`](Self::fail), for work that has refused its request with an answer. After a final one (`is_final`),
    /// no resumer may do the work either.
    ///
    /// If the work of a first attempt has `not_begun`, the key is free for any body, and the attempt does not count.
    /// Under `InSteps` this is also so if the attempt has called no step, because then nothing that the crate guards
    /// has happened. It is not so for a later attempt: an earlier one may have charged for the first body, because a
    /// `step_at_least_once` stores nothing when it begins.
    ///
    /// # Errors
    ///
    /// Then do not send a final refusal to the client: a resumer may still do the work, or the key is not free.
    #[cfg(feature = "http")]
    pub(crate) async fn refuse(mut self, reason: &str, is_final: bool, not_begun: bool) -> Result<(), Error> {
        // Before the steps are read: a task with a clone of the lease begins none after this.
        self.end_failed();
        let did_nothing = not_begun || self.mode() == crate::Mode::InSteps;
        if !did_nothing || self.attempt != 1 || !self.steps.is_empty() {
            // Under `AtMostOnce` no resumer does the work, and a reconciler needs the request.
            let keeps_request = !is_final || self.mode() == crate::Mode::AtMostOnce;
            return self.release_or_lapse(reason, keeps_request).await;
        }
        let freeing =
            committed(&self.pool, self.durable(), async |conn| self.record().free(conn, self.token, reason).await);
        let freed = self.for_a_lease(freeing).await;
        self.ended = freed.is_ok();
        freed
    }

    /// Gives the claim back, after the request of a resumer has arrived in the service under another key. The service
    /// has then performed nothing. The attempt does not count, and the retention ends at `expires_at`, as before the
    /// claim. Ignores an error of this statement: the claim then lapses, and the attempt counts.
    #[cfg(feature = "http")]
    pub(crate) async fn give_back(mut self, reason: &str, expires_at: &str) {
        self.end_failed();
        let giving_back = committed(&self.pool, self.durable(), async |conn| {
            self.record().give_back(conn, self.token, reason, expires_at).await
        });
        self.ended = self.for_a_lease(giving_back).await.is_ok();
    }

    /// Counts the failure. The work ends before the claim does.
    fn end_failed(&self) {
        self.deadline.end();
        observe::outcome(self.mode(), self.key.operation(), observe::FAILED);
    }

    async fn release_or_lapse(mut self, reason: &str, keeps_request: bool) -> Result<(), Error> {
        let may_repeat = self.mode().repeats() || self.not_performed.load(Ordering::Relaxed);
        // A step in doubt must be remembered for the whole retention.
        if may_repeat && self.steps.in_doubt().is_empty() {
            return self.release_and(reason, keeps_request).await;
        }
        let retention = self.leasing.retention;
        let lapsing = committed(&self.pool, self.durable(), async |conn| {
            self.record().lapse(conn, self.token, reason, retention, keeps_request).await
        });
        let lapsed = self.for_a_lease(lapsing).await;
        self.ended = lapsed.is_ok();
        lapsed
    }

    /// Waits for a statement for the length of one lease, but at most a minute. If the network drops all packets, the
    /// wait would last until TCP gives up.
    async fn for_a_lease(&self, statement: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
        bounded(self.leasing.policy.lease().min(ANSWER_TIME * 2), statement).await
    }

    pub(crate) fn failed(&self, error: Error) -> Error {
        observe::outcome(self.mode(), self.key.operation(), error.outcome());
        error
    }
}

impl Drop for LeaseOwner {
    fn drop(&mut self) {
        self.renewal.abort();
        self.deadline.end();
        if !self.ended && self.unbegun.has_begun() {
            // An operator can find the record by the token, and the token is not a secret.
            tracing::warn!(
                operation = self.key.operation(),
                token = self.token,
                attempt = self.attempt(),
                "a lease was dropped before it was completed or released; its claim lapses"
            );
        }
    }
}

/// The next renewal follows after a third of the lease, and after a twelfth if this one has failed.
const RENEWALS: u32 = 3;
const RETRIES: u32 = RENEWALS * 4;

/// Renews the claim after each third of its lease, until the deadline is past or the claim is gone. Tries again after
/// an error while there is time: the pool may have no free connection, or lend one that has vanished, or the database
/// may be away.
async fn renew(lease: Lease, claimed_at: Instant) {
    let (time, deadline) = (lease.leasing.policy.lease(), &lease.deadline);
    let mut next = claimed_at + time / RENEWALS;
    loop {
        let Some(at) = deadline.get() else { return };
        sleep_until(next.min(at)).await;
        let sent_at = Instant::now();
        let left = at.saturating_duration_since(sent_at);
        if left.is_zero() {
            // The work was told to stop, so the claim must not be renewed.
            return;
        }
        match bounded(longest_try(time, left), heartbeat(&lease)).await {
            Ok(true) => {
                next = sent_at + time / RENEWALS;
                deadline.prolong(sent_at, time);
            }
            Ok(false) => {
                deadline.end();
                return;
            }
            Err(error) => {
                tracing::warn!(
                    operation = lease.key.operation(),
                    token = lease.token,
                    error = &error as &dyn std::error::Error,
                    "a lease could not be renewed"
                );
                // After a try that took all its time, at once.
                next = sent_at + time / RETRIES;
            }
        }
    }
}

/// How long a try may take, of the time that is `left` to the owner. The pool may lend a connection that has vanished
/// and gives no answer. When the try is dropped, this connection is closed, and the next try gets another one. So a try
/// takes half of the time that is left, and at least a twelfth of the lease, because a server may only be slow. After a
/// minute the server counts as lost.
fn longest_try(lease: Duration, left: Duration) -> Duration {
    (left / 2).max(lease / RETRIES).min(left).min(ANSWER_TIME * 2)
}

/// Renews the lease once, on its own connection, and as durably as the claim. If the server lost an acknowledged
/// renewal, the lease in the database would end before the owner's deadline.
async fn heartbeat(lease: &Lease) -> Result<bool, Error> {
    in_pooled_transaction(&lease.pool, Opening::Durable(lease.leasing.deployment), async |conn| {
        lease.record().heartbeat(conn, lease.token, lease.leasing.policy.lease()).await
    })
    .await
}
