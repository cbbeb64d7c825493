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

use chrono::{DateTime, Utc};
use sqlx::{Connection as _, PgConnection};

use crate::claim::RETRY_AFTER;
use crate::claim::{Claimed, Patience, claim};
use crate::limits::{RETENTION, WAIT, in_flight_within, within};
use crate::observe::{call_span, outcome_of, spanned};
use crate::record::{Awaited, MarkBatch, Record, Seen, Terms, wait_for_row};
use crate::{Deployment, Error, InFlight, InvalidDuration, Key, Mode, observe};

/// Keys per statement. From 100 to 1000 the throughput still grows by a third, and past that by nothing; a thousand rows are
/// locked within milliseconds.
const BATCH: usize = 1000;

/// Up to how many keys a batch takes an advisory lock for each. A thousand in one transaction are no trouble for the server
/// either, but a thousand each of many transactions are: its lock table has some 34 000 places at 300 connections.
const MOST_LOCKS: usize = 100;

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
    in_flight: Option<InFlight>,
    deployment: Deployment,
}

/// Marks a key, in the caller's transaction, for `window`; waits up to 5 seconds, and at most half the window, for another transaction
/// that is marking it.
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
    /// Marks that last for `window`, counted from the mark by the database's clock, whether or not a sweep comes by. Make it
    /// longer than the transaction that marks and processes: a mark whose window ends before its transaction does is expired as
    /// soon as others can see it.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] under a millisecond or over ten years.
    pub const fn new(window: Duration) -> Result<Self, InvalidDuration> {
        match within("window", window, RETENTION) {
            Ok(window) => Ok(Self { window, in_flight: None, deployment: Deployment::new() }),
            Err(invalid) => Err(invalid),
        }
    }

    /// What to do about a mark whose transaction is still open. The default is to wait for 5 seconds, or half the window where
    /// that is shorter. A wait that is not shorter than the window is [`Error::InvalidDuration`] when a call is made.
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
        Ok(Self { in_flight: Some(in_flight), ..self })
    }

    /// How the database is reached: behind a pooler, for one.
    #[must_use]
    pub const fn with_deployment(self, deployment: Deployment) -> Self {
        Self { deployment, ..self }
    }

    /// Marks a key: one statement for the first, two for a duplicate.
    ///
    /// # Errors
    ///
    /// - [`Error::NotInTransaction`]: the connection is in autocommit, where the mark would commit without the processing.
    /// - [`Error::InFlight`]: another transaction is marking it, and did not end in time. This transaction is still usable.
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
            in_flight: in_flight_within(self.in_flight, self.window)?,
            lease: None,
            max_attempts: None,
        };
        match claim(conn, Record { key, deployment: self.deployment }, &terms).await? {
            Claimed::Won(_) => {
                observe::outcome(Mode::Mark, key.operation(), observe::PERFORMED);
                Ok(Marked::First)
            }
            Claimed::Replayed(_) => Ok(Marked::Duplicate),
        }
    }

    /// Marks any number of keys, a thousand in one statement, and looks at those that were not new in a second one. The
    /// result has a place for each key. Of a key that the input contains twice, the first place may be [`Marked::First`] and
    /// the others are [`Marked::Duplicate`]. Without keys nothing is sent.
    ///
    /// The whole input is sorted, without moving it, so that overlapping batches of many consumers queue instead of
    /// deadlocking. Beyond input and result that takes at most 16 bytes for each key.
    ///
    /// **Up to a hundred different keys** the wait is bounded and leaves the transaction usable, as it does for a single
    /// [`mark`](Self::mark). **Beyond a hundred**, advisory locks would fill the server's lock table, so a batch takes none:
    /// - it waits for another transaction that is marking one of its keys as long as the session's `lock_timeout` allows, also
    ///   under [`InFlight::Reject`]; when that expires, the transaction is aborted (SQLSTATE 55P03);
    /// - a call of any kind that claims one of its keys waits for the batch's transaction in the same way;
    /// - a batch with new and with expired keys may deadlock with others, which is [`Error::Retryable`].
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
        self.mark_open(conn, keys, &mut open, &mut marked).await?;
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

    /// Marks the keys at these places, which are in order and different, and removes those that are settled. What is left is
    /// in flight.
    async fn mark_open(
        self,
        conn: &mut PgConnection,
        keys: &[Key],
        open: &mut Vec<usize>,
        marked: &mut [Marked],
    ) -> Result<(), Error> {
        if open.is_empty() {
            return Ok(());
        }
        let locks = open.len() <= MOST_LOCKS;
        let mut patience = Patience::of(in_flight_within(self.in_flight, self.window)?);
        let mut asked = None;
        // Counted are the rounds that followed no wait: others were committing, purging or taking over at that moment.
        let mut rounds = 0;
        while rounds < ROUNDS {
            rounds += 1;
            let held = match locks {
                true => self.claim_in_order(conn, keys, open, marked, asked).await?,
                false => self.claim_at_once(conn, keys, open, marked).await?,
            };
            if open.is_empty() {
                return Ok(());
            }
            let expired = self.look(conn, keys, open, &mut asked).await?;
            if !locks {
                // After all fresh keys, so that no batch that waits for a fresh key has an expired one.
                for places in expired.chunks(BATCH) {
                    for at in self.batch(keys, places).take_over(conn, asked).await? {
                        marked[places[at]] = Marked::First;
                    }
                }
                open.retain(|&place| marked[place] == Marked::Duplicate);
            }
            if open.is_empty() {
                return Ok(());
            }
            // What is neither held nor settled is expired, and its row locked; or it is asked for again at once.
            let held = held.filter(|held| open.contains(held));
            let Some(left) = patience.left() else {
                match held {
                    Some(_) => return Ok(()),
                    None => continue,
                }
            };
            let Some(held) = held else {
                if !expired.is_empty() {
                    wait_for_row(conn, self.deployment).await?;
                    rounds = 0;
                }
                continue;
            };
            let record = Record { key: &keys[held], deployment: self.deployment };
            if let Awaited::TimedOut = record.await_key(conn, left, asked).await? {
                // Once more: the owner may have ended at this moment.
                patience.end();
            }
            rounds = 0;
        }
        Ok(())
    }

    async fn claim_in_order(
        self,
        conn: &mut PgConnection,
        keys: &[Key],
        open: &mut Vec<usize>,
        marked: &mut [Marked],
        asked: Option<DateTime<Utc>>,
    ) -> Result<Option<usize>, Error> {
        let places = open.clone();
        let claims = self.batch(keys, &places).claim_in_order(conn, asked).await?;
        claims.won.iter().for_each(|&at| marked[places[at]] = Marked::First);
        open.retain(|&place| marked[place] == Marked::Duplicate);
        Ok(claims.held.map(|at| places[at]))
    }

    async fn claim_at_once(
        self,
        conn: &mut PgConnection,
        keys: &[Key],
        open: &mut Vec<usize>,
        marked: &mut [Marked],
    ) -> Result<Option<usize>, Error> {
        for places in open.chunks(BATCH) {
            for at in self.batch(keys, places).claim_at_once(conn).await? {
                marked[places[at]] = Marked::First;
            }
        }
        open.retain(|&place| marked[place] == Marked::Duplicate);
        Ok(None)
    }

    /// Removes the keys with a live mark; gives those with an expired record.
    async fn look(
        self,
        conn: &mut PgConnection,
        keys: &[Key],
        open: &mut Vec<usize>,
        asked: &mut Option<DateTime<Utc>>,
    ) -> Result<Vec<usize>, Error> {
        let (mut expired, mut left) = (Vec::new(), Vec::new());
        for places in open.chunks(BATCH) {
            let (first_asked, seen) = self.batch(keys, places).look(conn, *asked).await?;
            *asked = first_asked;
            for (&place, seen) in places.iter().zip(seen) {
                match seen {
                    Seen::Live(Mode::Mark) => continue,
                    Seen::Live(stored) => {
                        return Err(Error::OtherMode { key: keys[place].clone(), stored, asked: Mode::Mark });
                    }
                    Seen::Expired => expired.push(place),
                    Seen::Nothing => {}
                }
                left.push(place);
            }
        }
        *open = left;
        Ok(expired)
    }

    fn batch<'k>(self, keys: &'k [Key], places: &'k [usize]) -> MarkBatch<'k> {
        MarkBatch::new(places.iter().map(|&place| &keys[place]), self.window, self.deployment)
    }
}
