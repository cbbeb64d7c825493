//! Records in a chosen state, for the tests of your own service (feature `testing`).
//!
//! With `#[sqlx::test]`, which gives each test a database of its own, [`MIGRATOR`](crate::MIGRATOR) creates the table:
//!
//! ```no_run
//! # use pg_idempotency::{Error, Idempotency, Key, testing};
//! #[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
//! # #[allow(dead_code)]
//! async fn a_repeated_order_gets_the_first_answer(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//!     let key = Key::new("user:1", "POST /orders", "abc")?;
//!     testing::completed(&mut *pool.acquire().await?, &key, "tea", &17).await?;
//!
//!     let order = async |_: &mut sqlx::PgConnection| -> Result<i32, Error> { unreachable!("not performed again") };
//!     let outcome = Idempotency::new().run(&pool, &key, "tea", order).await?;
//!     assert!(outcome.is_replayed());
//!     assert_eq!(outcome.into_inner(), 17);
//!     Ok(())
//! }
//! # fn main() {}
//! ```
//!
//! Every function here writes a record of transaction mode, whatever stood under the key before.

use std::fmt;

use serde::Serialize;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};

use crate::{Body, Error, Fingerprint, Key};

/// A record that an earlier call has completed with this response a minute ago: the next call with the same body replays.
///
/// # Errors
///
/// [`Error::InvalidBody`] and [`Error::Unencodable`] for what cannot be stored, and the database's.
pub async fn completed<B, T>(conn: &mut PgConnection, key: &Key, body: &B, response: &T) -> Result<(), Error>
where
    B: Body + ?Sized,
    T: Serialize + ?Sized,
{
    write(conn, key, body.fingerprint()?, Some(encode(response)?), "24 hours").await
}

/// A completed record whose retention has ended a moment ago, and which no sweep has met yet: the next call performs.
///
/// # Errors
///
/// As [`completed`].
pub async fn expired<B, T>(conn: &mut PgConnection, key: &Key, body: &B, response: &T) -> Result<(), Error>
where
    B: Body + ?Sized,
    T: Serialize + ?Sized,
{
    write(conn, key, body.fingerprint()?, Some(encode(response)?), "-1 millisecond").await
}

/// A call that is in flight: the next one waits, or is told [`Error::InFlight`].
///
/// It has a connection of its own, so that the pool of the test stays as large as it was.
///
/// # Errors
///
/// As [`completed`].
pub async fn in_flight<B>(pool: &PgPool, key: &Key, body: &B) -> Result<InFlightCall, Error>
where
    B: Body + ?Sized,
{
    let fingerprint = body.fingerprint()?;
    let mut conn = PgConnection::connect_with(&pool.connect_options()).await?;
    conn.execute("begin").await?;
    sqlx::query("select pg_advisory_xact_lock($1::int8)").bind(key.lock_id()).execute(&mut conn).await?;
    write(&mut conn, key, fingerprint, None, "24 hours").await?;
    Ok(InFlightCall { conn, key: key.clone(), fingerprint })
}

/// A call in flight, made by [`in_flight`]. Dropped, it rolls back, as if its process had died: the next call performs.
#[must_use = "dropped, the call is in flight no more"]
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
    /// As [`completed`].
    pub async fn complete<T: Serialize + ?Sized>(mut self, response: &T) -> Result<(), Error> {
        write(&mut self.conn, &self.key, self.fingerprint, Some(encode(response)?), "24 hours").await?;
        self.conn.execute("commit").await?;
        Ok(())
    }
}

impl fmt::Debug for InFlightCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlightCall").field("key", &self.key).finish_non_exhaustive()
    }
}

fn encode<T: Serialize + ?Sized>(response: &T) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(response).map_err(|error| Error::Unencodable { source: error.into() })
}

async fn write(
    conn: &mut PgConnection,
    key: &Key,
    fingerprint: Fingerprint,
    response: Option<Vec<u8>>,
    ends_in: &'static str,
) -> Result<(), Error> {
    sqlx::query(
        "
        insert into idempotency.record as record
            (mode, scope, operation, key, fingerprint, token, claimed_at, completed_at, expires_at, response_body)
        values (
            'transaction', $1::text, $2::text, $3::text, $4::bytea, 0,
            now() - interval '1 minute',
            case when $5::bytea is not null then now() - interval '1 minute' end,
            statement_timestamp() + $6::text::interval,
            $5::bytea
        )
        on conflict (scope, operation, key) do update
        set mode = excluded.mode, fingerprint = excluded.fingerprint, token = excluded.token, attempt = 1,
            claimed_at = excluded.claimed_at, lease_until = null, completed_at = excluded.completed_at,
            expires_at = excluded.expires_at, response_status = null, response_headers = null,
            response_body = excluded.response_body, last_error = null
        ",
    )
    .bind(key.scope())
    .bind(key.operation())
    .bind(key.value())
    .bind(fingerprint.as_bytes())
    .bind(response)
    .bind(ends_in)
    .execute(conn)
    .await
    .map(drop)
    .map_err(Error::of_statement)
}
