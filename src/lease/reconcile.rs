//! One visit of a reconciler: it reserves a look, asks the service's look-up, and settles what is known.

use std::fmt::Display;
use std::time::Duration;

use sqlx::{PgConnection, PgPool};

use super::finding::{Finding, InDoubt};
use super::reconciler::{Reconciler, Visit};
use crate::background::{begin_anywhere, caught};
use crate::record::{Doubt, LooksAt, Record, Writing, storable};
use crate::session::{Opening, bounded, in_pooled_transaction};
use crate::{Error, Misuse, observe};

/// The later looks are at most this power of two of the first distance apart; half of the retention comes earlier.
const MOST_DOUBLINGS: u32 = 20;

/// One reserved look.
pub(super) struct Look<'a> {
    pub(super) doubt: &'a Doubt,
    /// `""` for an operation without steps.
    pub(super) name: &'a str,
    since: f64,
    pub(super) state: LooksAt,
}

impl Reconciler {
    /// One visit, for a service that has a loop of its own: see [`run`](Self::run). It either notes operations that are
    /// newly in doubt, or looks at one.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] as [`run`](Self::run), errors of the database, [`Error::Unanswered`]. An error or a panic of
    /// `look_up` is stored with the look, and is not returned.
    ///
    /// # Cancellation
    ///
    /// As [`run`](Self::run).
    pub async fn visit_one<E, F>(&self, pool: &PgPool, look_up: F) -> Result<Visit, Error>
    where
        E: Display,
        F: AsyncFnOnce(&InDoubt) -> Result<Finding, E>,
    {
        self.check()?;
        let (deployment, retention) = (self.leasing.deployment, self.leasing.retention);
        let (mode, lease) = (self.leasing.policy.mode(), self.leasing.policy.lease());
        let mut doubts = self
            .transaction(pool, Opening::AllRows, async |conn| Doubt::all(conn, deployment, &self.operation, mode).await)
            .await?;
        let mut noted = false;
        // Before any look, because these may expire soon.
        for doubt in doubts.iter().filter(|doubt| doubt.looks.is_none()) {
            let noting =
                async |conn: &mut PgConnection| doubt.visit_first(conn, deployment, lease, self.quiet, retention).await;
            noted |= self.transaction(pool, Opening::Durable(deployment), noting).await?;
        }
        if noted {
            return Ok(Visit::Noted);
        }
        begin_anywhere(&mut doubts);
        for doubt in &doubts {
            let Some(looks) = &doubt.looks else { continue };
            for (name, at) in &looks.of {
                if at.next.is_none_or(|next| next > doubt.now) {
                    continue;
                }
                let look = Look { doubt, name, since: looks.since, state: at.clone() };
                if self.gives_up(&look) {
                    if self.give_up(pool, look).await? {
                        return Ok(Visit::GivenUp);
                    }
                } else if let Some((look, request)) = self.reserve(pool, look).await? {
                    return self.ask_and_conclude(pool, look, request, look_up).await;
                }
            }
        }
        Ok(Visit::Nothing)
    }

    pub(super) async fn transaction<R>(
        &self,
        pool: &PgPool,
        opening: Opening,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<R, Error>,
    ) -> Result<R, Error> {
        bounded(self.leasing.claim_limit(pool), in_pooled_transaction(pool, opening, work)).await
    }

    pub(super) fn gives_up(&self, look: &Look<'_>) -> bool {
        let is_over = self.time_left(look).is_some_and(|left| left.is_zero());
        !self.dry_run && (look.state.looks >= self.most_looks || is_over)
    }

    async fn give_up(&self, pool: &PgPool, look: Look<'_>) -> Result<bool, Error> {
        let state = LooksAt { given_up: true, ..look.state.clone() };
        let opening = Opening::Durable(self.leasing.deployment);
        let given_up = self
            .transaction(pool, opening, async |conn| {
                self.write(conn, &look, "given up", look.state.n, &state, None).await
            })
            .await?;
        if given_up {
            self.left_to_a_person(&Look { state, ..look });
        }
        Ok(given_up)
    }

    /// The time from a look with this state to the next. The limit of the service is not exceeded by a long distance.
    pub(super) fn next_distance(&self, look: &Look<'_>, state: &LooksAt) -> Duration {
        let longest = *Self::distances(&self.leasing).end();
        if self.dry_run {
            return self.distance.min(longest);
        }
        let doublings = 2_u32.pow(state.looks.saturating_sub(1).min(MOST_DOUBLINGS));
        let distance = self.distance.saturating_mul(doublings).min(longest);
        self.time_left(look).map_or(distance, |left| distance.min(left))
    }

