//! One visit of a reconciler: it reserves a probe, calls the service's look-up function, and settles the operation.

use std::fmt::Display;
use std::time::Duration;

use sqlx::{PgConnection, PgPool};

use super::handle::within_a_lease;
use super::reconciler::{Effect, Finding, InDoubt, Reconciler, Visit};
use crate::background::{begin_anywhere, caught};
use crate::record::{Doubt, Grants, Opening, Probed, Settlement, Shown, ShownProbes};
use crate::session::{bounded, in_pooled_transaction};
use crate::state::State;
use crate::{Error, Misuse, observe};

/// The distance between two probes doubles at most this many times. Usually the distance reaches its limit, half of the
/// retention, after fewer doublings.
const MOST_DOUBLINGS: u32 = 20;

/// An operation, or a step of an operation, whose probe is due or under way.
struct Due<'d> {
    doubt: &'d Doubt,
    place: usize,
    /// The probes as they are stored in the record.
    probes: ShownProbes,
}

impl Reconciler {
    /// Makes one visit, for a service that has a loop of its own instead of [`run`](Self::run). The visit either notes
    /// operations that are newly in doubt, or probes one operation.
    ///
    /// # Errors
    ///
    /// Returns errors of the database and [`Error::Unanswered`]. An error or a panic of `look_up` is not returned, but
    /// stored with the probe.
    ///
    /// # Cancellation
    ///
    /// The effect of a cancellation is the same as for [`run`](Self::run).
    pub async fn visit_one<E, F>(&self, pool: &PgPool, look_up: F) -> Result<Visit, Error>
    where
        E: Display,
        F: AsyncFnOnce(&InDoubt) -> Result<Finding, E>,
    {
        let visit = self.visit(pool, look_up).await?;
        if !matches!(visit, Visit::Nothing | Visit::Noted) {
            observe::reconciled(&self.operation, visit.as_str());
        }
        Ok(visit)
    }

    async fn visit<E, F>(&self, pool: &PgPool, look_up: F) -> Result<Visit, Error>
    where
        E: Display,
        F: AsyncFnOnce(&InDoubt) -> Result<Finding, E>,
    {
        let (persistent, mode) = (self.options.persistent, self.options.policy.mode());
        let search = async |conn: &mut PgConnection| Doubt::all(conn, persistent, &self.operation, mode).await;
        let mut doubts = self.transaction(pool, Opening::ALL_ROWS, search).await?;
        // A jump of the server's clock may have ended the lease too early. In this case, the owner may still work.
        // Before one more lease of real time has passed, the owner either renews the lease, which ends these
        // probes, or stops by its own clock.
        let (after, retention) = (self.options.policy.lease() + self.quiet, self.options.retention);
        let mut noted = false;
        // The first visits come before any probe, because a record without a first visit may expire soon.
        for doubt in doubts.iter().filter(|doubt| doubt.shown.probes.is_empty()) {
            let first_visit = async |conn: &mut PgConnection| doubt.visit_first(conn, after, retention).await;
            noted |= self.transaction(pool, Opening::DURABLE, first_visit).await?;
        }
        if noted {
            return Ok(Visit::Noted);
        }
        begin_anywhere(&mut doubts);
        for doubt in &doubts {
            for (place, probes) in doubt.due() {
                let due = Due { doubt, place, probes: probes.clone() };
                // All permitted probes have begun. Either the process that made the last probe has died, or the limit
                // of probes was higher before.
                if probes.probes >= self.most_probes {
                    return self.conclude(pool, &due, None).await;
                }
                if let Some((due, request)) = self.reserve(pool, due).await? {
                    return self.probe(pool, due, request, look_up).await;
                }
            }
        }
        Ok(Visit::Nothing)
    }

    async fn transaction<R>(
        &self,
        pool: &PgPool,
        opening: Opening,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<R, Error>,
    ) -> Result<R, Error> {
        bounded(self.options.claim_limit(pool), in_pooled_transaction(pool, opening, work)).await
    }

