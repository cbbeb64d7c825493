//! Notices that the database swallows the claims of a call, or hides the record of its key.

use sqlx::PgConnection;

use crate::record::is_read_committed;
use crate::{Error, Misuse};

/// How often in a row a claim of a free key may change nothing. A first claim changes nothing if another owner has
/// committed between the snapshot and the lock of the look. The lock then stays with this transaction until its end, so
/// a second claim meets no other owner.
const MOST: u32 = 2;

/// What the looks of a call have found free in a row: either no record, or a record that the call may take over.
///
/// At READ COMMITTED, each look sees every committed record. Nobody but the database itself can then prevent a claim
/// twice: a BEFORE trigger that returns null, or a policy of row level security. Above READ COMMITTED, a look does not
/// see the records that were committed after the snapshot of the transaction.
#[derive(Default)]
pub(crate) struct Swallowed {
    /// The token of the record. `None` if no record was found.
    token: Option<i64>,
    times: u32,
    /// `None` before the call has asked for the isolation level of its transaction.
    is_read_committed: Option<bool>,
}

impl Swallowed {
    /// Notes that a look has found the key free, before the call claims the key. Returns an error if earlier claims
    /// after the same finding have changed nothing.
    pub(crate) async fn found_free(&mut self, conn: &mut PgConnection, token: Option<i64>) -> Result<(), Error> {
        if token != self.token {
            self.forget();
            self.token = token;
        }
        if self.times > 0 && self.is_read_committed.is_none() {
            self.is_read_committed = Some(is_read_committed(conn).await?);
        }
        if self.times >= MOST && self.is_read_committed == Some(true) {
            return Err(Error::Misuse(Misuse::ClaimSwallowed));
        }
        self.times += 1;
        Ok(())
    }

    /// Begins the count again, because another transaction has the key or its row.
    pub(crate) fn forget(&mut self) {
        self.times = 0;
    }
}
