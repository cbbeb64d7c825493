//! Winning the right to perform by inserting the record.
//!
//! The primary key decides which claim wins. The advisory lock, a 64-bit hash of the key, lets other calls *see* an
//! owner whose record is not committed yet, so the claim does not wait in the insert. The lock ends with the owner's
//! transaction. One transaction writes a record without the lock, so a claim can wait for it in the insert: the next
//! transaction of a lease whose claim committed after this statement's snapshot.

use std::num::NonZeroU32;
use std::time::Duration;

use sqlx::PgConnection;
use sqlx::postgres::PgRow;

use super::statement::{Record, age, draw_token, interval};
use crate::trace::Trace;
use crate::{Error, Fingerprint, Mode, OnDuplicate};

/// Adds a token to the claims of this transaction: the setting `idempotency.claim`, which ends with the transaction,
/// and goes back with a savepoint. `claimed_at = now()` would not tell whose claim it is, because two transactions may
/// start in the same microsecond. `xmin` would not tell either: behind a savepoint it is the id of a subtransaction.
/// A distributed table takes it in no RETURNING.
macro_rules! note_claim {
    ($token:literal) => {
        concat!(
            "pg_catalog.set_config('idempotency.claim', \
             coalesce(pg_catalog.current_setting('idempotency.claim', true), '') || ' ' || ",
            $token,
            "::text, true)"
        )
    };
}

/// Removes a token from the claims of this transaction.
macro_rules! forget_claim {
    ($token:literal) => {
        concat!(
            "pg_catalog.set_config('idempotency.claim', pg_catalog.array_to_string(pg_catalog.array_remove(\
             pg_catalog.string_to_array(pg_catalog.current_setting('idempotency.claim', true), ' '), ",
            $token,
            "::text), ' '), true)"
        )
    };
}

pub(super) use {forget_claim, note_claim};

/// The right to perform. It lasts as long as the claiming transaction, or as long as the lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) token: i64,
    pub(crate) attempt: i32,
}

/// A record that a claim has inserted.
pub(crate) struct Inserted {
    pub(crate) claim: Claim,
    /// The age of the transaction after the insert, by the server's clock (`clock_timestamp`): an age
    /// before the insert would not show a foreign transaction that is younger than the insert takes.
    pub(crate) age: Duration,
}

/// How a try to claim ended.
pub(crate) enum Tried {
    Won(Claim),
    /// An open transaction claims the key.
    Held,
    /// Another call has changed the record meanwhile: look again.
    Overtaken,
    /// The row is gone, or an open transaction that does not hold the key's advisory lock has locked it: a sweep, or an
    /// operator.
    Locked,
}

/// The terms of a claim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) mode: Mode,
    /// A mark has none.
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) retention: Duration,
    pub(crate) on_duplicate: Option<OnDuplicate>,
    /// How long the claim lasts, if it outlives the transaction.
    pub(crate) lease: Option<Duration>,
    pub(crate) max_attempts: Option<NonZeroU32>,
    pub(crate) trace: Trace,
}

impl Record<'_> {
    /// The usual [`claim`](Record::claim). Where the table is distributed, `idempotency.is_plain` refuses the statement
    /// while the server plans it.
    pub(super) async fn insert(self, conn: &mut PgConnection, terms: &Terms) -> Result<Option<Inserted>, Error> {
        let token = draw_token()?;
        let insert = self
            .query(concat! {
                "
                insert /* pg_idempotency: claim */ into idempotency.record
                    (mode, scope, operation, value, fingerprint, token, expires_at, lease_until, completed_at, trace)
                select
                    $8::text, $1::text, $2::text, $3::text, $5::bytea, $4::int8,
                    pg_catalog.statement_timestamp() + $6::interval,
                    pg_catalog.statement_timestamp() + $7::interval,
                    case when $8::text = 'mark' then pg_catalog.statement_timestamp() end,
                    $10::text
                where case
                    -- A replay takes no lock, and no claim waits in the insert for an update or delete of the record.
                    when exists (
                        select from idempotency.record where scope = $1::text and operation = $2::text and value = $3::text
                    ) then false
                    when idempotency.is_plain() then pg_catalog.pg_try_advisory_xact_lock($9::int8)
                end
                on conflict (scope, operation, value) do nothing
                returning ", note_claim!("$4::int8"), ", pg_catalog.clock_timestamp() - pg_catalog.now() as age",
            })
            .bind(token) // $4
            .bind(terms.fingerprint.as_ref().map(Fingerprint::as_bytes)) // $5
            .bind(interval(terms.retention)) // $6
            .bind(terms.lease.map(interval)) // $7
            .bind(terms.mode.as_str()) // $8
            .bind(self.key.lock_id()) // $9
            .bind(terms.trace.as_str()) // $10
            .try_map(|row: PgRow| Ok(Inserted { claim: Claim { token, attempt: 1 }, age: age(&row)? }));
        insert.fetch_optional(conn).await.map_err(Error::of_statement)
    }
}
