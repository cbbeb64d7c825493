//! The public functions of transaction mode.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool};

use super::call::Call;
use crate::limits::check_wait;
use crate::observe::{call_span, observed};
use crate::{Body, Error, Idempotency, Key, Mode, Outcome, Verdict};

/// Performs an operation exactly once, however often it is requested, with the [default options](Idempotency::new).
///
/// The first call with a key performs. `perform` gets the connection. Its writes, the claim of the key and the response
/// commit together, or not at all. Every later call with the same key and body gets the [stored
/// response](#the-response), and performs nothing. A call with another body under the key returns
/// [`Error::KeyReused`]. A concurrent duplicate waits for the first call's transaction.
///
/// The connection must be in a transaction, which sqlx has begun. The claim is a part of it, and takes effect when the
/// caller commits. For callers without a transaction there is [`Idempotency::run`], which takes a pool.
///
/// A first call adds two round trips to the transaction: the claim and the completion. [`commit`](crate::commit())
/// takes one more than `tx.commit()`.
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
/// The response is any type that serde can encode and decode. It is stored as JSON text. A replay decodes this text
/// into the *present* type, so after a release that adds a field, the client may see other bytes than before. If the
/// client must see the same bytes across releases, make the response a `Box<serde_json::value::RawValue>` (serde_json's
/// feature `raw_value`), which is the stored text itself. A response that does not decode is refused before it is
/// stored. One that decodes as another value is not: `Some(f64::NAN)`, `Some(())` and `Some(None)` are replayed as
/// `None`. [`Error::Unencodable`] lists all such cases.
///
/// # The closure
///
/// Write `async |conn| -> Result<_, MyError> { … }`, or pass a named `async fn`. The return type is necessary if the
/// body ends in `?; Ok(x)`. `|conn| async move { … }` does not compile, because of lifetimes. A generic wrapper that
/// must return a `Send` future takes a closure with a boxed future:
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
/// - An error of `perform` comes back unchanged. **The caller must then roll back.** If the caller commits all the
///   same, the key is left [indeterminate](Error::Indeterminate).
/// - Errors because an earlier call has the key: [`KeyReused`](Error::KeyReused), [`InFlight`](Error::InFlight),
///   [`Indeterminate`](Error::Indeterminate), [`OtherMode`](Error::OtherMode), [`Undecodable`](Error::Undecodable),
///   [`Misuse::AlreadyInTransaction`](crate::Misuse::AlreadyInTransaction),
///   [`Incompatible::UnknownFingerprint`](crate::Incompatible::UnknownFingerprint),
///   [`Incompatible::UnknownMode`](crate::Incompatible::UnknownMode). Nothing was performed.
/// - Errors before `perform`: [`InvalidRequest::Body`](crate::InvalidRequest::Body),
///   [`SchemaMissing`](Error::SchemaMissing), [`Misuse::WrongDeployment`](crate::Misuse::WrongDeployment),
///   [`Misuse::TransactionAborted`](crate::Misuse::TransactionAborted), and
///   [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction) if sqlx has begun no transaction on the connection.
/// - Errors after `perform`, when the response could not be stored: [`Unencodable`](Error::Unencodable),
///   [`Misuse::TransactionAborted`](crate::Misuse::TransactionAborted),
///   [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction),
///   [`Misuse::NestedTransaction`](crate::Misuse::NestedTransaction), [`OutlivedRetention`](Error::OutlivedRetention).
///   Nothing was acknowledged: roll back.
/// - Errors of the database: [`Retryable`](Error::Retryable), [`Database`](Error::Database). Nothing is committed,
///   unless `perform` has ended the transaction.
///
/// # Cancellation
///
/// Drop the transaction together with this future, as `?` and a `timeout` around both do. If a caller drops only this
/// future and then commits, the key is left indeterminate. A statement that was sent runs to its end on the server, and
/// holds the claim until then.
///
/// Three things inside `perform` end the claim: a COMMIT, a ROLLBACK, and a nested `conn.begin()` that fails, or whose
/// future is dropped while it waits (sqlx 0.9 then rolls back the *outer* transaction; `conn.begin_with` always fails
/// there). After that the call returns [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction), so it is never
/// acknowledged. Later writes of `perform` are in autocommit, and they stay. So if a nested `begin` fails, return its
/// error.
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

