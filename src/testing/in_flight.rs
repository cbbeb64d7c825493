//! Another caller's call that is in flight.

use std::fmt;

use serde::Serialize;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};

use super::fixture::Fixture;
use crate::{Body, Error, Fingerprint, Key};

/// Starts a call in transaction mode, which is then in flight: the next call waits, or gets [`Error::InFlight`].
///
/// It has a connection of its own, so it takes none from the test's pool. In lease mode a call in flight is only a
/// record: [`Fixture::leased`].
///
/// ```no_run
/// # use pg_idempotency::{Error, Idempotency, InFlight, Key, testing};
/// # async fn f(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// # let key = Key::new("user:1", "POST /orders", "abc")?;
/// let impatient = Idempotency::new().with_in_flight(InFlight::Reject)?;
/// let call = testing::in_flight(&pool, &key, "tea").await?;
/// let duplicate = impatient.run(&pool, &key, "tea", async |_| -> Result<i32, Error> { unreachable!() }).await;
/// assert!(matches!(duplicate, Err(Error::InFlight { .. })));
/// call.complete(&17).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`Error::InvalidBody`], and errors of the database.
pub async fn in_flight<B>(pool: &PgPool, key: &Key, body: &B) -> Result<InFlightCall, Error>
where
    B: Body + ?Sized,
{
    let fingerprint = body.fingerprint()?;
    let mut conn = PgConnection::connect_with(&pool.connect_options()).await?;
    conn.execute("begin").await?;
    sqlx::query("select pg_advisory_xact_lock($1::int8)").bind(key.lock_id()).execute(&mut conn).await?;
    Fixture::indeterminate(key, &fingerprint)?.write(&mut conn).await?;
    Ok(InFlightCall { conn, key: key.clone(), fingerprint })
}

/// A call in flight, made by [`in_flight`]. When it is dropped, it rolls back, as if its process had died: the next
/// call performs.
#[must_use = "a call that is dropped is no longer in flight"]
pub struct InFlightCall {
    conn: PgConnection,
    key: Key,
    fingerprint: Fingerprint,
}

impl InFlightCall {
    /// Completes the call with this response and commits: the next call replays.
    ///
    /// # Errors
    ///
    /// [`Error::Unencodable`] for a response that cannot be stored, and errors of the database.
    pub async fn complete<T: Serialize + ?Sized>(mut self, response: &T) -> Result<(), Error> {
        Fixture::completed(&self.key, &self.fingerprint, response)?.write(&mut self.conn).await?;
        self.conn.execute("commit").await?;
        Ok(())
    }
}

impl fmt::Debug for InFlightCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlightCall").field("key", &self.key).finish_non_exhaustive()
    }
}
