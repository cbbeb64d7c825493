//! The owner of a lease: how the lease is renewed, and how its claim ends.

use std::fmt::Display;
use std::ops::Deref;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgPool;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};
use tracing::Instrument as _;

use super::handle::{Deadline, Lease, committed, time_to_end, within_a_lease};
use super::memory::Memory;
use super::options::LeaseOptions;
use super::unbegun::Unbegun;
use crate::background::caught;
use crate::error::Failure;
use crate::observe::{call_span, counted};
use crate::outcome::{StoredResponse, encode};
use crate::record::{Claim, Opening, StoredSteps};
use crate::session::{ANSWER_TIME, bounded, in_pooled_transaction};
use crate::{Error, Fingerprint, Key, observe};

/// The right and the duty to do the work of one key. A task renews the lease until the lease is completed, released or
/// lost, or the owner is dropped. The owner dereferences to the [`Lease`].
///
/// End the claim with [`complete`](Self::complete) or [`release`](Self::release). **If the owner is dropped, the claim
/// lapses**, and the crate logs a warning. The [`Policy`](super::Policy) then decides what the next caller does. The
/// crate undoes nothing, because it is unknown whether the work took effect.
#[derive(Debug)]
#[must_use = "a lease that is dropped is neither completed nor released"]
pub struct LeaseOwner {
    lease: Lease,
    renewal: AbortHandle,
    ended: bool,
    unbegun: Unbegun,
}