impl Idempotency {
    /// [`ensure_idempotent`] with these options.
    ///
    /// # Errors and cancellation
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
        let perform = async |conn: &mut PgConnection| perform(conn).await.map(Verdict::Keep);
        observed(span, key, async |watch| self.call(key, body, false)?.ensure(conn, watch, perform).await).await
    }

    /// [`ensure`](Self::ensure) with `perform` behind a savepoint, so that the caller's transaction survives a failure.
    ///
    /// An error of `perform` undoes only what `perform` wrote, and releases the key for the next caller. The
    /// transaction stays usable, and the caller may commit it. [`Verdict::Undo`] undoes the writes too, but *stores*
    /// the response: a failure that every retry should get. This function takes two more round trips than
    /// [`ensure`](Self::ensure), or four more for an `Undo`.
    ///
    /// ```no_run
    /// # use pg_idempotency::{Error, Idempotency, Key, Verdict};
    /// # async fn charge(tx: &mut sqlx::PgConnection, key: &Key, amount: i64) -> Result<(), Error> {
    /// let perform = async |conn: &mut sqlx::PgConnection| -> Result<_, Error> {
    ///     sqlx::query("update accounts set balance = balance - $1").bind(amount).execute(&mut *conn).await?;
    ///     let left: i64 = sqlx::query_scalar("select min(balance) from accounts").fetch_one(conn).await?;
    ///     Ok(if left < 0 { Verdict::Undo("insufficient funds".to_owned()) } else { Verdict::Keep("paid".to_owned()) })
    /// };
    /// let answer = Idempotency::new().ensure_isolated(tx, key, &amount, perform).await?;
    /// # let _ = answer; Ok(())
    /// # }
    /// ```
    ///
    /// # Errors and cancellation
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
        observed(span, key, async |watch| self.call(key, body, true)?.ensure(conn, watch, perform).await).await
    }

    /// [`ensure`](Self::ensure) for callers without a transaction: takes a connection from the pool, begins, performs
    /// or replays, and commits.
    ///
    /// If the pool's connection has a transaction that nobody owns, the crate rolls that transaction back, and begins
    /// again, with one exception that the guide's page *promises* names. (A replay under
    /// [`RoundTrips::SelectFirst`](crate::RoundTrips::SelectFirst) reads in it, and leaves it as it is.) A duplicate
    /// that [waits](crate::OnDuplicate::Wait) holds its connection.
    ///
    /// For a failure that every retry should get, without its writes, `perform` begins a nested transaction, rolls it
    /// back, and returns the failure as its response:
    ///
    /// ```no_run
    /// # use pg_idempotency::{Error, Idempotency, Key};
    /// # use sqlx::Connection as _;
    /// # async fn charge(pool: &sqlx::PgPool, key: &Key, amount: i64) -> Result<(), Error> {
    /// let answer = Idempotency::new().run(pool, key, &amount, async |conn| -> Result<_, Error> {
    ///     let mut nested = conn.begin().await?;
    ///     sqlx::query("update accounts set balance = balance - $1").bind(amount).execute(&mut *nested).await?;
    ///     let left: i64 = sqlx::query_scalar("select min(balance) from accounts").fetch_one(&mut *nested).await?;
    ///     if left < 0 {
    ///         nested.rollback().await?;
    ///         return Ok("insufficient funds".to_owned());
    ///     }
    ///     nested.commit().await?;
    ///     Ok("paid".to_owned())
    /// });
    /// # let _ = answer.await?; Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ensure_idempotent`], but an error of `perform` is rolled back; [`Error::Database`] if the pool has no
    /// connection in time.
    ///
    /// # Cancellation
    ///
    /// The transaction is rolled back, or its COMMIT was already sent and may take effect.
    pub async fn run<T, E, B, F>(self, pool: &PgPool, key: &Key, body: &B, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        B: Body + ?Sized,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let span = call_span!("ensure_idempotent", Mode::Transaction, key);
        let perform = async |conn: &mut PgConnection| perform(conn).await.map(Verdict::Keep);
        observed(span, key, async |watch| self.call(key, body, false)?.run(pool, watch, perform).await).await
    }

    fn call<'k, B: Body + ?Sized>(&self, key: &'k Key, body: &B, isolated: bool) -> Result<Call<'k>, Error> {
        check_wait(self.on_duplicate, self.retention)?;
        Ok(Call::new(self, key, body.fingerprint()?, self.on_duplicate, isolated))
    }
}
