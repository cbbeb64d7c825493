//! An event: what the sender reports, and what becomes of it here.

use serde::{Deserialize, Serialize};
use sqlx::PgConnection;

/// Members that this receiver does not know are passed over: a sender may add some.
#[derive(Serialize, Deserialize)]
pub(crate) struct Event {
    /// The sender's, the same in every delivery: the value of the key.
    pub(crate) id: String,
    pub(crate) account: String,
    /// In cents; negative for a refund.
    pub(crate) amount: i64,
}

impl Event {
    /// Processes it, in the transaction that has marked it. Events come in any order, so that nothing here may depend
    /// on the one before: a sum does not.
    ///
    /// The account's row is the last thing that it locks. Two events of one account wait for each other, and deadlock
    /// never.
    pub(crate) async fn process(&self, conn: &mut PgConnection) -> sqlx::Result<()> {
        sqlx::query(
            "
            with event as (
                insert into account_event (event_id, account_id, amount)
                values ($1::text, $2::text, $3::int8)
                returning account_id, amount
            )
            insert into account (id, balance)
            select account_id, amount
            from event
            on conflict (id) do update
            set balance = account.balance + excluded.balance
            ",
        )
        .bind(&self.id)
        .bind(&self.account)
        .bind(self.amount)
        .execute(conn)
        .await
        .map(drop)
    }
}
