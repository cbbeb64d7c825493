//! The verbs with which an operator settles a record that was shown.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool, PgTransaction};

use crate::lease::encode_result;
use crate::limits::{RETENTION, in_range};
use crate::outcome::encode;
use crate::record::{Decision, Grants, Shown};
use crate::session::{Opening, in_callers_transaction, in_pooled_transaction};
use crate::{Deployment, SettleError, migrate};

/// Where a verb of [`Shown`] takes place: in a transaction of its own, or in yours.
///
/// A pool (`&pool`) is the usual choice. Pass a connection in a transaction (`&mut tx`) to commit the decision together
/// with a row of yours, such as the line of an audit. Then **decide last, and commit at once**: the record's row stays
/// locked until the transaction ends, and calls with the key may wait for it. See the [module](crate::operator).
#[derive(Debug)]
pub enum PoolOrTransaction<'c> {
    /// In a transaction of its own, on a connection of this pool.
    Pool(&'c PgPool),
    /// In the transaction of this connection.
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
    /// Runs the statements of a decision in a transaction that is durable on every server of the deployment.
    async fn decide<R>(
        self,
        deployment: Deployment,
        decision: impl AsyncFnOnce(&mut PgConnection) -> Result<R, SettleError>,
    ) -> Result<R, SettleError> {
        let decided = async |conn: &mut PgConnection| {
            migrate::trusted(conn).await?;
            decision(conn).await
        };
        match self {
            Self::Pool(pool) => in_pooled_transaction(pool, Opening::DurableAllRows(deployment), decided).await,
            Self::Transaction(conn) => in_callers_transaction(conn, deployment, decided).await,
        }
    }
}

impl Shown {
    /// Stores the response of an [indeterminate](crate::Error::Indeterminate) or [exhausted](crate::Error::Exhausted)
    /// operation that took effect. Every retry gets the response from now on, for `retention`, or until the record
    /// would have expired if that is later. No step is performed any more, not even one in doubt.
    ///
    /// # Errors
    ///
    /// [`SettleError::Changed`] if the record is not as it was shown, is completed, is under a live lease, or if no
    /// attempt has begun (attempt 0); [`Unencodable`](crate::Error::Unencodable); [`Misuse`](crate::Misuse) for a
    /// connection without a transaction; errors of the database.
    ///
    /// # Cancellation
    ///
    /// On a pool: done or not done. In a transaction of yours: roll it back.
    pub async fn resolve<T: Serialize + DeserializeOwned>(
        self,
        place: impl Into<PoolOrTransaction<'_>>,
        response: &T,
        retention: Duration,
    ) -> Result<Self, SettleError> {
        let retention = in_range("retention", retention, RETENTION)?;
        let response = encode(response)?;
        self.decided(place.into(), Decision::Resolve { response: &response, retention }).await
    }

    /// Releases an [indeterminate](crate::Error::Indeterminate) operation that did not take effect. The next caller may
    /// claim it at once, under any policy, if attempts are left ([`grant`](Self::grant)). In steps, this decides that
    /// **none of the steps in doubt took effect**, so the next attempt performs them, and is permitted as by `grant`.
    /// Finished steps stay. To decide about one of several steps, use [`step`](Self::step).
    ///
    /// The record keeps `reason` for the next operator.
    ///
    /// **Looking the effect up is not enough if its process may only be suspended**: when it wakes, it may still send
    /// the request. Let the other service withdraw the request, or make sure that the process is gone.
    ///
    /// # Errors
    ///
    /// [`SettleError::Changed`] if the record is not as it was shown, is completed, or is under a live lease; otherwise
    /// as [`resolve`](Self::resolve).
    ///
    /// # Cancellation
    ///
    /// As [`resolve`](Self::resolve).
    pub async fn release(self, place: impl Into<PoolOrTransaction<'_>>, reason: &str) -> Result<Self, SettleError> {
        self.decided(place.into(), Decision::Release { reason }).await
    }

