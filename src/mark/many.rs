//! Marking many keys.

use sqlx::{Connection as _, PgConnection};

use super::{Marked, Marking};
use crate::claim::{CalledAt, RETRY_AFTER};
use crate::limits::Patience;
use crate::observe::spanned;
use crate::record::{Awaited, MarkBatch, MarkOf, Record, draw_token, wait_for_row};
use crate::session::Savepoint;
use crate::{Error, InFlight, Key, Mode, observe};

/// The most keys of a batch. Each takes an advisory lock until the end of the transaction, in the server's lock table,
/// which all sessions share.
const MOST_KEYS: usize = 100;

/// How often a batch asks again without waiting, if other transactions were committing or deleting the records of its
/// keys at that moment.
const ROUNDS: usize = 3;

impl Marking {
    /// Marks up to a hundred different keys in one statement. The result has one place for each key. If the input
    /// contains a key twice, the first place may be [`Marked::First`], and the others are [`Marked::Duplicate`].
    /// Without keys it sends nothing.
    ///
    /// If another transaction is marking one of the keys, the batch waits for it, as a single [`mark`](Self::mark)
    /// does. It marks all keys or, if one is held, none; *Errors* names the exception.
    ///
    /// **More keys are several calls**, each in a transaction of its own. Every key holds a lock until the transaction
    /// ends, and all sessions share the server's lock table: at PostgreSQL's defaults, a few transactions with a
    /// thousand keys each would fill it.
    ///
    /// The batch takes its keys in their own order, so that overlapping batches and single marks queue. They deadlock
    /// only if one transaction takes keys in another order than the next does, in several calls. Then one of them
    /// returns [`Error::Retryable`], or [`Error::InFlight`] when its wait ends.
    ///
    /// On a [distributed](crate::Deployment::with_distributed) table, it marks one key after the other, so a batch
    /// saves no time there. A batch of one scope is one shard and one COMMIT; a batch of many scopes commits in two
    /// phases.
    ///
    /// # Errors
    ///
    /// As [`mark`](Self::mark), and [`Error::TooManyKeys`] for more than a hundred different keys. **After any error
    /// roll back**, even if the transaction is still usable: if other transactions changed several of the keys while
    /// the batch ran, a part of it may be marked.
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
            marked.as_ref().map_or_else(Error::outcome, |marked| {
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
        let mut batch = Batch::new(self, keys)?;
        batch.mark(conn).await?;
        if let Some(&place) = batch.open.first() {
            let error = Error::InFlight { retry_after: RETRY_AFTER };
            observe::outcome(Mode::Mark, keys[place].operation(), error.outcome());
            return Err(error);
        }
        for (key, marked) in keys.iter().zip(&batch.marked) {
            observe::outcome(Mode::Mark, key.operation(), marked.outcome());
        }
        Ok(batch.marked)
    }
}

/// A batch under way.
struct Batch<'k> {
    options: Marking,
    keys: &'k [Key],
    /// The places of the keys that are neither marked nor found marked: in the order of the keys, each key once.
    open: Vec<usize>,
    marked: Vec<Marked>,
}

impl<'k> Batch<'k> {
    fn new(options: Marking, keys: &'k [Key]) -> Result<Self, Error> {
        let mut open: Vec<usize> = (0..keys.len()).collect();
        // Among equal keys, only the first place stays open.
        open.sort_unstable_by(|&a, &b| keys[a].cmp(&keys[b]).then(a.cmp(&b)));
        open.dedup_by(|later, earlier| keys[*later] == keys[*earlier]);
        if open.len() > MOST_KEYS {
            return Err(Error::TooManyKeys { keys: open.len() });
        }
        Ok(Self { options, keys, open, marked: vec![Marked::Duplicate; keys.len()] })
    }

    /// Marks the keys. Those that stay open are in flight.
    async fn mark(&mut self, conn: &mut PgConnection) -> Result<(), Error> {
        let deployment = self.options.deployment;
        let mut patience = Patience::of(self.options.in_flight, self.options.retention);
        if deployment.distributed {
            return self.mark_one_by_one(conn, &patience).await;
        }
        let mut asked = None;
        let mut rounds = 0;
        while rounds < ROUNDS && !self.open.is_empty() {
            rounds += 1;
            let keys = self.open.iter().map(|&place| &self.keys[place]).collect();
            let batch = MarkBatch { keys, retention: self.options.retention, deployment };
            let marked = batch.mark(conn, asked).await?;
            asked = Some(marked.asked);
            match (self.close(&marked.keys)?, patience.left()) {
                (Some((_, MarkOf::Held)), None) => return Ok(()),
                (Some((place, MarkOf::Held)), Some(left)) => {
                    let record = Record { key: &self.keys[place], deployment };
                    if let Awaited::TimedOut = record.await_key(conn, left, asked, Mode::Mark).await? {
                        // One more round, because the owner may have ended at this moment.
                        patience.end();
                    }
                }
                (Some(_), Some(_)) => wait_for_row(conn, deployment).await?,
                // The transaction that has locked the row ends soon, and the records changed a moment ago.
                (Some(_) | None, _) => continue,
            }
            rounds = 0;
        }
        Ok(())
    }

    /// For a distributed table, where one statement cannot look, lock and write. The wait of the whole batch has the
    /// limit of a single mark. The savepoint makes the batch all or nothing, as the one statement does: without it, a
    /// caller that goes on after *in flight* would commit marks of events that nobody has processed.
    async fn mark_one_by_one(&mut self, conn: &mut PgConnection, patience: &Patience) -> Result<(), Error> {
        let mut asked = CalledAt::now();
        let savepoint = Savepoint::set(conn, draw_token()?).await?;
        for place in self.open.clone() {
            let in_flight = patience.left().map_or(InFlight::Reject, InFlight::Wait);
            match self.options.claim_or_look(conn, &self.keys[place], Some(in_flight), &mut asked).await {
                Ok(marked) => self.marked[place] = marked,
                Err(error) => {
                    let undone = savepoint.undo(conn).await;
                    // The caller needs the first error. After a failed undo the transaction is aborted.
                    return if matches!(error, Error::InFlight { .. }) { undone } else { Err(error) };
                }
            }
        }
        self.open.clear();
        savepoint.release(conn).await
    }

    /// Closes the keys that are decided, and returns what is in the way of the others, with its place: a key that is
    /// held, or an expired record whose row is locked.
    fn close(&mut self, decided: &[MarkOf]) -> Result<Option<(usize, MarkOf)>, Error> {
        let mut obstacle = None;
        let mut open = Vec::new();
        for (&place, decided) in self.open.iter().zip(decided) {
            match *decided {
                MarkOf::First => {
                    self.marked[place] = Marked::First;
                    continue;
                }
                MarkOf::Live(Mode::Mark) => continue,
                MarkOf::Live(stored) => {
                    return Err(Error::OtherMode { key: self.keys[place].clone(), stored, asked: Mode::Mark });
                }
                held_or_locked @ (MarkOf::Held | MarkOf::Locked) => obstacle = Some((place, held_or_locked)),
                MarkOf::Open => {}
            }
            open.push(place);
        }
        self.open = open;
        Ok(obstacle)
    }
}
