//! The messages that begin a transaction of the crate, and the checks that a transaction is still the one that the
//! crate began.

use sqlx::PgConnection;

use crate::Error;
use crate::error::sqlstate;

/// The first part of the value of the setting `idempotency.claim` in a transaction of the crate. The first part
/// consists of a word and the start time of the transaction. The word is `step` in a durable transaction, such as the
/// transaction of a step. The word is `exempt` in the transaction of a handler without a key. The word alone proves
/// nothing, because a role or a database may have set this word for all its sessions.
macro_rules! own_transaction {
    ($word:literal) => {
        concat!("('", $word, " ' || (extract(epoch from pg_catalog.now())::float8 * 1000000::float8)::int8::text)")
    };
}

/// Whether the connection is still in the transaction whose setting begins with [`own_transaction`]. The end of the
/// setting is not compared, because claims append their tokens.
macro_rules! is_own_transaction {
    ($word:literal) => {
        concat!(
            // COALESCE is not used here, because in an UPDATE of a distributed table Citus refuses `current_setting` in it.
            "(pg_catalog.starts_with(pg_catalog.current_setting('idempotency.claim', true), ",
            $crate::record::opening::own_transaction!($word),
            ") is true)"
        )
    };
}
pub(super) use {is_own_transaction, own_transaction};

/// Refuses a connection on which other code sent a raw `BEGIN`, which sqlx does not count. In such a transaction,
/// `now()` is older than this message, so the check divides by zero, which aborts the transaction. Without the check,
/// the crate would commit this transaction of other code.
///
/// The check comes before BEGIN in the same message, and the message is one transaction. So if the check fails, the
/// crate has no open transaction.
macro_rules! check {
    ($name:literal) => {
        concat!(
            "select /* pg_idempotency: ",
            $name,
            " */ 1 / (pg_catalog.now() = pg_catalog.statement_timestamp())::int"
        )
    };
}

/// Sets `synchronous_commit` to `on` if its value is weaker.
macro_rules! durable {
    () => {
        "case when pg_catalog.current_setting('synchronous_commit') in ('off', 'local')
            then pg_catalog.set_config('synchronous_commit', 'on', true)
        end"
    };
}

/// How a transaction of the crate begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening {
    pub(crate) sql: &'static str,
    /// Whether no foreign transaction is open after this message. If not, the caller checks the age of its transaction.
    pub(crate) is_checked: bool,
}

impl Opening {
    /// Begins with the session's settings, and checks that no foreign transaction is open.
    pub(crate) const PLAIN: Self = Self::checked(concat!(check!("opening"), "; begin"));

    /// Begins like [`PLAIN`](Self::PLAIN), but without the check, for a claim that returns the age of its transaction.
    /// After the first query of a transaction, PostgreSQL refuses to set the mode `deferrable`, whatever its value is.
    /// So this message detects a foreign transaction only if that transaction has run a query, has a savepoint, or is
    /// aborted. The caller of the claim detects every other foreign transaction by its age, unless that transaction
    /// began shortly before the call.
    pub(crate) const BEFORE_CLAIM: Self =
        Self { sql: "begin /* pg_idempotency: opening before claim */ not deferrable", is_checked: false };

    /// Begins a transaction for a handler without a key. The handler claims nothing, and may write the tables that are
    /// protected ([`protect`](crate::protect())).
    #[cfg(feature = "http")]
    pub(crate) const EXEMPT: Self = Self::checked(concat!(
        check!("opening exempt"),
        ", pg_catalog.set_config('idempotency.claim', ",
        own_transaction!("exempt"),
        ", true); begin"
    ));

    /// Sets `synchronous_commit` to `on` if the session has a weaker setting. This opening is for a claim that guards
    /// an effect outside the database. If the server lost such a claim, a second caller could repeat the effect.
    ///
    /// Until this transaction ends, the setting `idempotency.claim` begins with [`own_transaction`]. So a step, which
    /// claims nothing, may write the tables that are protected. A later statement can check whether it is still in this
    /// transaction.
    pub(crate) const DURABLE: Self = Self::checked(concat!(
        check!("opening durable"),
        ", ",
        durable!(),
        ", pg_catalog.set_config('idempotency.claim', ",
        own_transaction!("step"),
        ", true); begin"
    ));

