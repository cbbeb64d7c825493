//! The protocol of transaction mode: claim, perform, complete; or replay.

use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::PgConnection;

use super::Idempotency;
use crate::claim::{Asked, Claimed, contend};
use crate::outcome::{Outcome, decode, encode};
use crate::record::{Record, Terms};
use crate::{Body, Error, Key, Mode};

/// One call: its record, and the terms of its claim.
pub(super) struct Call<'k> {
    pub(super) record: Record<'k>,
    pub(super) terms: Terms,
    pub(super) select_first: bool,
    /// When the call was made. On a pool it then waits for a connection.
    pub(super) since: Instant,
}

impl<'k> Call<'k> {
    pub(super) fn new<B: Body + ?Sized>(options: &Idempotency, key: &'k Key, body: &B) -> Result<Self, Error> {
        Ok(Self {
            record: Record { key, deployment: options.deployment },
            terms: Terms {
                mode: Mode::Transaction,
                fingerprint: Some(body.fingerprint()?),
                retention: options.retention,
                in_flight: options.in_flight()?,
                lease: None,
                max_attempts: None,
            },
            select_first: options.select_first,
            since: Instant::now(),
        })
    }

    /// The protocol itself, in an open transaction.
    pub(super) async fn ensure<T, E, F>(&self, conn: &mut PgConnection, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        match contend(conn, self.record, &self.terms, &mut Asked::since(self.since)).await? {
            Claimed::Won(claim) => {
                let response = perform(&mut *conn).await?;
                self.record.complete(conn, claim, &encode(&response)?).await?;
                Ok(Outcome::Performed(response))
            }
            Claimed::Replayed(response) => Ok(Outcome::Replayed(decode(&response)?)),
        }
    }
}
