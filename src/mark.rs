//! Mark mode records in the caller's transaction that a key was seen. Marks are for webhooks, events and nonces.
//!
//! The first caller that marks a key gets [`Marked::First`], and every other caller gets [`Marked::Duplicate`]. The
//! mark is part of the caller's transaction. Process the event in the same transaction, so that the mark and the effect
//! commit together or not at all. The guide's page `events` has complete programs.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use pg_idempotency::mark::{Marked, mark};
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
//! By default, a second caller waits for the first caller's transaction. If that transaction rolls back, the second
//! caller gets [`Marked::First`]. While that transaction is open, no caller gets [`Marked::Duplicate`]. A caller that
//! has waited for its longest time gets [`Error::InFlight`]. **Do not acknowledge the event after this error**, so that
//! the sender delivers the event again.
//!
//! # What a mark cannot see
//!
//! The call writes the mark before the processing, and writes nothing after the processing. So a mark cannot detect two
//! mistakes:
//!
//! - The processing ignores an SQL error that has aborted the transaction. The `tx.commit()` after the processing
//!   returns `Ok` and saves nothing.
//! - The processing sends a COMMIT or ROLLBACK, or drops the future of a nested `conn.begin()` while that future waits.
//!   (After such a drop, sqlx 0.9 rolls back the *outer* transaction.) The rest of the processing then runs in
//!   autocommit, without the mark.
//!
//! [`commit`](crate::commit()) returns an error in these cases, except for [a few raw
//! statements](crate::commit()#what-it-cannot-see), such as a raw COMMIT followed by a raw BEGIN. So call `commit`
//! before you acknowledge anything. [`ensure_idempotent`](crate::ensure_idempotent()) detects these raw statements,
//! too, because its last write requires the claim.
//!
//! # Which mode?
//!
//! A mark stores no answer. If a duplicate needs the answer, use [`ensure_idempotent`](crate::ensure_idempotent()) with
//! a short retention. If the processing has effects outside the database, use a [`lease`](crate::lease). A key belongs
//! to one mode, so a call in another mode returns [`Error::OtherMode`].

use std::pin::pin;
use std::time::Duration;

use sqlx::{Connection as _, PgConnection};
use tracing::Instrument as _;

use crate::claim::{Claimed, RETRY_AFTER, Swallowed, contend};
use crate::limits::{Patience, RETENTION, assert_retention, assert_wait, check_wait, in_range};
use crate::observe::{call_span, counted, spanned, timed_claim};
use crate::record::{CalledAt, MarkBatch, MarkOf, Record, Terms, Tried, pause};
use crate::session::or_prepare_again;
use crate::{Error, Key, Misuse, Mode, OnDuplicate, observe};

/// The maximum number of keys in a batch. Each key holds an advisory lock until the end of the transaction. All
/// sessions of the server share one table of advisory locks.
const MOST_KEYS: usize = 100;

/// The maximum number of rounds that a batch makes in a row, without a wait between them. A further round is necessary
/// if other transactions commit or delete records of the batch's keys during a round.
const ROUNDS: usize = 3;

/// The result of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a duplicate must not be processed"]
pub enum Marked {
    /// The key was new, or its retention was over. Process the event in this transaction.
    First,
    /// The key is already marked. The mark comes from a transaction that **has committed**, from this transaction, or
    /// from an earlier position in the same batch. Do not process the event, and acknowledge it to the sender.
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

/// Marks a key for `retention`, in the caller's transaction. If another transaction is marking the key, the call waits
/// for 5 seconds, or for half the retention if that is shorter.
///
/// **The database is the name space of operations.** If two services in one database process the same events, give each
/// service an operation of its own. Otherwise each event is processed by only one of the services.
///
/// # Errors and cancellation
///
/// The errors and the effect of a cancellation are those of [`MarkOptions::mark`]. For a retention under a millisecond
/// or over ten years, the call returns [`Error::Misuse`].
pub async fn mark(conn: &mut PgConnection, key: &Key, retention: Duration) -> Result<Marked, Error> {
    in_range("retention", retention, RETENTION)?;
    MarkOptions::new(retention).mark(conn, key).await
}

/// The options of marks. The setters are `const`, so the options can be a constant of your service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkOptions {
    retention: Duration,
    on_duplicate: Option<OnDuplicate>,
    persistent: bool,
}

impl MarkOptions {
    /// Makes options for marks that last for `retention`. The retention begins with the mark, by the database's clock.
    /// Make the retention longer than the transaction that marks the key and processes the event. With a shorter
    /// retention, the mark has expired before other transactions can see the mark.
    ///
    /// # Panics
    ///
    /// Panics if the retention is under a millisecond or over ten years. In a constant, this is a compile error.
    #[must_use]
    #[track_caller]
    pub const fn new(retention: Duration) -> Self {
        assert_retention(retention);
        Self { retention, on_duplicate: None, persistent: true }
    }

