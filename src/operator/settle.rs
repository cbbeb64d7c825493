//! The verbs with which an operator settles a record that was shown.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool, PgTransaction};

use crate::lease::encode_result;
use crate::limits::{RETENTION, in_range};
use crate::outcome::encode;
use crate::record::{Grants, Opening, Settlement, Shown};
use crate::session::{in_callers_transaction, in_pooled_transaction};
use crate::{SettleError, migrate};

/// What a verb of [`Shown`] runs on: a transaction of its own (`&pool`, the usual choice), or your transaction
/// (`&mut tx`). The [module](crate::operator) explains when to use your transaction.
#[derive(Debug)]
pub enum PoolOrTransaction<'c> {
    /// The verb runs in a transaction of its own, on a connection of this pool.
    Pool(&'c PgPool),
    /// The verb runs in the transaction of this connection.
    Transaction(&'c mut PgConnection),
}

impl<'c> From<&'c PgPool> for PoolOrTransaction<'c> {
    fn from(pool: &'c PgPool) -> Self {
        Self::Pool(pool)
    }
}

impl<'c> From<&'c mut PgConnection> for PoolOrTransaction<'c> {
    fn from(conn: &'c mut PgConnection) -> Self {
        Self::Transaction(conn)
    }
}

impl<'c> From<&'c mut PgTransaction<'_>> for PoolOrTransaction<'c> {
    fn from(tx: &'c mut PgTransaction<'_>) -> Self {
        Self::Transaction(tx)
    }
}

impl PoolOrTransaction<'_> {
    /// Runs the statements of a decision in a durable transaction.
    async fn decide<R>(
        self,
        decision: impl AsyncFnOnce(&mut PgConnection) -> Result<R, SettleError>,
    ) -> Result<R, SettleError> {
        let decided = async |conn: &mut PgConnection| {
            migrate::trusted(conn).await?;
            decision(conn).await
        };
        match self {
            Self::Pool(pool) => in_pooled_transaction(pool, Opening::DURABLE_ALL_ROWS, decided).await,
            Self::Transaction(conn) => in_callers_transaction(conn, decided).await,
        }
    }
}

impl Shown {
    /// Stores the response of an [indeterminate](crate::Error::Indeterminate) or [exhausted](crate::Error::Exhausted)
    /// operation that took effect. Every later retry gets this response. The record is kept for `retention` from now,
    /// and at least until its previous `expires_at`. No step is performed any more, not even a step in doubt.
    ///
    /// # Errors
    ///
    /// [`SettleError::Changed`] if the record has changed since it was shown, is completed, was shown under a live
    /// lease or is under one now, or has no attempt yet (attempt 0). The other errors are
    /// [`Unencodable`](crate::Error::Unencodable), [`Misuse`](crate::Misuse) for a connection without a transaction,
    /// and errors of the database.
    ///
    /// # Cancellation
    ///
    /// With a pool, the decision takes effect completely or not at all. If a verb is cancelled in your transaction,
    /// roll the transaction back.
    pub async fn resolve<T: Serialize + DeserializeOwned>(
        self,
        on: impl Into<PoolOrTransaction<'_>>,
        response: &T,
        retention: Duration,
    ) -> Result<Self, SettleError> {
        let retention = in_range("retention", retention, RETENTION)?;
        let response = encode(response)?;
        self.decided(on.into(), Settlement::Resolve { response: &response, retention }).await
    }

    /// Releases an [indeterminate](crate::Error::Indeterminate) operation that did not take effect. If attempts are
    /// left (see [`grant`](Self::grant)), the next caller may claim the operation at once under any policy. The record
    /// keeps the first 2000 characters of `reason` for the next operator.
    ///
    /// In an operation with steps, a release decides that **no step in doubt took effect**. The release of a step in
    /// doubt permits one more attempt, as `grant` does. The next attempt performs the steps in doubt. Finished steps
    /// stay finished. To decide about one of several steps, use [`step`](Self::step).
    ///
    /// **A look-up alone is not enough if the owner's process may be suspended instead of gone.** When a suspended
    /// process wakes, it may still send the request. Let the other service withdraw the request, or make sure that the
    /// process is gone.
    ///
    /// # Errors and cancellation
    ///
    /// [`SettleError::Changed`] if the record has changed since it was shown, is completed, or was shown under a live
    /// lease or is under one now. The other errors, and the effect of a cancellation, are those of
    /// [`resolve`](Self::resolve).
    pub async fn release(self, on: impl Into<PoolOrTransaction<'_>>, reason: &str) -> Result<Self, SettleError> {
        self.decided(on.into(), Settlement::Release { reason }).await
    }

