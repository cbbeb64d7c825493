//! The entry points of transaction mode.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool};

use super::protocol::Call;
use crate::observe::{call_span, observed};
use crate::{Body, Error, Idempotency, Key, Mode, Outcome, Verdict};

/// Performs an operation once, however often it is asked for, with the [default options](Idempotency::new).
///
/// The first call with a key performs: `perform` gets the connection, and what it writes there, the claim of the key and
/// the response commit together or not at all. Every later call with the same key and body gets the first one's response,
/// from the same stored bytes, and performs nothing. Another body under the key is [`Error::KeyReused`]; a concurrent
/// duplicate waits for the first one's transaction.
///
/// In a transaction of the caller's own the claim is a part of it, and nothing is settled before it commits. On a connection
/// in none, be it a `PgConnection` or a `PoolConnection`, the crate begins one and commits it. With a pool at hand,
/// [`Idempotency::run`] is simpler.
///
/// ```no_run
/// # use pg_idempotency::{Error, Key, ensure_idempotent};
/// # async fn transfer(pool: sqlx::PgPool, user: &str, header: &str, payee: &str, amount: i64)
/// #     -> Result<i64, Box<dyn std::error::Error + Send + Sync>> {
/// let key = Key::new(user, "POST /transfers", header)?;
/// let mut tx = pool.begin().await?;
/// let outcome = ensure_idempotent(&mut tx, &key, &(payee, amount), async |conn| -> Result<i64, Error> {
///     Ok(sqlx::query_scalar("insert into transfers (payee, amount) values ($1, $2) returning id")
///         .bind(payee)
///         .bind(amount)
///         .fetch_one(conn)
///         .await?)
/// })
/// .await?;
/// pg_idempotency::commit(tx).await?;
/// Ok(outcome.into_inner())
/// # }
/// ```
///
/// # The response
///
/// Any type that serde can take apart and put together again, stored as JSON text. A replay decodes that text into the type
/// of *now*: a struct with a new field would be encoded differently than before. Where the client must see the same bytes
/// across releases, make the response a `Box<serde_json::value::RawValue>` (serde_json's feature `raw_value`), which is the
/// stored text itself, as `examples/payments_api` does. What would come back as another value is refused before it is stored,
/// with the exceptions that [`Error::Unencodable`] lists.
///
/// # The closure
///
/// `async |conn| -> Result<_, MyError> { … }`, with the return type written out where its body ends in `?; Ok(x)`, or a
/// named `async fn`. `|conn| async move { … }` fails on lifetimes. A generic wrapper of your own that must return a `Send`
/// future takes a boxed one and passes it on:
///
/// ```no_run
/// # use pg_idempotency::{Error, Key, Outcome, ensure_idempotent};
/// # use sqlx::PgConnection;
/// # use std::{future::Future, pin::Pin};
/// type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
///
/// async fn audited<F>(conn: &mut PgConnection, key: &Key, perform: F) -> Result<Outcome<i64>, Error>
/// where
///     F: for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<i64, Error>> + Send,
/// {
///     ensure_idempotent(conn, key, &(), async move |conn| perform(conn).await).await
/// }
/// ```
///
/// # Errors
///
/// - An error of `perform` comes back untouched. In the caller's own transaction **the caller must then roll back**; who
///   commits all the same leaves the key [indeterminate](Error::Indeterminate).
/// - What the key's record says: [`KeyReused`](Error::KeyReused), [`InFlight`](Error::InFlight),
///   [`Indeterminate`](Error::Indeterminate), [`OtherMode`](Error::OtherMode), [`Undecodable`](Error::Undecodable),
///   [`AlreadyInTransaction`](Error::AlreadyInTransaction), [`UnknownFingerprint`](Error::UnknownFingerprint),
///   [`UnknownMode`](Error::UnknownMode). Nothing was performed.
/// - Before anything was performed: [`InvalidBody`](Error::InvalidBody), [`SchemaMissing`](Error::SchemaMissing),
///   [`UnknownTransaction`](Error::UnknownTransaction).
/// - Performed, and not stored: [`Unencodable`](Error::Unencodable), [`NotInTransaction`](Error::NotInTransaction),
///   [`OutlivedRetention`](Error::OutlivedRetention). Nothing was acknowledged; roll back.
/// - The database's own: [`Retryable`](Error::Retryable), [`Database`](Error::Database). A lost connection or an error of
///   the COMMIT leaves open whether the operation took effect: ask again with the same key.
///
/// # Cancellation
///
/// Where the crate owns the transaction, the future may be dropped at any point: the transaction is rolled back, or its
/// COMMIT was under way and decides. In a transaction of the caller's own, that is to be dropped too, as `?` and a `timeout`
/// around both do; who drops this future alone and then commits leaves the key indeterminate. Dropping is not cancelling: a
/// statement that was sent runs to its end on the server and holds the claim so long.
///
/// Inside `perform`, a COMMIT, a ROLLBACK, and a nested `conn.begin()` whose future is dropped while it waits (sqlx 0.9 then
/// rolls back the *outer* transaction) all end the claim. The call is never acknowledged after that, it ends in
/// [`NotInTransaction`](Error::NotInTransaction); but what `perform` wrote afterwards is in autocommit, and stays.
pub async fn ensure_idempotent<T, E, B, F>(
    conn: &mut PgConnection,
    key: &Key,
    body: &B,
    perform: F,
) -> Result<Outcome<T>, E>
where
    T: Serialize + DeserializeOwned,
    B: Body + ?Sized,
    E: From<Error>,
    F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
{
    Idempotency::new().ensure(conn, key, body, perform).await
}

