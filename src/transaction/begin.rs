//! Where a call runs: in the caller's transaction, or in one of the crate's own.

use serde::de::DeserializeOwned;
use sqlx::{Connection as _, PgConnection, PgPool};

use super::protocol::Call;
use crate::Error;
use crate::outcome::{Outcome, decode};
use crate::session::{Connections, Opening, in_own_transaction};

impl Call<'_> {
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
        let response = self.record.select_first(conn, &self.terms).await?;
        Some(decode(&response).map(Outcome::Replayed))
    }
}
