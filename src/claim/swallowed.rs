//! Notices that the database swallows the claims of a call, or hides the record of its key.

use crate::{Error, Misuse};

/// The greatest number of claims in a row that may change nothing although a look has found the key free. A first claim
/// changes nothing if another owner has committed between the snapshot and the lock of the look. The lock then stays
/// with this transaction until its end, so a second claim meets no other owner.
const MOST: u32 = 2;

/// What the looks of a call have found free in a row: either no record, or a record that the call may take over.
///
/// Only the database itself can prevent a claim twice: a BEFORE trigger that returns null, or a policy of row level
/// security. A record that the look does not see because of an old snapshot is no such cause: above READ COMMITTED, the
/// claim then fails with SQLSTATE 40001.
#[derive(Default)]
pub(crate) struct Swallowed {
    /// The token of the record. `None` if no record was found.
    token: Option<i64>,
    times: u32,
}

impl Swallowed {
    /// Notes that a look has found the key free, before the call claims the key. Returns an error if earlier claims
    /// after the same finding have changed nothing.
    pub(crate) fn found_free(&mut self, token: Option<i64>) -> Result<(), Error> {
        if token != self.token {
            self.forget();
            self.token = token;
        }
        if self.times == MOST {
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