/// [`ensure_idempotent`] with `perform` behind a savepoint, so that the caller's transaction survives its failure.
///
/// An error of `perform` undoes only what it wrote, releases the key for the next caller and leaves the transaction usable,
/// to be committed if the caller likes. [`Verdict::Undo`] undoes the writes too, and *stores* the response: a failure that
/// every repeat should get. It costs two round trips more, and `Undo` four.
///
/// ```no_run
/// # use pg_idempotency::{Error, Key, Verdict, ensure_isolated};
/// # async fn charge(tx: &mut sqlx::PgConnection, key: &Key, amount: i64) -> Result<(), Error> {
/// let answer = ensure_isolated(tx, key, &amount, async |conn| -> Result<_, Error> {
///     sqlx::query("update accounts set balance = balance - $1").bind(amount).execute(&mut *conn).await?;
///     let left: i64 = sqlx::query_scalar("select min(balance) from accounts").fetch_one(conn).await?;
///     Ok(if left < 0 { Verdict::Undo("insufficient funds".to_owned()) } else { Verdict::Keep("paid".to_owned()) })
/// })
/// .await?;
/// # let _ = answer; Ok(())
/// # }
/// ```
///
/// # Errors
///
/// As [`ensure_idempotent`].
///
/// # Cancellation
///
/// As [`ensure_idempotent`].
pub async fn ensure_isolated<T, E, B, F>(
    conn: &mut PgConnection,
    key: &Key,
    body: &B,
    perform: F,
) -> Result<Outcome<T>, E>
where
    T: Serialize + DeserializeOwned,
    B: Body + ?Sized,
    E: From<Error>,
    F: AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, E>,
{
    Idempotency::new().ensure_isolated(conn, key, body, perform).await
}

impl Idempotency {
    /// [`ensure_idempotent`] with these options.
    ///
    /// # Errors
    ///
    /// As [`ensure_idempotent`].
    ///
    /// # Cancellation
    ///
    /// As [`ensure_idempotent`].
    pub async fn ensure<T, E, B, F>(
        self,
        conn: &mut PgConnection,
        key: &Key,
        body: &B,
        perform: F,
    ) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        B: Body + ?Sized,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let span = call_span!("ensure_idempotent", Mode::Transaction, key);
        observed(span, key, async |watch| {
            let call = Call::new(&self, key, body)?;
            let perform = async |conn: &mut PgConnection| watch.perform(perform(conn)).await;
            call.on_connection(conn, async |conn| call.ensure(conn, perform).await).await
        })
        .await
    }

    /// [`ensure_isolated`] with these options.
    ///
    /// # Errors
    ///
    /// As [`ensure_idempotent`].
    ///
    /// # Cancellation
    ///
    /// As [`ensure_idempotent`].
    pub async fn ensure_isolated<T, E, B, F>(
        self,
        conn: &mut PgConnection,
        key: &Key,
        body: &B,
        perform: F,
    ) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        B: Body + ?Sized,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, E>,
    {
        let span = call_span!("ensure_isolated", Mode::Transaction, key);
        observed(span, key, async |watch| {
            let call = Call::new(&self, key, body)?;
            let perform = async |conn: &mut PgConnection| watch.perform(perform(conn)).await;
            call.on_connection(conn, async |conn| call.ensure_isolated(conn, perform).await).await
        })
        .await
    }

    /// [`ensure`](Self::ensure) for a caller with no transaction of its own: takes a connection from the pool, begins,
    /// performs or replays, commits.
    ///
    /// A connection on which somebody left an open transaction is closed, not committed, and another one taken, three
    /// times at most; but a replay that is [looked for first](Self::with_select_first) does not meet that transaction. A duplicate that [waits](crate::InFlight::Wait) holds its connection meanwhile.
    ///
    /// # Errors
    ///
    /// As [`ensure_idempotent`], and [`Error::Database`] where the pool gives no connection.
    ///
    /// # Cancellation
    ///
    /// Safe at every point: rolled back, or its COMMIT was under way and decides.
    pub async fn run<T, E, B, F>(self, pool: &PgPool, key: &Key, body: &B, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        B: Body + ?Sized,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let span = call_span!("ensure_idempotent", Mode::Transaction, key);
        observed(span, key, async |watch| {
            let call = Call::new(&self, key, body)?;
            let perform = async |conn: &mut PgConnection| watch.perform(perform(conn)).await;
            if self.fewest_round_trips {
                call.run_in_fewest(pool, perform).await
            } else {
                call.on_pool(pool, async |conn| call.ensure(conn, perform).await).await
            }
        })
        .await
    }

    /// [`ensure_isolated`](Self::ensure_isolated) for a caller with no transaction of its own, as [`run`](Self::run). An error
    /// of `perform` rolls all back, as it does there; [`Verdict::Undo`] stores the response and undoes the rest.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    ///
    /// # Cancellation
    ///
    /// As [`run`](Self::run).
    pub async fn run_isolated<T, E, B, F>(self, pool: &PgPool, key: &Key, body: &B, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        B: Body + ?Sized,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<Verdict<T>, E>,
    {
        let span = call_span!("ensure_isolated", Mode::Transaction, key);
        observed(span, key, async |watch| {
            let call = Call::new(&self, key, body)?;
            let perform = async |conn: &mut PgConnection| watch.perform(perform(conn)).await;
            call.on_pool(pool, async |conn| call.ensure_isolated(conn, perform).await).await
        })
        .await
    }
}
