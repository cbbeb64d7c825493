//! Mark mode: "have I seen this before?", in the consumer's own transaction.
//!
//! For webhooks, event consumers and nonces, and as the last check before a change (a *mutation back-stop*). The first
//! caller that marks a key sees [`Marked::First`], every other caller sees [`Marked::Duplicate`], and nothing else is
//! stored. The mark is part of the caller's transaction. Process the event in the same transaction: then both commit,
//! or neither does.
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
//! # Duplicate, or in flight?
//!
//! There are two answers, because the caller has to do two different things:
//!
//! - [`Marked::Duplicate`]: the first caller's transaction **has committed**. Do not process the event. Acknowledge it
//!   to the sender.
//! - [`Error::InFlight`](crate::Error::InFlight): the first caller's transaction **is open**, and may still roll back.
//!   Do not acknowledge the event, so that the sender delivers it again.
//!
//! While a mark is not committed, no other call becomes a duplicate. By default the second caller waits for the first
//! caller's transaction. If that transaction rolls back, the second caller gets [`Marked::First`].
//!
//! # What a mark cannot see
//!
//! The mark is written before the processing, and nothing is written after it. So it cannot notice these mistakes:
//!
//! - The processing swallows a SQL error, which has aborted the transaction. Then `tx.commit()` returns `Ok` and saves
//!   nothing.
//! - The processing sends a COMMIT or ROLLBACK, or drops the future of a nested `conn.begin()` while the future waits
//!   (sqlx 0.9 then rolls back the *outer* transaction). Then the rest runs in autocommit, without the mark.
//!
//! [`commit`](crate::commit()) returns an error in all of these cases. So use it, before you acknowledge anything. It
//! misses [a few raw statements](crate::commit()#what-it-cannot-see), such as a raw COMMIT followed by a raw BEGIN.
//! [`ensure_idempotent`](crate::ensure_idempotent()) detects these too, because it ends in a fenced write.
//!
//! # Which mode?
//!
//! A mark stores no answer. If a duplicate needs one (the message that the first call created), use
//! [`ensure_idempotent`](crate::ensure_idempotent()) with a short retention. If the processing has effects outside the
//! database, use a [`lease`](crate::lease). A key belongs to one mode; a call in another mode returns
//! [`Error::OtherMode`](crate::Error::OtherMode).

mod many;
mod one;
mod options;

pub use one::{Marked, mark};
pub use options::Marking;