    /// Sets the behaviour of a call while another transaction with a mark of the same key is open. The default is to
    /// wait for 5 seconds, or for half the retention if that is shorter.
    ///
    /// If the wait is not shorter than the retention, a call returns [`Error::Misuse`], and no SQL runs.
    ///
    /// # Panics
    ///
    /// Panics if a wait is under a millisecond or over an hour. Instead of a wait of zero, use [`OnDuplicate::Reject`].
    #[must_use]
    #[track_caller]
    pub const fn on_duplicate(self, on_duplicate: OnDuplicate) -> Self {
        assert_wait(on_duplicate);
        Self { on_duplicate: Some(on_duplicate), ..self }
    }

    /// Sets whether each connection keeps the crate's statements prepared. The default is `true`. Behind PgBouncer in
    /// transaction mode, `false` may be necessary: see [`Idempotency::persistent`](crate::Idempotency::persistent).
    #[must_use]
    pub const fn persistent(self, persistent: bool) -> Self {
        Self { persistent, ..self }
    }
}

impl MarkOptions {
    /// Marks a key. The first mark takes one statement, and a duplicate takes two statements.
    ///
    /// # Errors
    ///
    /// - [`Misuse::NotInTransaction`]: the connection is in autocommit, where the mark would commit without the
    ///   processing.
    /// - [`Error::InFlight`]: another transaction is marking the key, and did not end in time. The caller's transaction
    ///   is still usable.
    /// - [`Error::OtherMode`]: the key belongs to another mode.
    /// - [`Misuse::ClaimSwallowed`]: a trigger swallows the mark, or a policy hides it.
    /// - [`Incompatible::UnknownMode`](crate::Incompatible::UnknownMode): the key belongs to a mode of a newer release.
    /// - [`Error::Retryable`], [`Error::Database`], [`Error::SchemaMissing`].
    ///
    /// # Cancellation
    ///
    /// Drop the transaction together with this future, because the call may have marked the key.
    pub async fn mark(self, conn: &mut PgConnection, key: &Key) -> Result<Marked, Error> {
        let span = call_span!("mark", Mode::Mark, key);
        let outcome =
            |marked: &Result<Marked, Error>| marked.as_ref().map_or_else(Error::outcome, |marked| marked.outcome());
        let mark = async {
            check_wait(self.on_duplicate, self.retention)?;
            if !conn.is_in_transaction() {
                return Err(Error::Misuse(Misuse::NotInTransaction));
            }
            let terms = Terms {
                mode: Mode::Mark,
                fingerprint: None,
                retention: self.retention,
                on_duplicate: self.on_duplicate,
                lease: None,
                max_attempts: None,
            };
            let record = Record { key, persistent: self.persistent };
            let claimed = contend(conn, record, &terms, &mut CalledAt::now()).await;
            Ok(match or_prepare_again(conn, claimed).await? {
                Claimed::Won(_) => Marked::First,
                Claimed::Replayed(_) => Marked::Duplicate,
            })
        };
        let operation = key.operation();
        let mark = async { timed_claim(Mode::Mark, operation, pin!(mark)).await };
        counted(Mode::Mark, operation, pin!(mark.instrument(span)), outcome).await
    }
}

impl MarkOptions {
    /// Marks up to a hundred different keys in one statement, and returns one result for each position of the input. If
    /// a key occurs twice, only its first position may be [`Marked::First`]. Without keys, no SQL runs.
    ///
    /// If another transaction is marking one of the keys, the batch waits for that transaction, as [`mark`](Self::mark)
    /// does. The batch marks either all keys or, if one key stays in flight, no key. The section on errors describes an
    /// exception to this rule.
    ///
    /// **For more keys, make several calls**, each in a transaction of its own. Every key holds a lock until the
    /// transaction ends, and all sessions share one lock table. With PostgreSQL's defaults, a few transactions with a
    /// thousand keys each would fill this table.
    ///
    /// The batch locks its keys in sorted order, so overlapping batches and single marks queue instead of deadlocking.
    /// A deadlock is possible only between transactions that make several calls in different orders. In a deadlock, one
    /// of the calls returns [`Error::Retryable`], or [`Error::InFlight`] when its wait ends.
    ///
    /// # Errors
    ///
    /// The errors are those of [`mark`](Self::mark), and [`Misuse::TooManyKeys`] for more than a hundred different
    /// keys. **After any error, roll back**, even if the transaction is still usable. If other transactions changed
    /// several of the keys while the batch ran, a part of the batch may be marked.
    ///
    /// # Cancellation
    ///
    /// As [`mark`](Self::mark).
    pub async fn mark_many(self, conn: &mut PgConnection, keys: &[Key]) -> Result<Vec<Marked>, Error> {
        // The span has no field `operation`, because the keys may belong to many operations.
        let span = tracing::debug_span!(
            target: "pg_idempotency",
            "mark_many",
            mode = Mode::Mark.as_str(),
            keys = keys.len(),
            first = tracing::field::Empty,
            outcome = tracing::field::Empty
        );
        spanned(pin!(self.mark_or_fail(conn, keys).instrument(span.clone())), |marked| {
            marked.as_ref().map_or_else(Error::outcome, |marked| {
                let first = marked.iter().filter(|marked| **marked == Marked::First).count();
                span.record("first", first);
                if first > 0 { observe::PERFORMED } else { observe::REPLAYED }
            })
        })
        .await
    }