    /// Permits one more attempt of an operation that was released or has lapsed, even if the attempt exceeds
    /// [`max_attempts`](crate::lease::LeaseOptions::max_attempts). Use this verb for an
    /// [exhausted](crate::Error::Exhausted) operation when the cause of its failures is repaired. The next caller or a
    /// resumer makes the attempt. The record keeps the first 2000 characters of `reason` for the next operator.
    ///
    /// Finished steps stay finished. The permission ends with this attempt. A claim whose work never began does not use
    /// up the permission.
    ///
    /// # Errors and cancellation
    ///
    /// [`SettleError::Changed`] if the record has changed since it was shown, or does not wait for another attempt. A
    /// record does not wait if the record is completed, under a live lease,
    /// [indeterminate](crate::Error::Indeterminate), past its retention or in transaction mode, or if the work of its
    /// first claim never began. The other errors, and the effect of a cancellation, are those of
    /// [`resolve`](Self::resolve).
    pub async fn grant(self, on: impl Into<PoolOrTransaction<'_>>, reason: &str) -> Result<Self, SettleError> {
        self.decided(on.into(), Settlement::Grant { reason }).await
    }

    /// Deletes the record before it expires. **The next call with its key performs the operation again**, including the
    /// finished steps.
    ///
    /// # Errors and cancellation
    ///
    /// [`SettleError::Changed`] if the record has changed since it was shown, is under a live lease, or is gone. The
    /// other errors, and the effect of a cancellation, are those of [`resolve`](Self::resolve).
    pub async fn forget(self, on: impl Into<PoolOrTransaction<'_>>) -> Result<(), SettleError> {
        let deletion = async |conn: &mut PgConnection| {
            if self.delete(conn).await? { Ok(()) } else { Err(SettleError::Changed) }
        };
        on.into().decide(deletion).await
    }

    /// Selects the step with this name, so that you can settle this step alone. The selected step must be [in
    /// doubt](crate::Error::Indeterminate). Other steps in doubt stay in doubt. Settle the other steps with the record
    /// that the verb returns. When the last step in doubt is settled, the operation is released, and one more attempt
    /// is permitted (see [`grant`](Self::grant)).
    ///
    /// ```no_run
    /// # use pg_idempotency::operator;
    /// # struct Gateways;
    /// # impl Gateways { async fn withdraw(&self, _: &str) -> anyhow::Result<Option<String>> { Ok(None) } }
    /// # async fn f(pool: &sqlx::PgPool, gateways: &Gateways) -> anyhow::Result<()> {
    /// for mut found in operator::unsettled(pool, 100, None, None).await? {
    ///     for step in found.steps.clone().into_iter().filter(|step| step.in_doubt) {
    ///         found = match gateways.withdraw(&step.downstream_key).await? {
    ///             // It took effect: the next attempt continues after this step.
    ///             Some(sent) => found.step(&step.name).resolve(pool, &sent).await?,
    ///             // It took no effect: the next attempt performs this step, and no finished one.
    ///             None => found.step(&step.name).release(pool, "the gateway has not sent it").await?,
    ///         };
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use = "it settles nothing before `resolve` or `release`"]
    pub fn step(self, name: &str) -> StepInDoubt<'_> {
        StepInDoubt { shown: self, name }
    }

    async fn decided(self, on: PoolOrTransaction<'_>, decision: Settlement<'_>) -> Result<Self, SettleError> {
        let settling = async |conn: &mut PgConnection| self.settle(conn, decision).await?.ok_or(SettleError::Changed);
        on.decide(settling).await
    }
}

/// One step of an operation that was shown. [`Shown::step`] selects the step.
#[derive(Debug)]
pub struct StepInDoubt<'a> {
    shown: Shown,
    name: &'a str,
}

impl StepInDoubt<'_> {
    /// Stores the result of a step that took effect. The next attempt continues after this step.
    ///
    /// # Errors and cancellation
    ///
    /// [`SettleError::Changed`] if this step is not in doubt, or if the record has changed since it was shown, is
    /// completed, or was shown under a live lease or is under one now. [`Misuse::Step`](crate::Misuse::Step) if the
    /// result exceeds 64 KiB, or if all results together would exceed 256 KiB. The other errors, and the effect of a
    /// cancellation, are those of [`Shown::resolve`].
    pub async fn resolve<T>(self, on: impl Into<PoolOrTransaction<'_>>, result: &T) -> Result<Shown, SettleError>
    where
        T: Serialize + DeserializeOwned,
    {
        let result = encode_result(self.name, result)?;
        self.shown.decided(on.into(), Settlement::ResolveStep { step: self.name, result: &result }).await
    }

    /// Decides that the step took no effect. The next attempt performs the step. The record keeps the first 2000
    /// characters of `reason` for the next operator. The warning at [`Shown::release`] applies to a step, too.
    ///
    /// # Errors and cancellation
    ///
    /// As [`resolve`](Self::resolve).
    pub async fn release(self, on: impl Into<PoolOrTransaction<'_>>, reason: &str) -> Result<Shown, SettleError> {
        let decision = Settlement::ReleaseStep { step: self.name, reason, grants: Grants::OneAttempt };
        self.shown.decided(on.into(), decision).await
    }
}
