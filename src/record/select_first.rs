//! The option *select first*: a replay in one round trip, before any transaction begins.

use sqlx::{PgConnection, Row as _};

use super::claim::Terms;
use super::statement::Record;
use crate::fingerprint::Comparison;
use crate::observe;
use crate::outcome::Response;

impl Record<'_> {
    /// Looks for a response to replay. Returns `None` if it finds anything else, or if the statement fails: the claim
    /// that follows meets the same state, and returns the answer or the error. Also returns `None` if the connection is
    /// in an open transaction that has written something, because the record that it sees may not be committed.
    ///
    /// Without prepared statements this does nothing. sqlx would send the statement in two messages. Between the two, a
    /// pooler in transaction mode may change the server connection, and on the other connection the nameless statement
    /// is another client's.
    pub(crate) async fn select_first(self, conn: &mut PgConnection, terms: &Terms) -> Option<Response> {
        if !self.deployment.prepared || !self.deployment.saves_round_trips() {
            return None;
        }
        let row = self
            .query(
                "
                select /* pg_idempotency: select first */
                    fingerprint, response_status, response_headers::text as response_headers, response_body, trace
                from idempotency.record
                where scope = $1::text and operation = $2::text and value = $3::text
                    and mode = $4::text
                    and completed_at is not null
                    and expires_at > pg_catalog.statement_timestamp()
                    and pg_catalog.pg_current_xact_id_if_assigned() is null
                    and idempotency.is_plain()
                ",
            )
            .bind(terms.mode.as_str()) // $4
            .fetch_optional(conn)
            .await
            .ok()??;
        if terms.fingerprint?.compare(row.try_get("fingerprint").ok()?) != Comparison::Same {
            return None;
        }
        observe::replaying(row.try_get("trace").ok()?);
        Response::of(&row).ok()
    }
}