    async fn mark_or_fail(self, conn: &mut PgConnection, keys: &[Key]) -> Result<Vec<Marked>, Error> {
        check_wait(self.on_duplicate, self.retention)?;
        if !conn.is_in_transaction() {
            return Err(Error::Misuse(Misuse::NotInTransaction));
        }
        let mut batch = Batch::new(self, keys)?;
        let marked = batch.mark(conn).await.map_err(Error::before_the_work);
        or_prepare_again(conn, marked).await?;
        if let Some(&index) = batch.open.first() {
            let error = Error::InFlight { retry_after: RETRY_AFTER };
            observe::outcome(Mode::Mark, keys[index].operation(), error.outcome());
            return Err(error);
        }
        for (key, marked) in keys.iter().zip(&batch.marked) {
            observe::outcome(Mode::Mark, key.operation(), marked.outcome());
        }
        Ok(batch.marked)
    }
}

struct Batch<'k> {
    options: MarkOptions,
    keys: &'k [Key],
    /// The indices of the undecided keys. The indices are in the order of the keys, and each key occurs once.
    open: Vec<usize>,
    marked: Vec<Marked>,
}

impl<'k> Batch<'k> {
    fn new(options: MarkOptions, keys: &'k [Key]) -> Result<Self, Error> {
        let mut open: Vec<usize> = (0..keys.len()).collect();
        // Among equal keys, only the first one stays open.
        open.sort_unstable_by(|&a, &b| keys[a].cmp(&keys[b]).then(a.cmp(&b)));
        open.dedup_by(|later, earlier| keys[*later] == keys[*earlier]);
        if open.len() > MOST_KEYS {
            return Err(Error::Misuse(Misuse::TooManyKeys { keys: open.len() }));
        }
        Ok(Self { options, keys, open, marked: vec![Marked::Duplicate; keys.len()] })
    }

    /// Marks the keys. A key that this function leaves in the field `open` is in flight.
    async fn mark(&mut self, conn: &mut PgConnection) -> Result<(), Error> {
        let persistent = self.options.persistent;
        let mut patience = Patience::of(self.options.on_duplicate, self.options.retention);
        let mut asked = CalledAt::now();
        let mut swallowed = Swallowed::default();
        let mut rounds = 0;
        while rounds < ROUNDS && !self.open.is_empty() {
            rounds += 1;
            let keys = self.open.iter().map(|&index| &self.keys[index]).collect();
            let batch = MarkBatch { keys, retention: self.options.retention, persistent };
            let marked = batch.mark(conn, &mut asked).await?;
            let obstacle = self.close(&marked)?;
            match obstacle {
                Some(_) => swallowed.forget(),
                // The batch has the lock of each open key, and has marked none of them.
                None if !self.open.is_empty() => swallowed.found_free(None)?,
                None => {}
            }
            match (obstacle, patience.left()) {
                (Some((_, MarkOf::Held)), None) => return Ok(()),
                (Some((index, MarkOf::Held)), Some(left)) => {
                    let record = Record { key: &self.keys[index], persistent };
                    if let Tried::Held = record.await_key(conn, left, &asked, Mode::Mark).await? {
                        // The batch tries one more round, because the owner may have ended just now.
                        patience.end();
                    }
                }
                (Some(_), Some(_)) => pause(conn, persistent).await?,
                // The next round begins at once. If a row is locked, the transaction with the lock ends soon. If no key
                // has an obstacle, the records of the open keys changed a moment ago.
                (Some(_) | None, _) => continue,
            }
            rounds = 0;
        }
        Ok(())
    }

    /// Closes the decided keys. An undecided key has an obstacle if another transaction holds the key, or has locked
    /// the row of the key's expired record. Returns the index of the last key that has an obstacle, and which of the
    /// two obstacles it is.
    fn close(&mut self, decided: &[MarkOf]) -> Result<Option<(usize, MarkOf)>, Error> {
        let mut obstacle = None;
        let mut open = Vec::new();
        for (&index, decided) in self.open.iter().zip(decided) {
            match *decided {
                MarkOf::First => {
                    self.marked[index] = Marked::First;
                    continue;
                }
                MarkOf::Live(Mode::Mark) => continue,
                MarkOf::Live(stored) => {
                    return Err(Error::OtherMode { key: self.keys[index].clone(), stored, asked: Mode::Mark });
                }
                held_or_locked @ (MarkOf::Held | MarkOf::Locked) => obstacle = Some((index, held_or_locked)),
                MarkOf::Open => {}
            }
            open.push(index);
        }
        self.open = open;
        Ok(obstacle)
    }
}
