//! Marking many keys.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::{Connection as _, PgConnection};

use super::{Dedup, Marked};
use crate::claim::RETRY_AFTER;
use crate::limits::Patience;
use crate::observe::{outcome_of, spanned};
use crate::record::{Awaited, MarkBatch, Record, Seen, wait_for_row};
use crate::{Error, Key, Mode, observe};

/// Keys per statement. Larger statements would hardly be faster for each key, and would hold their locks for longer.
const BATCH: usize = 1000;

/// The largest batch that takes an advisory lock for each key. The server's lock table has some 34,000 places at 300
/// connections: many transactions with a thousand locks each would fill it.
const MOST_LOCKS: usize = 100;

/// How often a batch asks again without waiting and without an answer for one more key, if other transactions were
/// committing or deleting the records of its keys at that moment.
const ROUNDS: usize = 3;

/// Marks any number of keys for `window`, in the caller's transaction. The result has one place for each key.
///
/// # Errors
///
/// As [`Dedup::mark_many`], and [`Error::InvalidDuration`] for a window under a millisecond or over ten years.
///
/// # Cancellation
///
/// As [`Dedup::mark`].
pub async fn mark_many(conn: &mut PgConnection, keys: &[Key], window: Duration) -> Result<Vec<Marked>, Error> {
    Dedup::new(window)?.mark_many(conn, keys).await
}

impl Dedup {
    /// Marks any number of keys: a thousand in one statement, and a second statement for those that were not new. The
    /// result has one place for each key. If the input contains a key twice, the first place may be [`Marked::First`],
    /// and the others are [`Marked::Duplicate`]. Without keys it sends nothing.
    ///
    /// The keys are marked in their own order, so that overlapping batches of many consumers queue instead of
    /// deadlocking. Beyond input and result this takes at most 24 bytes for each key.
    ///
    /// **Up to a hundred different keys**, the wait is bounded and leaves the transaction usable, as for a single
    /// [`mark`](Self::mark). **Above a hundred**, a batch takes no advisory locks, because these would fill the
    /// server's lock table. Then:
    /// - If another transaction is marking one of the keys, the batch waits for it, for as long as the session's
    ///   `lock_timeout` allows, also under [`InFlight::Reject`](crate::InFlight::Reject). If that time-out expires, the
    ///   transaction is aborted (SQLSTATE 55P03).
    /// - Every other call that claims one of its keys waits for the batch's transaction in the same way.
    /// - A batch with new and with expired keys may deadlock with others. Then the call returns [`Error::Retryable`].
    ///
    /// On a [distributed](crate::Deployment::with_distributed) table, a batch takes a few statements more. Citus
    /// inserts into several shards at once, so overlapping batches of more than a hundred keys may deadlock there
    /// without expired keys too. If such a batch and a smaller one have the same expired keys, they may wait for each
    /// other, until the wait of the smaller one ends with [`Error::InFlight`]. A batch of one scope is one shard and
    /// one COMMIT; a batch of many scopes commits in two phases.
    ///
    /// # Errors
    ///
    /// As [`mark`](Self::mark). **After any error roll back**, even if the transaction is still usable. Otherwise some
    /// keys may stay marked, and their events would be duplicates that nobody has processed.
    ///
    /// # Cancellation
    ///
    /// As [`mark`](Self::mark).
    pub async fn mark_many(self, conn: &mut PgConnection, keys: &[Key]) -> Result<Vec<Marked>, Error> {
        // No `operation`, because the keys may be of many operations.
        let span = tracing::debug_span!(
            target: "pg_idempotency",
            "mark_many",
            mode = Mode::Mark.as_str(),
            keys = keys.len(),
            first = tracing::field::Empty,
            outcome = tracing::field::Empty
        );
        spanned(span.clone(), self.mark_or_fail(conn, keys), |marked| {
            outcome_of(marked, |marked| {
                let first = marked.iter().filter(|marked| **marked == Marked::First).count();
                span.record("first", first);
                if first > 0 { observe::PERFORMED } else { observe::REPLAYED }
            })
        })
        .await
    }

    async fn mark_or_fail(self, conn: &mut PgConnection, keys: &[Key]) -> Result<Vec<Marked>, Error> {
        if !conn.is_in_transaction() {
            return Err(Error::NotInTransaction);
        }
        let mut marking = Marking::new(self, keys);
        marking.run(conn).await?;
        if let Some(&place) = marking.open.first() {
            let error = Error::InFlight { retry_after: RETRY_AFTER };
            observe::failure(Mode::Mark, keys[place].operation(), &error);
            return Err(error);
        }
        for (key, marked) in keys.iter().zip(&marking.marked) {
            observe::outcome(Mode::Mark, key.operation(), marked.outcome());
        }
        Ok(marking.marked)
    }
}