pub(super) struct WonLease {
    pub(super) claim: Claim,
    /// The steps of earlier attempts.
    pub(super) steps: StoredSteps,
    /// The guard that releases the claim if no work begins. The guard is made before the COMMIT of the claim is sent.
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
        options: LeaseOptions,
        pool: &PgPool,
        key: &Key,
        fingerprint: Fingerprint,
        won: WonLease,
        claimed_at: Instant,
    ) -> Self {
        let WonLease { claim, steps, unbegun } = won;
        let lease = Lease {
            options,
            pool: pool.clone(),
            key: key.clone(),
            fingerprint,
            token: claim.token,
            attempt: claim.attempt,
            deadline: Arc::new(Deadline::of(claimed_at, options.policy.lease())),
            uses: Arc::default(),
            steps: Arc::new(Memory::of(steps)),
        };
        let renewal = tokio::spawn(renew(lease.clone(), claimed_at)).abort_handle();
        Self { lease, renewal, ended: false, unbegun }
    }

    /// Notes that the work begins now. If an owner is dropped before this call, its claim is released and does not
    /// count as an attempt.
    pub(crate) fn begin(&mut self) {
        self.unbegun.begin();
    }

    /// Does the work, and then stores its result or ends the failed attempt.
    pub(super) async fn work<T, E>(mut self, work: impl AsyncFnOnce(&Lease) -> Result<T, E>) -> Result<T, Failure<E>>
    where
        T: Serialize + DeserializeOwned,
        E: Display,
    {
        let lease = self.lease.clone();
        // `begin` is called at the first poll of this future. If the lease is lost before this poll, the work has not
        // begun.
        let working = async {
            self.begin();
            work(&lease).await
        };
        let working = lease.unless_lost(caught(working));
        let worked = observe::timed_work(lease.mode(), lease.key.operation(), pin!(working)).await;
        match worked {
            None => Err(self.failed(Error::LeaseLost).into()),
            Some(Ok(Ok(response))) => {
                let encoded = encode(&response).map_err(|error| self.failed(error))?;
                self.complete_encoded(&encoded).await?;
                Ok(response)
            }
            Some(Ok(Err(error))) => {
                // The text is in the alternate form (`#`), because in this form anyhow also prints the causes.
                self.fail(&format!("{error:#}")).await;
                Err(Failure::Perform(error))
            }
            Some(Err(panic)) => {
                self.fail("the work panicked").await;
                Err(Failure::Panicked(panic))
            }
        }
    }

    /// Stores the result, and every retry within the retention gets this result. The retention starts anew at this
    /// moment. After an error of the database, the owner tries again for the length of one lease, but at least for 3
    /// seconds.
    ///
    /// # Errors
    ///
    /// - [`Error::LeaseLost`]: the claim is gone, for example because another owner has taken it over.
    /// - [`Error::Unencodable`]: a retry could not decode the result. The claim lapses.
    /// - Errors of the database. The claim lapses.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the result is stored or the claim lapses.
    pub fn complete<T>(self, response: &T) -> impl Future<Output = Result<(), Error>> + Send + use<T>
    where
        T: Serialize + DeserializeOwned,
    {
        // The response is encoded before the first await, because a reference across an await would demand `T: Sync`.
        let encoded = encode(response);
        async move { self.complete_encoded(&encoded?).await }
    }

    pub(crate) async fn complete_encoded(self, encoded: &StoredResponse) -> Result<(), Error> {
        let (mode, key) = (self.mode(), self.key.clone());
        let span = call_span!("lease.complete", mode, key);
        let outcome = |stored: &Result<_, Error>| stored.as_ref().map_or_else(Error::outcome, |()| observe::PERFORMED);
        counted(mode, key.operation(), pin!(self.store(encoded).instrument(span)), outcome).await
    }

    async fn store(mut self, encoded: &StoredResponse) -> Result<(), Error> {
        let LeaseOptions { policy, retention, .. } = self.options;
        let (record, token) = (self.record(), self.token);
        observe::token(token);
        let stored = within_a_lease(policy.lease(), || {
            committed(&self.pool, Opening::DURABLE, async move |conn| {
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

    /// Releases the claim. After the release, the next caller may claim at once under every policy, if attempts are
    /// left. Use this method only for work that had no effect, or whose effect may repeat. If a step is in doubt, no
    /// caller can claim afterwards, because the operation becomes indeterminate. The record keeps `reason` as
    /// `last_error`.
    ///
    /// All clones of the [`Lease`] are lost before the release is sent. The release is tried once, for the length of
    /// one lease, but at least for 3 seconds, and at most for a minute. If the release fails, the claim lapses.
    ///
    /// # Errors
    ///
    /// The errors of [`complete`](Self::complete), except `Unencodable`.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the claim is released or lapses.
    pub async fn release(self, reason: &str) -> Result<(), Error> {
        self.release_and(reason, true).await
    }

    async fn release_and(mut self, reason: &str, keeps_request: bool) -> Result<(), Error> {
        // Another owner may work as soon as the release has committed, even before this owner gets the answer.
        self.deadline.end();
        let giving_up = committed(&self.pool, Opening::DURABLE, async |conn| {
            self.record().release_lease(conn, self.token, reason, keeps_request).await
        });
        let released = self.for_a_lease(giving_up).await;
        self.ended = released.is_ok() || matches!(released, Err(Error::LeaseLost));
        released
    }

    /// Ends an attempt whose work has failed, in the way that the policy demands. The method ignores an error of its
    /// statement, because the caller needs the error of the work. After such an error, the claim lapses.
    pub(crate) async fn fail(self, reason: &str) {
        self.end_failed();
        let _ = self.release_or_lapse(reason, true).await;
    }

    /// Ends an attempt whose work has answered that it refuses the request. After a final refusal (`is_final`), no
    /// resumer may do the work.
    ///
    /// If the work of a first attempt has not begun (`not_begun`), the key is free for any body, and the attempt does
    /// not count. Under `InSteps`, the key is also free if the first attempt has called no step, because then nothing
    /// that the crate guards has happened. A second or later attempt never frees the key. The record does not show
    /// whether a `step_at_least_once` has begun, so an earlier attempt may, for example, have charged the customer for
    /// the first body.
    ///
    /// # Errors
    ///
    /// After an error, send no final refusal to the client, because a resumer may still do the work, or the key is not
    /// free for another body.
    #[cfg(feature = "http")]
    pub(crate) async fn refuse(mut self, reason: &str, is_final: bool, not_begun: bool) -> Result<(), Error> {
        // The lease ends before the steps are read, so that no task with a clone of the lease begins a step afterwards.
        self.end_failed();
        let did_nothing = not_begun || self.mode() == crate::Mode::InSteps;
        if !did_nothing || self.attempt != 1 || !self.steps.is_empty() {
            // Under `AtMostOnce`, no resumer does the work, but a reconciler needs the stored request.
            let keeps_request = !is_final || self.mode() == crate::Mode::AtMostOnce;
            return self.release_or_lapse(reason, keeps_request).await;
        }
        let freeing =
            committed(&self.pool, Opening::DURABLE, async |conn| self.record().free(conn, self.token, reason).await);
        let freed = self.for_a_lease(freeing).await;
        self.ended = freed.is_ok();
        freed
    }

    /// Counts the failure and ends the lease, so that the work stops before the claim ends.
    fn end_failed(&self) {
        self.deadline.end();
        observe::outcome(self.mode(), self.key.operation(), observe::FAILED);
    }

    async fn release_or_lapse(mut self, reason: &str, keeps_request: bool) -> Result<(), Error> {
        let may_repeat = self.mode().repeats() || self.uses.not_performed.load(Ordering::Relaxed);
        // If a step is in doubt, the record must remember the step for the whole retention, so the claim is not
        // released.
        if may_repeat && self.steps.in_doubt().is_empty() {
            return self.release_and(reason, keeps_request).await;
        }
        let retention = self.options.retention;
        let lapsing = committed(&self.pool, Opening::DURABLE, async |conn| {
            self.record().lapse(conn, self.token, reason, retention, keeps_request).await
        });
        let lapsed = self.for_a_lease(lapsing).await;
        self.ended = lapsed.is_ok();
        lapsed
    }

    /// Waits for a statement for the [`time_to_end`], but at most a minute. Without this limit, the wait for a network
    /// that drops all packets would last until TCP gives up.
    fn for_a_lease(
        &self,
        statement: impl Future<Output = Result<(), Error>>,
    ) -> impl Future<Output = Result<(), Error>> {
        bounded(time_to_end(self.options.policy.lease()).min(ANSWER_TIME * 2), statement)
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
            // The warning names the token, so that an operator can find the record. The token is not a secret.
            tracing::warn!(
                operation = self.key.operation(),
                token = self.token,
                attempt = self.attempt(),
                "a lease was dropped before it was completed or released; its claim lapses"
            );
        }
    }
}

/// The time from a renewal to the next renewal is the lease divided by this number.
const RENEWAL_DIVISOR: u32 = 3;
/// The time from a failed renewal to the next try is the lease divided by this number. So four tries fit into the time
/// between two renewals.
const RETRY_DIVISOR: u32 = RENEWAL_DIVISOR * 4;

/// Renews the claim after each third of its lease, until the deadline is past or the claim is gone. After an error, the
/// task tries again while there is time. For example, the pool may have no free connection, a connection of the pool
/// may have vanished, or the database may be down.
async fn renew(lease: Lease, claimed_at: Instant) {
    let (time, deadline) = (lease.options.policy.lease(), &lease.deadline);
    let mut next = claimed_at + time / RENEWAL_DIVISOR;
    loop {
        let Some(at) = deadline.get() else { return };
        sleep_until(next.min(at)).await;
        let sent_at = Instant::now();
        let left = at.saturating_duration_since(sent_at);
        if left.is_zero() {
            // The deadline has stopped the work, so the claim must not be renewed.
            return;
        }
        match bounded(longest_try(time, left), heartbeat(&lease)).await {
            Ok(true) => {
                next = sent_at + time / RENEWAL_DIVISOR;
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
                // After a try that took a twelfth of the lease or longer, the next try follows at once.
                next = sent_at + time / RETRY_DIVISOR;
            }
        }
    }
}

/// How long a try to renew may take, if `left` is the time that the owner has left. The pool may lend a connection that
/// has vanished and gives no answer. When the try is dropped, this connection is closed, and the next try gets another
/// connection. So a try may take half of the time that is left. If a twelfth of the lease is longer than this half, a
/// try may take the twelfth, because the server may be alive, but slow. After a minute, the server counts as lost.
fn longest_try(lease: Duration, left: Duration) -> Duration {
    (left / 2).max(lease / RETRY_DIVISOR).min(left).min(ANSWER_TIME * 2)
}

/// Renews the lease once, on a connection of its own, and as durably as the claim. If the server lost an acknowledged
/// renewal, the lease in the database would end before the owner's deadline.
async fn heartbeat(lease: &Lease) -> Result<bool, Error> {
    in_pooled_transaction(&lease.pool, Opening::DURABLE, async |conn| {
        lease.record().heartbeat(conn, lease.token, lease.options.policy.lease()).await
    })
    .await
}
