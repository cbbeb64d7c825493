//! Mark mode: "have I seen this before?", in the consumer's own transaction, as cheaply as it can be.
//!
//! For webhooks, event consumers, nonces, mutation back-stops: the first to mark a key sees [`Marked::First`], everybody else
//! [`Marked::Duplicate`], and nothing else is stored. The mark is part of the caller's transaction: process the event in the
//! same one, and both commit, or neither does.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use pg_idempotency::dedup::{Marked, mark};
//! use pg_idempotency::{Error, Key};
//!
//! # async fn deliver(pool: sqlx::PgPool, event_id: &str) -> Result<(), Error> {
//! let key = Key::new("stripe", "event", event_id)?;
//! let mut tx = pool.begin().await?;
//! if mark(&mut tx, &key, Duration::from_secs(7 * 24 * 3600)).await? == Marked::First {
//!     sqlx::query("insert into …").execute(&mut *tx).await?;
//! }
//! pg_idempotency::commit(tx).await?; // and only now tell the sender that the event has arrived
//! # Ok(())
//! # }
//! ```
//!
//! # Duplicate, or in flight?
//!
//! These are two answers, because two different things are to be done:
//!
//! - [`Marked::Duplicate`]: the first one's transaction **has committed**. Do not process; acknowledge to the sender.
//! - [`Error::InFlight`]: the first one's transaction **is open**, and may still roll back. Nothing is known; do not
//!   acknowledge. Have it delivered again.
//!
//! An uncommitted mark is never taken for a duplicate: by default its transaction is waited for, and if that rolls back, the
//! one who waited is the first.
//!
//! # What the mark cannot see
//!
//! It is made before the processing, and nothing is written after it: so it cannot notice what becomes of the transaction.
//! A SQL error that the processing swallows has aborted it, and then `tx.commit()` says `Ok` and saves nothing; a COMMIT, a
//! ROLLBACK, or a nested `conn.begin()` whose future is dropped while it waits (sqlx 0.9 then rolls back the *outer*
//! transaction) leave the rest in autocommit, without the mark. [`commit`](crate::commit()) is an error in all of these cases;
//! so commit by it, before anything is acknowledged. One case remains: a raw COMMIT that is followed by a raw BEGIN. There
//! [`ensure_idempotent`](crate::ensure_idempotent()) helps, which ends in a fenced write.
//!
//! # Which mode?
//!
//! A mark stores no answer. If a duplicate must be given something back (the message that the first call created), that is
//! [`ensure_idempotent`](crate::ensure_idempotent()) with a short retention. If the processing has effects outside the
//! database, that is a [`lease`](crate::lease). A key belongs to one mode; asked for in another, it is
//! [`Error::OtherMode`].

use std::time::Duration;

use sqlx::{Connection as _, PgConnection};

use crate::answer::RETRY_AFTER;
use crate::claim::{Claimed, claim};
use crate::observe::{call_span, outcome_of, spanned};
use crate::options::{DEFAULT_WAIT, RETENTION, WAIT, within};
use crate::record::{MarkBatch, Record, Standing, Terms};
use crate::{Error, InFlight, InvalidDuration, Key, Mode, observe};

/// Keys per statement. From 100 to 1000 the throughput still grows by a third, and past that by nothing; a thousand rows are
/// locked within milliseconds.
const BATCH: usize = 1000;

/// How often a batch asks again for keys that others were committing or purging at that moment.
const ROUNDS: usize = 3;

/// What marking a key came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a duplicate must not be processed"]
pub enum Marked {
    /// Nobody has marked it within the window: process it, in this transaction.
    First,
    /// Somebody has, and has committed; or this transaction has, or an earlier place in the same batch. Do not process it.
    Duplicate,
}

impl Marked {
    fn outcome(self) -> &'static str {
        match self {
            Self::First => observe::PERFORMED,
            Self::Duplicate => observe::REPLAYED,
        }
    }
}

/// How keys are marked: the window, and what to do about a mark that is not committed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dedup {
    window: Duration,
    in_flight: InFlight,
    prepared: bool,
}

