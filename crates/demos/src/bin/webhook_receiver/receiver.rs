//! The receiver: a delivery arrives, and the answer says whether the sender has to deliver it again.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use demos::problem::Problem;
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{Error, Key, OnDuplicate};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::{PgConnection, PgPool};
use standardwebhooks::{HEADER_WEBHOOK_ID, Webhook};

pub(crate) const TABLES: &str = "
    -- Nothing is unique in it: only the mark prevents a second row.
    create table account_event (
        number bigint generated always as identity primary key,
        event_id text not null,
        account_id text not null,
        amount bigint not null
    );
    create table account (id text primary key, balance bigint not null);
";

/// For how long an event is remembered. **It must outlast the sender's redelivery schedule**: a later delivery is
/// processed a second time. Stripe delivers for three days by itself, and resends events that are up to 30 days old on
/// request. A few days more cost a few rows.
const RETENTION: Duration = Duration::from_secs(35 * 24 * 60 * 60);

/// An event is a few hundred bytes, and anybody can send a body.
const BODY_LIMIT: usize = 64 * 1024;

/// Where one sender's events arrive.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub(crate) pool: PgPool,
    /// The scope of the key. Only the sender has the secret, and two senders may have events with the same id.
    pub(crate) sender: String,
    /// Each of them counts. While the sender changes its secret, there are two.
    pub(crate) secrets: Arc<[Webhook]>,
    /// Stands in for a bug or an outage: these events fail when they are first processed.
    pub(crate) failing: Arc<Mutex<HashSet<String>>>,
}

/// Members that this receiver does not know are ignored, because a sender may add some.
#[derive(Serialize, Deserialize)]
pub(crate) struct Event {
    pub(crate) account: String,
    /// In cents; negative for a refund.
    pub(crate) amount: i64,
}

pub(crate) fn router(endpoint: Endpoint) -> Router {
    Router::new().route("/webhooks", post(receive)).layer(DefaultBodyLimit::max(BODY_LIMIT)).with_state(endpoint)
}

type Received = ([(&'static str, String); 1], Json<Value>);

async fn receive(State(endpoint): State<Endpoint>, headers: HeaderMap, body: Bytes) -> Result<Received, Problem> {
    // Before anything is marked: a forged event under a real one's id would make the real one a duplicate.
    // The signature is of the bytes that arrived. A body that was parsed and encoded again may have other bytes. The
    // crate also refuses a delivery whose time is more than five minutes away. So a recorded delivery soon becomes
    // useless.
    if !endpoint.secrets.iter().any(|secret| secret.verify(&body, &headers).is_ok()) {
        let detail = "the signature is not of this id, time and body";
        return Err(Problem::new(StatusCode::UNAUTHORIZED, "unsigned", detail));
    }
    // The same in every delivery of the event, and signed.
    let id = headers.get(HEADER_WEBHOOK_ID).and_then(|id| id.to_str().ok()).unwrap_or_default();
    let malformed =
        |error: serde_json::Error| Problem::new(StatusCode::BAD_REQUEST, "malformed-event", error.to_string());
    let event: Event = serde_json::from_slice(&body).map_err(malformed)?;
    let key = Key::new(&endpoint.sender, "account.event", id)?;

    // A duplicate of an event in flight is refused and does not wait: the sender has a queue, and the receiver has a
    // few connections.
    let marking = MarkOptions::new(RETENTION).on_duplicate(OnDuplicate::Reject);
    // Every `?` from here on, and a sender that hangs up, drops the transaction and its mark: the redelivery is the
    // first one again.
    let mut tx = endpoint.pool.begin().await?;
    let marked = marking.mark(&mut tx, &key).await.map_err(unmarked)?;
    if marked == Marked::First {
        process(&mut tx, id, &event).await?;
        if endpoint.failing.lock().unwrap_or_else(PoisonError::into_inner).remove(id) {
            return Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", "the processing failed"));
        }
    }
    // `tx.commit()` would return Ok after an error that the code has swallowed, and save nothing. If the answer to this
    // COMMIT is lost, the sender gets an error and delivers again: a duplicate.
    pg_idempotency::commit(tx).await?;
    // Only now: the sender does not deliver an acknowledged event again.
    let duplicate = marked == Marked::Duplicate;
    Ok(([("idempotent-replayed", duplicate.to_string())], Json(json!({ "received": id }))))
}

/// Events arrive in any order, so nothing here may depend on an earlier one. A sum does not.
///
/// The account's row is the last thing that it locks, so two events of one account wait, and never deadlock.
async fn process(conn: &mut PgConnection, id: &str, event: &Event) -> sqlx::Result<()> {
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
    .bind(id)
    .bind(&event.account)
    .bind(event.amount)
    .execute(conn)
    .await
    .map(drop)
}

/// Not a 409: some senders treat every 4xx as final. The first delivery may still fail, so there is nothing to
/// acknowledge yet.
fn unmarked(error: Error) -> Problem {
    match error {
        Error::InFlight { retry_after, .. } => {
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "in-flight", "another delivery is being processed")
                .with_retry_after(retry_after)
        }
        error => error.into(),
    }
}
