//! The protocol of transaction mode: claim, perform, complete; or replay.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{Connection as _, PgConnection, PgPool};

use super::{Idempotency, Outcome, decode, encode};
use crate::claim::{Claimed, contend, select_first};
use crate::record::{Record, Terms};
use crate::session::{Connections, Opening, in_own_transaction};
use crate::{Body, Error, Key, Mode};

/// One call: its record, and the terms of its claim.
pub(super) struct Call<'k> {
    pub(super) record: Record<'k>,
    pub(super) terms: Terms,
    select_first: bool,
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
        })
    }

    /// The protocol itself, in an open transaction.
    pub(super) async fn ensure<T, E, F>(&self, conn: &mut PgConnection, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        match contend(conn, self.record, &self.terms, &mut None).await? {
            Claimed::Won(claim) => {
                let response = perform(&mut *conn).await?;
                self.record.complete(conn, claim, &encode(&response)?).await?;
                Ok(Outcome::Performed(response))
            }
            Claimed::Replayed(response) => Ok(Outcome::Replayed(decode(&response)?)),
        }
    }

    /// Runs `protocol` in the caller's transaction, or in one of the crate's own if the connection has none.
    pub(super) async fn on_connection<T, E, P>(&self, conn: &mut PgConnection, protocol: P) -> Result<Outcome<T>, E>
    where
        T: DeserializeOwned,
        E: From<Error>,
        P: AsyncFnOnce(&mut PgConnection) -> Result<Outcome<T>, E>,
    {
        if conn.is_in_transaction() {
            return protocol(conn).await;
        }
        if let Some(replayed) = self.replay_first(conn).await {
            return Ok(replayed?);
        }
        in_own_transaction(conn, &Opening::Plain, protocol).await.into_result()
    }

    /// Runs `protocol` in a transaction of the crate's own, on a connection of the pool.
    pub(super) async fn on_pool<T, E, P>(&self, pool: &PgPool, protocol: P) -> Result<Outcome<T>, E>
    where
        T: DeserializeOwned,
        E: From<Error>,
        P: AsyncFnOnce(&mut PgConnection) -> Result<Outcome<T>, E>,
    {
        let mut connections = Connections::of(pool);
        let mut conn = connections.next().await?;
        if let Some(replayed) = self.replay_first(&mut conn).await {
            return Ok(replayed?);
        }
        connections.in_transaction(conn, &Opening::Plain, protocol).await
    }

    /// Under the option *select first*: replays a stored response before any transaction begins.
    pub(super) async fn replay_first<T: DeserializeOwned>(
        &self,
        conn: &mut PgConnection,
    ) -> Option<Result<Outcome<T>, Error>> {
        if !self.select_first {
            return None;
        }
        let response = select_first(conn, self.record, &self.terms).await?;
        Some(decode(&response).map(Outcome::Replayed))
    }
}
