//! The messages that begin a transaction of the crate, and the checks that a transaction is still the one that the
//! crate began. [`Opening`](crate::session::Opening) describes the purpose of each message.

use sqlx::PgConnection;

use crate::Error;

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

pub(crate) const BEGIN: &str = concat!(check!("opening"), "; begin");
pub(crate) const BEGIN_ALL_ROWS: &str =
    concat!(check!("opening"), ", pg_catalog.set_config('row_security', 'off', true); begin");
/// After the first query of a transaction, PostgreSQL refuses to set the mode `deferrable`, whatever its value is. So
/// this message fails in a foreign transaction that has run a query.
pub(crate) const BEGIN_BEFORE_CLAIM: &str = "begin /* pg_idempotency: opening before claim */ not deferrable";
#[cfg(feature = "http")]
pub(crate) const BEGIN_EXEMPT: &str = concat!(
    check!("opening exempt"),
    ", pg_catalog.set_config('idempotency.claim', ",
    own_transaction!("exempt"),
    ", true); begin"
);
/// Sets `synchronous_commit` to `on` if its value is weaker.
macro_rules! durable {
    () => {
        "case when pg_catalog.current_setting('synchronous_commit') in ('off', 'local')
            then pg_catalog.set_config('synchronous_commit', 'on', true)
        end"
    };
}

pub(crate) const BEGIN_DURABLE: &str = concat!(
    check!("opening durable"),
    ", ",
    durable!(),
    ", pg_catalog.set_config('idempotency.claim', ",
    own_transaction!("step"),
    ", true); begin"
);
pub(crate) const BEGIN_DURABLE_ALL_ROWS: &str = concat!(
    check!("opening of decision"),
    ", pg_catalog.set_config('row_security', 'off', true), ",
    durable!(),
    "; begin"
);
/// Begins a transaction at READ COMMITTED, without the check of the other openings. The check is a query, so it would
/// take a snapshot at the session's isolation level. A BEGIN after a snapshot may not set another level. Instead of the
/// check, a ROLLBACK ends a transaction that may be open. This ROLLBACK counts in `pg_stat_database`. Only migrations
/// and the release of a claim after a failed call pay for this ROLLBACK.
pub(crate) const BEGIN_READ_COMMITTED: &str =
    "begin; rollback; begin /* pg_idempotency: opening at read committed */ isolation level read committed";

/// Fails outside a transaction that began with [`Opening::Exempt`](crate::session::Opening).
#[cfg(feature = "http")]
pub(crate) const IS_EXEMPT: &str = concat!(
    "savepoint pg_idempotency; release savepoint pg_idempotency; select /* pg_idempotency: is exempt */ 1 / ",
    is_own_transaction!("exempt"),
    "::int"
);

/// Gives the caller's transaction the settings of [`BEGIN_DURABLE_ALL_ROWS`]. Returns the previous `row_security`.
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

/// Whether the connection is still in the transaction that began with [`Opening::Durable`](crate::session::Opening).
pub(crate) async fn is_open(conn: &mut PgConnection) -> Result<bool, Error> {
    sqlx::query_scalar(concat!("select /* pg_idempotency: is open */ ", is_own_transaction!("step")))
        .persistent(false)
        .fetch_one(conn)
        .await
        .map_err(Error::of_statement)
}
