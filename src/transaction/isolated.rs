//! The protocol with `perform` behind a savepoint: a failure undoes what `perform` wrote, and nothing else.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;

use super::protocol::Call;
use crate::Error;
use crate::claim::{Asked, Claimed, contend};
use crate::outcome::{Outcome, Verdict, decode, encode};
use crate::record::Claim;
use crate::session::Savepoint;

impl Call<'_> {
    /// As [`ensure`](Self::ensure), behind a savepoint.
    pub(super) async fn ensure_isolated<T, E, F>(&self, conn: &mut PgConnection, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, E>,
    {
        let claim = match contend(conn, self.record, &self.terms, &mut Asked::since(self.since)).await? {
            Claimed::Replayed(response) => return Ok(Outcome::Replayed(decode(&response)?)),
            Claimed::Won(claim) => claim,
        };
        let savepoint = Savepoint::set(conn, claim.token).await?;
        let completed = match perform(&mut *conn).await {
            Ok(verdict) => self.complete_isolated(conn, claim, savepoint, verdict).await.map_err(E::from),
            Err(error) => Err(error),
        };
        if completed.is_err() {
            // If the undo fails, the transaction is not in the promised state, so the caller gets the error of the
            // undo.
            self.undo_and_release(conn, claim, savepoint).await?;
        }
        completed.map(Outcome::Performed)
    }

    async fn complete_isolated<T>(
        &self,
        conn: &mut PgConnection,
        claim: Claim,
        mut savepoint: Savepoint,
        verdict: Verdict<T>,
    ) -> Result<T, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        let (Verdict::Keep(response) | Verdict::Undo(response)) = &verdict;
        let encoded = encode(response)?;
        if let Verdict::Undo(_) = verdict {
            savepoint.undo(conn).await?;
            // Set anew, so that a completion that fails can be undone too.
            savepoint = Savepoint::set(conn, claim.token).await?;
        }
        self.record.complete(conn, claim, &encoded).await?;
        savepoint.release(conn).await?;
        let (Verdict::Keep(response) | Verdict::Undo(response)) = verdict;
        Ok(response)
    }

    /// Restores the state of the transaction before `perform`, and releases the key for the next caller.
    async fn undo_and_release(&self, conn: &mut PgConnection, claim: Claim, savepoint: Savepoint) -> Result<(), Error> {
        // The first try may return the error of an earlier statement whose future `perform` has dropped. Then the undo
        // itself was not sent.
        if let Err(first) = savepoint.undo(conn).await {
            // If Citus loses a worker between the two halves of the undo, the savepoint is gone, and the first error
            // says why.
            savepoint.undo(conn).await.map_err(|second| if first.is_transient() { first } else { second })?;
        }
        self.record.release(conn, claim).await
    }
}
