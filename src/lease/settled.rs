//! What a look of a reconciler changes: it counts, it releases, or it stores the answer.

use sqlx::PgPool;

use super::finding::{Effect, Finding};
use super::handle::within_a_lease;
use super::reconcile::Look;
use super::reconciler::{Reconciler, Visit};
use crate::Error;
use crate::record::{Decision, Grants, Shown};
use crate::session::{Opening, in_pooled_transaction};
use crate::state::State;

impl Reconciler {
    /// Stores a look that did not say that it took effect, or whose answer cannot be stored, and releases the operation
    /// after enough looks without a trace.
    pub(super) async fn conclude(&self, pool: &PgPool, look: Look<'_>) -> Result<Visit, Error> {
        let mut state = look.state.clone();
        let found_no_trace = state.finding.as_deref() == Some(Finding::NoTrace.as_str());
        // A later look does not outvote one that said that it took effect.
        let releases = !self.dry_run && !state.took_effect && found_no_trace && state.no_trace >= self.looks;
        let given_up = !releases && self.gives_up(&look);
        state.given_up = given_up;
        let after = (!given_up).then(|| self.next_distance(&look, &state));
        let opening = Opening::Durable(self.leasing.deployment);
        let visit = self
            .transaction(pool, opening, async |conn| {
                // It locks the record. So no later look says something else before the release.
                if !self.write(conn, &look, &self.number(&state).to_string(), state.n, &state, after).await? {
                    return Ok(Visit::Overtaken);
                }
                if !releases {
                    return Ok(if given_up { Visit::GivenUp } else { Visit::Undecided });
                }
                let reason = format!("a reconciler found no trace of it, at {} looks", state.no_trace);
                let decision = match look.name {
                    "" => Decision::Release { reason: &reason },
                    step => Decision::ReleaseStep { step, reason: &reason, grants: Grants::Nothing },
                };
                let released = look.doubt.shown.settle(conn, decision).await?;
                Ok(released.map_or(Visit::Overtaken, |_| Visit::Released))
            })
            .await?;
        if visit == Visit::GivenUp {
            self.left_to_a_person(&look);
        }
        Ok(visit)
    }

    /// Stores the answer. A look may be told so at any time, also if a later look is under way.
    ///
    /// It tries for the length of one lease: otherwise later looks might find no trace.
    pub(super) async fn store(&self, pool: &PgPool, look: &Look<'_>, answer: &Effect) -> Result<Option<Visit>, Error> {
        let result = match look.name {
            "" => None,
            step => Some(answer.of_step(step)?),
        };
        let decision = match &result {
            None => Decision::Resolve { response: &answer.0, retention: self.leasing.retention },
            Some(result) => Decision::ResolveStep { step: look.name, result },
        };
        within_a_lease(self.leasing.policy.lease(), || {
            let opening = Opening::Durable(self.leasing.deployment);
            in_pooled_transaction(pool, opening, async move |conn| -> Result<_, Error> {
                let mut shown = look.doubt.shown.clone();
                loop {
                    if shown.settle(conn, decision).await?.is_some() {
                        return Ok(Some(Visit::Resolved));
                    }
                    match self.record(look.doubt).show(conn).await? {
                        // Only another step has ended. Otherwise a later look might find no trace of this one.
                        Some(now)
                            if now.version() != shown.version() && now.version().has_claim_of(shown.version()) =>
                        {
                            shown = now;
                        }
                        now => return Ok(Some(self.overtaken(now, look))),
                    }
                }
            })
        })
        .await
    }

    /// It took effect, and the record is not as it was: either its result is stored, or it is still in doubt and
    /// visited again, or somebody has released it.
    fn overtaken(&self, shown: Option<Shown>, look: &Look<'_>) -> Visit {
        let known = shown.is_some_and(|shown| {
            let is_same_claim = shown.claimed_at == look.doubt.shown.claimed_at;
            match (shown.state, look.name) {
                (State::Completed | State::Indeterminate | State::InFlight, "") => is_same_claim,
                (_, "") => false,
                // The steps are gone, and with them whether this one was released.
                (State::Completed, _) => true,
                (_, step) => {
                    // A step that the present attempt has begun after another claim was released before.
                    let is_settled = |attempt| is_same_claim || attempt < shown.attempt;
                    shown.token == look.doubt.shown.token
                        || shown.steps.iter().any(|shown| shown.name == step && is_settled(shown.attempt))
                }
            }
        });
        if known {
            return Visit::Overtaken;
        }
        tracing::error!(
            operation = self.operation,
            token = look.doubt.shown.token,
            step = look.name,
            "an operation in doubt took effect, but was released before this was known; the effect may happen twice"
        );
        Visit::Contradicted
    }
}