    /// Reserves the probe, so that no other probe begins before the distance to the next probe has passed. Also returns
    /// the stored request. `None` means that another reconciler or a decision was faster.
    async fn reserve<'d>(&self, pool: &PgPool, due: Due<'d>) -> Result<Option<(Due<'d>, Vec<u8>)>, Error> {
        let (begun, shown) = (due.probes.begun(), &due.doubt.shown);
        let after = self.distance_after(&begun).max(self.time_out);
        let request = self
            .transaction(pool, Opening::DURABLE, async |conn| {
                if !self.write(conn, &due, &begun, Some(after)).await? {
                    return Ok(None);
                }
                shown.record().request(conn, shown.token).await
            })
            .await?;
        Ok(request.map(|request| (Due { probes: begun, ..due }, request)))
    }

    async fn probe<E, F>(&self, pool: &PgPool, due: Due<'_>, request: Vec<u8>, look_up: F) -> Result<Visit, Error>
    where
        E: Display,
        F: AsyncFnOnce(&InDoubt) -> Result<Finding, E>,
    {
        let (shown, step) = (&due.doubt.shown, due.probes.step.as_deref());
        let asked = InDoubt {
            key: shown.key.clone(),
            downstream_key: shown.downstream(step),
            step: step.map(str::to_owned),
            attempt: shown.attempt,
            claimed_at: shown.claimed_at,
            request,
        };
        let (probed, effect, mut error) = match tokio::time::timeout(self.time_out, caught(look_up(&asked))).await {
            Ok(Ok(Ok(Finding::TookEffect(effect)))) => (Probed::TookEffect, Some(effect), None),
            Ok(Ok(Ok(Finding::NoTrace))) => (Probed::NoTrace, None, None),
            Ok(Ok(Ok(Finding::Unknown))) => (Probed::Unknown, None, None),
            // The text is in the alternate form (`#`), because in this form anyhow also prints the causes.
            Ok(Ok(Err(error))) => (Probed::Failed, None, Some(format!("{error:#}"))),
            // A panic counts as `Unknown`, because the look-up may already have learned that the operation took effect.
            Ok(Err(_)) => (Probed::Unknown, None, Some("the look-up panicked".to_owned())),
            Err(_) => (Probed::Unknown, None, Some(format!("the look-up took longer than {:?}", self.time_out))),
        };
        observe::probed(&self.operation, probed.as_str());
        if let Some(error) = &error {
            tracing::warn!(operation = self.operation, error, "a look-up failed, and the next probe comes later");
        }
        if let Some(effect) = effect {
            match self.store(pool, &due, &effect).await {
                // This answer can never be stored, so the visit does not try again.
                Err(unstorable @ (Error::Misuse(Misuse::Step { .. }) | Error::Unencodable { .. })) => {
                    error = Some(unstorable.to_string());
                }
                stored => return stored,
            }
        }
        self.conclude(pool, &due, Some(due.probes.clone().ended(probed, error))).await
    }

    /// Stores the end of a probe that did not settle the operation. Releases the operation after enough probes without
    /// a trace, or leaves the operation to a person after the last permitted probe. Without a new probe (`ended` is
    /// `None`), the function does not release the operation, because the effect may have happened since the last probe.
    async fn conclude(&self, pool: &PgPool, due: &Due<'_>, ended: Option<ShownProbes>) -> Result<Visit, Error> {
        let (doubt, probes) = (due.doubt, ended.as_ref().unwrap_or(&due.probes));
        let found_no_trace = ended.is_some() && probes.finding == Some(Probed::NoTrace);
        let releases = found_no_trace && probes.no_trace >= self.no_trace;
        let given_up = !releases && probes.probes >= self.most_probes;
        let after = (!given_up).then(|| self.distance_after(probes));
        let visit = self
            .transaction(pool, Opening::DURABLE, async |conn| {
                // The write locks the record, so no later probe can store another finding before the release.
                if !self.write(conn, due, probes, after).await? {
                    return Ok(Visit::Overtaken);
                }
                if !releases {
                    return Ok(if given_up { Visit::GivenUp } else { Visit::Undecided });
                }
                let reason = format!("a reconciler found no trace of it, at {} probes", probes.no_trace);
                let decision = match &probes.step {
                    None => Settlement::Release { reason: &reason },
                    Some(step) => Settlement::ReleaseStep { step, reason: &reason, grants: Grants::Nothing },
                };
                Ok(doubt.shown.settle(conn, decision).await?.map_or(Visit::Overtaken, |_| Visit::Released))
            })
            .await?;
        if visit == Visit::GivenUp {
            tracing::error!(
                operation = self.operation,
                token = doubt.shown.token,
                step = probes.step,
                probes = probes.probes,
                error = probes.error,
                "an operation in doubt could not be settled, and is left to a person"
            );
        }
        Ok(visit)
    }

    async fn write(
        &self,
        conn: &mut PgConnection,
        due: &Due<'_>,
        probes: &ShownProbes,
        after: Option<Duration>,
    ) -> Result<bool, Error> {
        due.doubt.write_probe(conn, due.place, &due.probes, probes, after, self.options.retention).await
    }

    fn distance_after(&self, probes: &ShownProbes) -> Duration {
        let doublings = 2_u32.pow(probes.probes.saturating_sub(1).min(MOST_DOUBLINGS));
        self.distance.saturating_mul(doublings).min(self.options.retention / 2)
    }

    /// Stores the answer of a probe that found the effect. A probe may find the effect at any time, also while a later
    /// probe is under way.
    ///
    /// After an error, the function tries again to store the answer, for the length of one lease, but at least for 3
    /// seconds. If the answer were lost, a later probe might find no trace.
    async fn store(&self, pool: &PgPool, due: &Due<'_>, effect: &Effect) -> Result<Visit, Error> {
        let result =
            due.probes.step.as_ref().map(|step| effect.of_step(step).map(|result| (step, result))).transpose()?;
        let decision = match &result {
            None => Settlement::Resolve { response: &effect.0, retention: self.options.retention },
            Some((step, result)) => Settlement::ResolveStep { step, result },
        };
        within_a_lease(self.options.policy.lease(), || {
            in_pooled_transaction(pool, Opening::DURABLE, async move |conn| -> Result<_, Error> {
                let mut shown = due.doubt.shown.clone();
                while shown.settle(conn, decision).await?.is_none() {
                    match shown.record().show(conn).await? {
                        // The only change of the record is that another step has ended. The answer is still stored,
                        // because a later probe might find no trace of this step.
                        Some(now)
                            if now.version() != shown.version() && now.version().has_claim_of(shown.version()) =>
                        {
                            shown = now;
                        }
                        now => return Ok(self.overtaken(now, due)),
                    }
                }
                Ok(Visit::Resolved)
            })
        })
        .await
    }

    /// The result of a visit if the operation took effect, but its record has changed since the search. The result is
    /// [`Visit::Overtaken`] if the response is stored already, or if the operation is still in doubt and will be
    /// visited again. Otherwise the operation was released, and the effect may happen twice.
    fn overtaken(&self, shown: Option<Shown>, due: &Due<'_>) -> Visit {
        let (before, step) = (&due.doubt.shown, due.probes.step.as_deref());
        let token = shown.as_ref().map_or(before.token, |now| now.token);
        let known = shown.is_some_and(|shown| {
            let is_same_claim = shown.claimed_at == before.claimed_at;
            match (shown.state, step) {
                (State::Completed | State::Indeterminate | State::InFlight, None) => is_same_claim,
                (_, None) => false,
                // A completed record has no steps, so nothing shows whether this step was released.
                (State::Completed, _) => true,
                (_, Some(step)) => {
                    // If the claim has changed, and the step belongs to the present attempt, then the step was released
                    // before this attempt.
                    let is_settled = |attempt| is_same_claim || attempt < shown.attempt;
                    shown.token == before.token
                        || shown.steps.iter().any(|shown| shown.name == step && is_settled(shown.attempt))
                }
            }
        });
        if known {
            return Visit::Overtaken;
        }
        tracing::error!(
            operation = self.operation,
            token,
            step,
            "an operation in doubt took effect, but was released before this was known; the effect may happen twice"
        );
        Visit::Contradicted
    }
}
