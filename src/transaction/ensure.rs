//! The public functions of transaction mode.

use std::pin::pin;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{PgConnection, PgPool};

use super::call::Call;
use crate::limits::check_wait;
use crate::observe::{call_span, observed};
use crate::{Body, Error, Idempotency, Key, Mode, Outcome, Verdict};

/// Performs an operation exactly once during the [retention](Idempotency::retention) of its key, however often it is
/// requested, with the [default options](Idempotency::new).
///
/// The first call with a key calls `perform` with the connection. If the caller commits only after `Ok`, the writes of
/// `perform`, the claim of the key and the response commit together, or not at all. Every later call with the same key
/// and body gets the [stored response](#the-response), and does not call `perform`. A call with the same key and
/// another body returns [`Error::KeyReused`]. A concurrent duplicate waits for the first call's transaction.
///
/// The connection must be in a transaction that sqlx has begun. The claim is part of this transaction, and takes effect
/// when the caller commits. If you have no transaction, use [`Idempotency::run`] with a pool.
///
/// A first call adds two round trips to the transaction: the claim and the completion. [`commit`](crate::commit())
/// takes one round trip more than `tx.commit()`.
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
/// The response can have any type that serde can encode and decode. The response is stored as JSON text. A replay
/// decodes this text into the *present* type. So if a release adds a field, a replay may return other bytes than the
/// first call. If the client must see the same bytes across releases, make the response a
/// `Box<serde_json::value::RawValue>` (serde_json's feature `raw_value`). A `RawValue` is the stored text itself.
///
/// A response that cannot be decoded again is not stored, and the call returns [`Error::Unencodable`]. The
/// documentation of this error also lists the responses that decode as another value.
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
/// - An error of `perform` is returned unchanged. **The caller must then roll back.** If the caller commits instead,
///   the key stays [indeterminate](Error::Indeterminate).
/// - An earlier call has the key, so `perform` was not called: [`KeyReused`](Error::KeyReused),
///   [`InFlight`](Error::InFlight), [`Indeterminate`](Error::Indeterminate), [`OtherMode`](Error::OtherMode),
///   [`Undecodable`](Error::Undecodable), [`Incompatible`](crate::Incompatible),
///   [`Misuse::AlreadyInTransaction`](crate::Misuse::AlreadyInTransaction).
/// - Other errors before `perform`: [`InvalidRequest::Body`](crate::InvalidRequest::Body),
///   [`SchemaMissing`](Error::SchemaMissing), [`Misuse`](crate::Misuse).
/// - The response could not be stored: [`Unencodable`](Error::Unencodable),
///   [`OutlivedRetention`](Error::OutlivedRetention), [`Misuse`](crate::Misuse). **Roll back, and acknowledge
///   nothing.** If the caller commits instead, the writes of `perform` may stay without a record.
/// - The database failed: [`Retryable`](Error::Retryable), [`Database`](Error::Database). Nothing is committed, unless
///   `perform` has ended the transaction.
///
/// # Cancellation
///
/// Drop the transaction together with this future. An early return with `?` drops both, and a `timeout` around both
/// drops both, too. If a caller drops only this future and then commits, the key stays indeterminate. If the completion
/// was already sent, the key may be completed instead. The key also stays indeterminate if the caller catches a panic
/// of `perform` and then commits. On the server, a statement that was already sent runs until it ends, and holds the
/// claim until then. If `perform` drops the future of a raw `copy … from stdin` and goes on, the server waits for data,
/// and this call waits without an end. So copy with sqlx's `copy_in_raw`.
///
/// # What ends the claim early
///
/// Three things inside `perform` end the claim:
/// - A COMMIT or a ROLLBACK.
/// - A nested `conn.begin()` that fails, or whose future is dropped while it waits. sqlx 0.9 then rolls back the
///   *outer* transaction. (`conn.begin_with` always fails inside `perform`.)
/// - A ROLLBACK TO a savepoint that is older than the call.
///
/// If `perform` then returns `Ok`, the call returns [`Misuse::NotInTransaction`](crate::Misuse::NotInTransaction), and
/// nothing may be acknowledged. **Later writes of `perform` have no record.** They run in autocommit or in a
/// transaction of the caller, and can stay. So if a nested `begin` fails, return its error.
///
/// After the call, a ROLLBACK TO an older savepoint undoes the effect together with its record. So acknowledge an
/// outcome only after the COMMIT. Also commit after a replay, because the first call may belong to the same
/// transaction.
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
    /// Does the same as [`ensure_idempotent`], with these options.
    ///
    /// # Errors and cancellation
    ///
    /// The errors, and the effect of a cancellation, are those of [`ensure_idempotent`].
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
            let perform = async |conn: &mut PgConnection| watch.perform(pin!(perform(conn))).await.map(Verdict::Keep);
            self.call(key, body, false)?.ensure(conn, perform).await
        })
        .await
    }

    /// Does the same as [`ensure`](Self::ensure), but runs `perform` behind a savepoint, so that the caller's
    /// transaction survives a failure.
    ///
    /// If `perform` returns an error, only the writes of `perform` are undone. After the end of this transaction, the
    /// next call may claim the key. The transaction stays usable, and the caller may commit it.
    /// [`Verdict::Undo`] also undoes the writes, but *stores* the response. Use `Undo` for a failure that every retry
    /// should get. A call takes two round trips more than [`ensure`](Self::ensure), or three more with `Undo`.
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
    /// The errors are those of [`ensure_idempotent`]. After an error of `perform` or of the completion, the caller may
    /// commit. If a statement of the claim or of the undo fails, the transaction is aborted, so roll back. The effect
    /// of a cancellation is that of [`ensure_idempotent`].
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
            let perform = async |conn: &mut PgConnection| watch.perform(pin!(perform(conn))).await;
            self.call(key, body, true)?.ensure(conn, perform).await
        })
        .await
    }

    /// Does the same as [`ensure`](Self::ensure), for callers without a transaction. The call takes a connection from
    /// the pool, begins a transaction, runs `perform`, and commits. A duplicate that
    /// [waits](crate::OnDuplicate::Wait) holds its connection. A replay has written nothing and ends with a ROLLBACK,
    /// which `xact_rollback` of `pg_stat_database` counts.
    ///
    /// If other code has left a transaction open on the pool's connection, the crate rolls this transaction back and
    /// begins again. The guide's page `promises` names one exception. A replay under
    /// [`replay_first`](Self::replay_first) reads in the transaction of the other code, and leaves that transaction
    /// open.
    ///
    /// If every retry should get a failure whose writes are undone, let `perform` begin a nested transaction
    /// (`conn.begin()`), roll the nested transaction back, and return the failure as the response.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`ensure_idempotent`], but the crate rolls back after an error. If the pool has no
    /// connection in time, the error is [`Error::Database`].
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the transaction is rolled back. A COMMIT that was already sent may take effect.
    pub async fn run<T, E, B, F>(self, pool: &PgPool, key: &Key, body: &B, perform: F) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        B: Body + ?Sized,
        E: From<Error>,
        F: AsyncFnOnce(&mut PgConnection) -> Result<T, E>,
    {
        let span = call_span!("run", Mode::Transaction, key);
        observed(span, key, async |watch| {
            let perform = async |conn: &mut PgConnection| watch.perform(pin!(perform(conn))).await.map(Verdict::Keep);
            self.call(key, body, false)?.run(pool, perform).await
        })
        .await
    }

    fn call<'k, B: Body + ?Sized>(&self, key: &'k Key, body: &B, isolated: bool) -> Result<Call<'k>, Error> {
        check_wait(self.on_duplicate, self.retention)?;
        Ok(Call::new(self, key, body.fingerprint()?, self.on_duplicate, isolated))
    }
}
