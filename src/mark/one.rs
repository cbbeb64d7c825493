//! Marking one key.

use std::time::{Duration, Instant};

use sqlx::{Connection as _, PgConnection};

use super::Marking;
use crate::claim::{CalledAt, Claimed, contend};
use crate::observe::{call_span, spanned};
use crate::record::{Record, Terms};
use crate::{Error, InFlight, Key, Mode, observe};

/// The answer to a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a duplicate must not be processed"]
pub enum Marked {
    /// The key was new, or its retention was over. Process the event, in this transaction.
    First,
    /// The key is marked: by a transaction that has committed, by this transaction, or by an earlier place in the same
    /// batch. Do not process the event.
    Duplicate,
}

impl Marked {
    pub(super) fn outcome(self) -> &'static str {
        match self {
            Self::First => observe::PERFORMED,
            Self::Duplicate => observe::REPLAYED,
        }
    }
}

/// Marks a key for `retention`, in the caller's transaction. Waits for another transaction that is marking it, for at
/// most 5 seconds and at most half the retention.
///
/// # Errors
///
/// As [`Marking::mark`], and [`Error::InvalidDuration`] for a retention under a millisecond or over ten years.
///
/// # Cancellation
///
/// As [`Marking::mark`].
pub async fn mark(conn: &mut PgConnection, key: &Key, retention: Duration) -> Result<Marked, Error> {
    Marking::new(retention)?.mark(conn, key).await
}

impl Marking {
    /// Marks a key. The first mark takes one statement, and a duplicate takes two.
    ///
    /// # Errors
    ///
    /// - [`Error::NotInTransaction`]: the connection is in autocommit, where the mark would commit without the
    ///   processing.
    /// - [`Error::InFlight`]: another transaction is marking the key, and did not end in time. This transaction is
    ///   still usable.
    /// - [`Error::OtherMode`]: the key belongs to another mode. [`Error::UnknownMode`]: to a mode of a newer release.
    /// - [`Error::Retryable`], [`Error::Database`], [`Error::SchemaMissing`].
    ///
    /// # Cancellation
    ///
    /// Drop the transaction together with this future: the transaction may have marked the key.
    pub async fn mark(self, conn: &mut PgConnection, key: &Key) -> Result<Marked, Error> {
        let started = Instant::now();
        let span = call_span!("mark", Mode::Mark, key);
        let outcome =
            |marked: &Result<Marked, Error>| marked.as_ref().map_or_else(Error::outcome, |marked| marked.outcome());
        let marked = async {
            if !conn.is_in_transaction() {
                return Err(Error::NotInTransaction);
            }
            self.claim_or_look(conn, key, self.in_flight, &mut CalledAt::now()).await
        };
        let marked = spanned(span, marked, outcome).await;
        observe::claimed(Mode::Mark, key.operation(), started.elapsed());
        observe::outcome(Mode::Mark, key.operation(), outcome(&marked));
        marked
    }

    pub(super) async fn claim_or_look(
        self,
        conn: &mut PgConnection,
        key: &Key,
        in_flight: Option<InFlight>,
        asked: &mut CalledAt,
    ) -> Result<Marked, Error> {
        let terms = Terms {
            mode: Mode::Mark,
            fingerprint: None,
            retention: self.retention,
            in_flight,
            lease: None,
            max_attempts: None,
        };
        let record = Record { key, deployment: self.deployment };
        Ok(match contend(conn, record, &terms, asked).await? {
            Claimed::Won(_) => Marked::First,
            Claimed::Replayed(_) => Marked::Duplicate,
        })
    }
}