    /// Permits one more attempt of an operation that was released or has lapsed, even if it exceeds
    /// [`max_attempts`](crate::lease::LeaseOptions::max_attempts): of an [exhausted](crate::Error::Exhausted) one, when
    /// the cause of its failures is repaired. The next caller or a resumer makes the attempt. The record keeps `reason`
    /// for the next operator.
    ///
    /// Finished steps stay. The permission ends with this attempt, but a claim that never began does not use it up.
    ///
    /// # Errors
    ///
    /// [`SettleError::Changed`] if the record is not as it was shown, or does not wait for another attempt: it is
    /// completed, under a live lease, [indeterminate](crate::Error::Indeterminate), past its retention, in transaction
    /// mode, or its first claim never began; otherwise as [`resolve`](Self::resolve).
    ///
    /// # Cancellation
    ///
    /// As [`resolve`](Self::resolve).
    pub async fn grant(self, place: impl Into<PoolOrTransaction<'_>>, reason: &str) -> Result<Self, SettleError> {
        self.decided(place.into(), Decision::Grant { reason }).await
    }

    /// Deletes the record before it expires: **the next call with its key performs again**, also the finished steps.
    ///
    /// # Errors
    ///
    /// [`SettleError::Changed`] if the record is not as it was shown, is under a live lease, or is gone; otherwise as
    /// [`resolve`](Self::resolve).
    ///
    /// # Cancellation
    ///
    /// As [`resolve`](Self::resolve).
    pub async fn forget(self, place: impl Into<PoolOrTransaction<'_>>) -> Result<(), SettleError> {
        let deletion = async |conn: &mut PgConnection| {
            if self.delete(conn).await? { Ok(()) } else { Err(SettleError::Changed) }
        };
        place.into().decide(self.deployment, deletion).await
    }

    /// The at-most-once step of this name, which is [in doubt](crate::Error::Indeterminate), to settle it alone. Other
    /// steps in doubt stay in doubt, and have to be settled too: go on with the record that the verb returns. After the
    /// last one the operation is released, and the attempt that follows is permitted, as by [`grant`](Self::grant).
    ///
    /// ```rust,no_run
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

    async fn decided(self, place: PoolOrTransaction<'_>, decision: Decision<'_>) -> Result<Self, SettleError> {
        let settling = async |conn: &mut PgConnection| self.settle(conn, decision).await?.ok_or(SettleError::Changed);
        place.decide(self.deployment, settling).await
    }
}

/// One step of an operation that was shown: see [`Shown::step`].
#[derive(Debug)]
pub struct StepInDoubt<'a> {
    shown: Shown,
    name: &'a str,
}

impl StepInDoubt<'_> {
    /// Stores the result of the step, which took effect: the next attempt continues after it.
    ///
    /// # Errors
    ///
    /// [`SettleError::Changed`] if the record is not as it was shown, is completed, is under a live lease, or if this
    /// step is not in doubt; [`Misuse::Step`](crate::Misuse::Step) for a result over 64 KiB, or if all results would
    /// exceed 256 KiB; otherwise as [`Shown::resolve`].
    ///
    /// # Cancellation
    ///
    /// As [`Shown::resolve`].
    pub async fn resolve<T>(self, place: impl Into<PoolOrTransaction<'_>>, result: &T) -> Result<Shown, SettleError>
    where
        T: Serialize + DeserializeOwned,
    {
        let result = encode_result(self.name, result)?;
        self.shown.decided(place.into(), Decision::ResolveStep { step: self.name, result: &result }).await
    }

    /// Decides that the step took no effect: the next attempt performs it. The record keeps `reason` for the next
    /// operator. The warning at [`Shown::release`] applies to a step, too.
    ///
    /// # Errors
    ///
    /// As [`resolve`](Self::resolve).
    ///
    /// # Cancellation
    ///
    /// As [`Shown::resolve`].
    pub async fn release(self, place: impl Into<PoolOrTransaction<'_>>, reason: &str) -> Result<Shown, SettleError> {
        let decision = Decision::ReleaseStep { step: self.name, reason, grants: Grants::OneAttempt };
        self.shown.decided(place.into(), decision).await
    }
}