/// A batch under way.
struct Marking<'k> {
    options: Dedup,
    keys: &'k [Key],
    /// The places of the keys that are neither marked nor found marked: in the order of the keys, each key once.
    open: Vec<usize>,
    marked: Vec<Marked>,
    /// The time of the first look.
    asked: Option<DateTime<Utc>>,
}

impl<'k> Marking<'k> {
    fn new(options: Dedup, keys: &'k [Key]) -> Self {
        let mut open: Vec<usize> = (0..keys.len()).collect();
        // Among equal keys, only the first place stays open.
        open.sort_unstable_by(|&a, &b| keys[a].cmp(&keys[b]).then(a.cmp(&b)));
        open.dedup_by(|later, earlier| keys[*later] == keys[*earlier]);
        Self { options, keys, open, marked: vec![Marked::Duplicate; keys.len()], asked: None }
    }

    /// Marks as many keys as possible. The keys that stay open are in flight.
    async fn run(&mut self, conn: &mut PgConnection) -> Result<(), Error> {
        if self.open.is_empty() {
            return Ok(());
        }
        let locks = self.open.len() <= MOST_LOCKS;
        let deployment = self.options.deployment;
        let mut patience = Patience::of(self.options.in_flight()?);
        let mut rounds = 0;
        while rounds < ROUNDS {
            rounds += 1;
            let before = self.open.len();
            let held = if locks { self.claim_in_order(conn).await? } else { self.claim_at_once(conn).await? };
            if self.open.is_empty() {
                return Ok(());
            }
            let expired = self.look(conn).await?;
            if !locks {
                self.take_over(conn, &expired).await?;
            }
            if self.open.is_empty() {
                return Ok(());
            }
            if self.open.len() < before {
                rounds = 0;
            }
            // An open key that no transaction holds has an expired record with a locked row, or it is new again.
            let held = held.filter(|held| self.open.contains(held));
            match (held, patience.left()) {
                (Some(_), None) => return Ok(()),
                (None, None) => continue,
                (None, Some(_)) if expired.is_empty() => continue,
                (None, Some(_)) => wait_for_row(conn, deployment).await?,
                (Some(held), Some(left)) => {
                    let record = Record { key: &self.keys[held], deployment };
                    if let Awaited::TimedOut = record.await_key(conn, left, self.asked).await? {
                        // One more round, because the owner may have ended at this moment.
                        patience.end();
                    }
                }
            }
            rounds = 0;
        }
        Ok(())
    }

    /// Marks the keys in their order. Stops at the first key that an open transaction holds, and returns its place.
    /// Also stops at the first expired row that is locked, and returns `None`.
    async fn claim_in_order(&mut self, conn: &mut PgConnection) -> Result<Option<usize>, Error> {
        let claims = self.batch(&self.open).claim_in_order(conn, self.asked).await?;
        let held = claims.held.map(|at| self.open[at]);
        claims.won.iter().for_each(|&at| self.marked[self.open[at]] = Marked::First);
        self.close_marked();
        Ok(held)
    }

    /// Marks the new keys, and waits for other transactions that are marking one of them. After that no transaction
    /// holds one of the keys.
    async fn claim_at_once(&mut self, conn: &mut PgConnection) -> Result<Option<usize>, Error> {
        for places in self.open.chunks(BATCH) {
            for at in self.batch(places).claim_at_once(conn).await? {
                self.marked[places[at]] = Marked::First;
            }
        }
        self.close_marked();
        Ok(None)
    }

    /// Marks keys with an expired record. This comes after all new keys: a batch that waits for a new key must not have
    /// locked an expired record.
    async fn take_over(&mut self, conn: &mut PgConnection, expired: &[usize]) -> Result<(), Error> {
        for places in expired.chunks(BATCH) {
            for at in self.batch(places).take_over(conn, self.asked).await? {
                self.marked[places[at]] = Marked::First;
            }
        }
        self.close_marked();
        Ok(())
    }

    /// Closes the keys that are marked already, and returns those with an expired record.
    async fn look(&mut self, conn: &mut PgConnection) -> Result<Vec<usize>, Error> {
        let (mut expired, mut open) = (Vec::new(), Vec::new());
        for places in self.open.chunks(BATCH) {
            let (asked, seen) = self.batch(places).look(conn, self.asked).await?;
            self.asked = asked;
            for (&place, seen) in places.iter().zip(seen) {
                match seen {
                    Seen::Live(Mode::Mark) => continue,
                    Seen::Live(stored) => {
                        return Err(Error::OtherMode { key: self.keys[place].clone(), stored, asked: Mode::Mark });
                    }
                    Seen::Expired => expired.push(place),
                    Seen::Nothing => {}
                }
                open.push(place);
            }
        }
        self.open = open;
        Ok(expired)
    }

    fn close_marked(&mut self) {
        self.open.retain(|&place| self.marked[place] == Marked::Duplicate);
    }

    fn batch(&self, places: &[usize]) -> MarkBatch<'k> {
        MarkBatch::new(places.iter().map(|&place| &self.keys[place]), self.options.window, self.options.deployment)
    }
}