/// Marks a key, in the caller's transaction, for `window`; waits up to 5 seconds for another transaction that is marking it.
///
/// # Errors
///
/// As [`Dedup::mark`], and [`Error::InvalidDuration`] for a window under a millisecond or over ten years.
///
/// # Cancellation
///
/// As [`Dedup::mark`].
pub async fn mark(conn: &mut PgConnection, key: &Key, window: Duration) -> Result<Marked, Error> {
    Dedup::new(window)?.mark(conn, key).await
}

/// Marks any number of keys, in the caller's transaction, for `window`. The result has a place for each key.
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
    /// Marks that last for `window`, by the database's clock: to the millisecond, whether or not a sweep comes by.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] under a millisecond or over ten years.
    pub const fn new(window: Duration) -> Result<Self, InvalidDuration> {
        match within("window", window, RETENTION) {
            Ok(window) => Ok(Self { window, in_flight: InFlight::Wait(DEFAULT_WAIT), prepared: true }),
            Err(invalid) => Err(invalid),
        }
    }

    /// What to do about a mark whose transaction is still open.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] for a wait under a millisecond (take [`InFlight::Reject`]) or over an hour.
    pub const fn with_in_flight(self, in_flight: InFlight) -> Result<Self, InvalidDuration> {
        if let InFlight::Wait(limit) = in_flight
            && let Err(invalid) = within("wait", limit, WAIT)
        {
            return Err(invalid);
        }
        Ok(Self { in_flight, ..self })
    }

    /// As [`Idempotency::with_prepared_statements`](crate::Idempotency::with_prepared_statements).
    #[must_use]
    pub const fn with_prepared_statements(self, prepared: bool) -> Self {
        Self { prepared, ..self }
    }

    /// Marks a key: one statement for the first, two for a duplicate.
    ///
    /// # Errors
    ///
    /// - [`Error::NotInTransaction`]: the connection is in autocommit, where the mark would commit without the processing.
    /// - [`Error::InFlight`]: another transaction is marking it, and did not end in time. A wait that ran out has aborted
    ///   this transaction; [`InFlight::Reject`] leaves it usable, and where it cannot says [`Error::Retryable`].
    /// - [`Error::OtherMode`]: the key belongs to a record of another mode; [`Error::UnknownMode`] where only a newer release
    ///   knows it.
    /// - [`Error::Retryable`], [`Error::Database`], [`Error::SchemaMissing`].
    ///
    /// # Cancellation
    ///
    /// Drop the transaction together with this future: whether the mark was made is not known.
    pub async fn mark(self, conn: &mut PgConnection, key: &Key) -> Result<Marked, Error> {
        let span = call_span!("mark", Mode::Mark, key);
        spanned(span, self.mark_one(conn, key), |marked| outcome_of(marked, |marked| marked.outcome())).await
    }

    async fn mark_one(self, conn: &mut PgConnection, key: &Key) -> Result<Marked, Error> {
        if !conn.is_in_transaction() {
            return Err(Error::NotInTransaction);
        }
        let terms = Terms {
            mode: Mode::Mark,
            fingerprint: None,
            retention: self.window,
            in_flight: self.in_flight,
            lease: None,
            max_attempts: None,
        };
        match claim(conn, Record { key, prepared: self.prepared }, &terms).await? {
            Claimed::Won(_) => {
                observe::outcome(Mode::Mark, key.operation(), observe::PERFORMED);
                Ok(Marked::First)
            }
            Claimed::Replayed(_) => Ok(Marked::Duplicate),
        }
    }

    /// Marks any number of keys, a thousand in one statement, and a second one only where some of these have expired (or
    /// were being committed by another at that moment). The result has a place for each key; of a key that stands twice in
    /// the input, the first place may be [`Marked::First`] and the others are [`Marked::Duplicate`].
    ///
    /// The whole input is sorted, without moving it, so that overlapping batches of many consumers queue instead of
    /// deadlocking, the fresh keys first and then the expired ones; only keys that have to be asked for again can still
    /// cross another batch's, which is [`Error::Retryable`]. Beyond input and result that takes at most 16 bytes for each
    /// key. Nothing is asked for no keys.
    ///
    /// A batch takes no advisory locks, so [`InFlight::Reject`] cannot see an uncommitted mark before it meets it: it waits a
    /// tenth of a second there, the transaction is aborted, and the answer is [`Error::Retryable`]. A single mark under
    /// `Reject` that meets a batch's uncommitted mark fares the same.
    ///
    /// # Errors
    ///
    /// As [`mark`](Self::mark). **After any of them roll back**, also where the transaction would still work: some of the
    /// keys may have been marked, and would be duplicates for ever of events that nobody has processed.
    ///
    /// # Cancellation
    ///
    /// As [`mark`](Self::mark).
    pub async fn mark_many(self, conn: &mut PgConnection, keys: &[Key]) -> Result<Vec<Marked>, Error> {
        // Its keys may be of many operations.
        let span = tracing::debug_span!(
            target: "pg_idempotency",
            "mark_many",
            mode = Mode::Mark.as_str(),
            keys = keys.len(),
            first = tracing::field::Empty,
            outcome = tracing::field::Empty
        );
        spanned(span.clone(), self.mark_all(conn, keys), |marked| {
            outcome_of(marked, |marked| {
                let first = marked.iter().filter(|marked| **marked == Marked::First).count();
                span.record("first", first);
                if first > 0 { observe::PERFORMED } else { observe::REPLAYED }
            })
        })
        .await
    }

    async fn mark_all(self, conn: &mut PgConnection, keys: &[Key]) -> Result<Vec<Marked>, Error> {
        if !conn.is_in_transaction() {
            return Err(Error::NotInTransaction);
        }
        let mut open: Vec<usize> = (0..keys.len()).collect();
        // Of equal keys the earlier place comes first, and is the one that asks.
        open.sort_unstable_by(|&a, &b| keys[a].cmp(&keys[b]).then(a.cmp(&b)));
        open.dedup_by(|later, earlier| keys[*later] == keys[*earlier]);

        let mut marked = vec![Marked::Duplicate; keys.len()];
        for _ in 0..ROUNDS {
            if open.is_empty() {
                break;
            }
            open = self.mark_open(conn, keys, &open, &mut marked).await?;
        }
        if let Some(&place) = open.first() {
            let error = Error::InFlight { retry_after: RETRY_AFTER };
            observe::failure(Mode::Mark, keys[place].operation(), &error);
            return Err(error);
        }
        for (key, marked) in keys.iter().zip(&marked) {
            observe::outcome(Mode::Mark, key.operation(), marked.outcome());
        }
        Ok(marked)
    }

    /// Marks the keys at these places, which are in order and each there once: first those that are not there, then those
    /// that have expired, so that nobody who waits for a fresh key holds an expired one. Gives the places that have to be
    /// asked for again, in order.
    async fn mark_open(
        self,
        conn: &mut PgConnection,
        keys: &[Key],
        open: &[usize],
        marked: &mut [Marked],
    ) -> Result<Vec<usize>, Error> {
        let (mut expired, mut again) = (Vec::new(), Vec::new());
        for places in open.chunks(BATCH) {
            let mut lost = [false; BATCH];
            for (at, standing) in self.batch(keys, places).insert(conn).await? {
                lost[at] = true;
                match standing {
                    Standing::Live(Mode::Mark) => {}
                    Standing::Live(stored) => {
                        return Err(Error::OtherMode { key: keys[places[at]].clone(), stored, asked: Mode::Mark });
                    }
                    Standing::Expired => expired.push(places[at]),
                    Standing::Unseen => again.push(places[at]),
                }
            }
            for (place, _) in places.iter().zip(lost).filter(|(_, lost)| !lost) {
                marked[*place] = Marked::First;
            }
        }
        let in_order = |a: &usize, b: &usize| keys[*a].cmp(&keys[*b]);
        expired.sort_unstable_by(in_order);
        for places in expired.chunks(BATCH) {
            for at in self.batch(keys, places).take_over(conn).await? {
                marked[places[at]] = Marked::First;
            }
        }
        // Overtaken by another, or purged: the next round tells.
        again.extend(expired.into_iter().filter(|&place| marked[place] == Marked::Duplicate));
        again.sort_unstable_by(in_order);
        Ok(again)
    }

    fn batch<'k>(self, keys: &'k [Key], places: &'k [usize]) -> MarkBatch<'k> {
        MarkBatch::new(places.iter().map(|&place| &keys[place]), self.window, self.in_flight, self.prepared)
    }
}