    /// Begins like [`PLAIN`](Self::PLAIN), for a search by the crate. If row level security could hide a record from
    /// the role, the server refuses the statement with an error of privileges (SQLSTATE 42501). Without this error, an
    /// empty result would not prove that no record exists.
    ///
    /// The setting `row_security` is local to the transaction, because the connection belongs to the service or a
    /// pooler. The setting applies to all tables, so no code of the service may run in such a transaction.
    pub(crate) const ALL_ROWS: Self =
        Self::checked(concat!(check!("opening"), ", pg_catalog.set_config('row_security', 'off', true); begin"));

    /// Begins like [`DURABLE`](Self::DURABLE) and [`ALL_ROWS`](Self::ALL_ROWS) together, for the decision of an
    /// operator, but without the setting `idempotency.claim`.
    pub(crate) const DURABLE_ALL_ROWS: Self = Self::checked(concat!(
        check!("opening of decision"),
        ", pg_catalog.set_config('row_security', 'off', true), ",
        durable!(),
        "; begin"
    ));

    /// Begins at READ COMMITTED, whatever the session's own level is, and without a snapshot. The first statement takes
    /// a lock, and the second statement must see everything that was committed before the lock.
    ///
    /// The check of the other openings is a query, so it would take a snapshot at the session's isolation level, and a
    /// BEGIN after a snapshot may not set another level. Instead of the check, a ROLLBACK ends a transaction that may
    /// be open. This ROLLBACK counts in `pg_stat_database`. Only migrations and the release of a claim after a failed
    /// call pay for this ROLLBACK.
    pub(crate) const READ_COMMITTED: Self = Self::checked(
        "begin; rollback; begin /* pg_idempotency: opening at read committed */ isolation level read committed",
    );

    const fn checked(sql: &'static str) -> Self {
        Self { sql, is_checked: true }
    }

    /// Whether this opening has failed because the pool gave out a connection with a foreign transaction. The error has
    /// aborted the foreign transaction, or it was aborted before.
    pub(crate) fn is_refused_by_a_foreign_transaction(self, error: &sqlx::Error) -> bool {
        match sqlstate(error).as_deref() {
            Some(sqlstate::ACTIVE_TRANSACTION) => !self.is_checked,
            Some(sqlstate::DIVISION_BY_ZERO | sqlstate::IN_FAILED_TRANSACTION) => true,
            _ => false,
        }
    }
}

/// Fails outside a transaction that began with [`Opening::EXEMPT`].
#[cfg(feature = "http")]
pub(crate) const IS_EXEMPT: &str = concat!(
    "savepoint pg_idempotency; release savepoint pg_idempotency; select /* pg_idempotency: is exempt */ 1 / ",
    is_own_transaction!("exempt"),
    "::int"
);

/// Gives the caller's transaction the settings of [`Opening::DURABLE_ALL_ROWS`]. Returns the previous `row_security`.
pub(crate) async fn prepare_decision(conn: &mut PgConnection) -> Result<String, Error> {
    sqlx::query_scalar(concat!(
        "
        select /* pg_idempotency: prepare decision */
            -- Evaluated in this order.
            pg_catalog.current_setting('row_security'),
            pg_catalog.set_config('row_security', 'off', true),
            ",
        durable!()
    ))
    .persistent(false)
    .fetch_one(conn)
    .await
    .map_err(Error::of_statement)
}

/// Restores the `row_security` of the caller's transaction.
pub(crate) async fn put_back(conn: &mut PgConnection, row_security: &str) -> Result<(), Error> {
    sqlx::query("select /* pg_idempotency: put back */ pg_catalog.set_config('row_security', $1::text, true)")
        .persistent(false)
        .bind(row_security) // $1
        .execute(conn)
        .await
        .map(drop)
        .map_err(Error::of_statement)
}

/// Whether the connection is still in the transaction that began with [`Opening::DURABLE`].
pub(crate) async fn is_open(conn: &mut PgConnection) -> Result<bool, Error> {
    sqlx::query_scalar(concat!("select /* pg_idempotency: is open */ ", is_own_transaction!("step")))
        .persistent(false)
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
}