    /// What is left of the time that the service gives. Zero means that it is over.
    fn time_left(&self, look: &Look<'_>) -> Option<Duration> {
        let left = look.since + self.give_up_after?.as_secs_f64() - look.doubt.now;
        // A negative time does not convert, and neither does one that is longer than a `Duration`.
        Some(if left <= 0.0 { Duration::ZERO } else { Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX) })
    }

    /// The number of a look. One of a dry run has that of the look that it tries.
    pub(super) fn number(&self, state: &LooksAt) -> u32 {
        state.looks + u32::from(self.dry_run)
    }

    /// Reserves the look: from now on no other one begins before its distance. Returns the stored request, too. `None`
    /// means that another reconciler or a decision was faster.
    async fn reserve<'a>(&self, pool: &PgPool, look: Look<'a>) -> Result<Option<(Look<'a>, Vec<u8>)>, Error> {
        let before = &look.state;
        let state = LooksAt {
            n: before.n + 1,
            looks: before.looks + u32::from(!self.dry_run),
            // If nobody knows what the last look was told, it may have been that it took effect.
            no_trace: if before.finding.is_some() { before.no_trace } else { 0 },
            finding: None,
            error: None,
            ..before.clone()
        };
        let after = self.next_distance(&look, &state).max(self.time_out);
        let opening = Opening::Durable(self.leasing.deployment);
        let request = self
            .transaction(pool, opening, async |conn| {
                if !self.write(conn, &look, &self.number(&state).to_string(), before.n, &state, Some(after)).await? {
                    return Ok(None);
                }
                self.record(look.doubt).request(conn, look.doubt.shown.token).await
            })
            .await?;
        Ok(request.map(|request| (Look { state, ..look }, request)))
    }

    async fn ask_and_conclude<E, F>(
        &self,
        pool: &PgPool,
        mut look: Look<'_>,
        request: Vec<u8>,
        look_up: F,
    ) -> Result<Visit, Error>
    where
        E: Display,
        F: AsyncFnOnce(&InDoubt) -> Result<Finding, E>,
    {
        let doubt = look.doubt;
        let asked = InDoubt {
            key: doubt.shown.key.clone(),
            downstream_key: doubt.shown.downstream(look.name),
            step: (!look.name.is_empty()).then(|| look.name.to_owned()),
            attempt: doubt.shown.attempt,
            claimed_at: doubt.shown.claimed_at,
            request,
            look: self.number(&look.state),
        };
        let answer = tokio::time::timeout(self.time_out, caught(look_up(&asked))).await;
        if !matches!(answer, Ok(Ok(Err(_) | Ok(Finding::NoTrace)))) {
            // It may have been told that it took effect. So the looks without a trace are counted anew.
            look.state.no_trace = 0;
        }
        let found = match answer {
            Ok(Ok(Ok(finding))) => Ok(finding),
            // The alternate form (`#`), because with it anyhow prints the causes too.
            Ok(Ok(Err(error))) => Err(format!("{error:#}")),
            Ok(Err(_)) => Err("the look-up panicked".to_owned()),
            Err(_) => Err(format!("the look-up took longer than {:?}", self.time_out)),
        };
        let said = found.as_ref().map_or("failed", Finding::as_str);
        observe::looked(&self.operation, said);
        look.state.finding = Some(said.to_owned());
        if self.dry_run {
            tracing::info!(
                operation = self.operation,
                token = doubt.shown.token,
                step = look.name,
                finding = said,
                "dry run"
            );
        }
        let visit = match found {
            Ok(Finding::TookEffect(answer)) => {
                look.state.took_effect = true;
                match if self.dry_run { Ok(None) } else { self.store(pool, &look, &answer).await } {
                    Ok(None) => self.conclude(pool, look).await?,
                    Ok(Some(visit)) => visit,
                    // It cannot be stored, now or later.
                    Err(error @ (Error::Misuse(Misuse::Step { .. }) | Error::Unencodable { .. })) => {
                        look.state.error = Some(storable(&error.to_string()));
                        self.conclude(pool, look).await?
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(Finding::NoTrace) => {
                look.state.no_trace += u32::from(!self.dry_run && !look.state.took_effect);
                self.conclude(pool, look).await?
            }
            Ok(Finding::Unknown) => self.conclude(pool, look).await?,
            Err(error) => {
                tracing::warn!(operation = self.operation, error, "a look-up failed, and the next one comes later");
                look.state.error = Some(storable(&error));
                self.conclude(pool, look).await?
            }
        };
        if visit != Visit::GivenUp {
            observe::reconciled(&self.operation, visit.as_str());
        }
        Ok(visit)
    }

    pub(super) async fn write(
        &self,
        conn: &mut PgConnection,
        look: &Look<'_>,
        number: &str,
        n: u32,
        state: &LooksAt,
        after: Option<Duration>,
    ) -> Result<bool, Error> {
        let writing = Writing { name: look.name, n, number, look: state, after, retention: self.leasing.retention };
        look.doubt.write_look(conn, self.leasing.deployment, writing).await
    }

    pub(super) fn record<'d>(&self, doubt: &'d Doubt) -> Record<'d> {
        Record { key: &doubt.shown.key, deployment: self.leasing.deployment }
    }

    pub(super) fn left_to_a_person(&self, look: &Look<'_>) {
        observe::reconciled(&self.operation, Visit::GivenUp.as_str());
        tracing::error!(
            operation = self.operation,
            token = look.doubt.shown.token,
            step = look.name,
            looks = look.state.looks,
            error = look.state.error,
            "an operation in doubt could not be settled, and is left to a person"
        );
    }
}
