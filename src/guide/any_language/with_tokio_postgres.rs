//! tokio-postgres: the key, the payment and the answer commit in one transaction.

use tokio_postgres::{Client, Error};

const OPERATION: &str = "POST /payments";

/// Makes a payment of this user once for each key. Returns the status and the body of the answer.
///
/// # Errors
///
/// After an error, either nothing was paid, or the outcome is unknown. Send the request again with the same key.
pub async fn pay(client: &mut Client, user: &str, key: &str, cents: i64) -> Result<(i32, Vec<u8>), Error> {
    let request = format!("POST /payments\n{cents}").into_bytes();
    // A transaction that is dropped is rolled back.
    let tx = client.transaction().await?;
    let claim = tx
        .query_one(
            "select outcome, token, status, body
             from idempotency.ensure(
                 scope => $1, operation => $2, value => $3, fingerprint => idempotency.fingerprint($4::bytea)
             )",
            &[&user, &OPERATION, &key, &request],
        )
        .await?;
    let answer = match claim.get("outcome") {
        "claimed" => {
            let insert = "insert into payments (payer, cents) values ($1, $2) returning id";
            let id: i64 = tx.query_one(insert, &[&user, &cents]).await?.get(0);
            let (status, body) = (201, format!("{{\"id\":{id}}}").into_bytes());
            let complete = "select idempotency.complete(
                scope => $1, operation => $2, value => $3, token => $4, status => $5, body => $6::bytea)";
            tx.execute(complete, &[&user, &OPERATION, &key, &claim.get::<_, i64>("token"), &status, &body]).await?;
            (status, body)
        }
        "replayed" => (
            claim.get::<_, Option<i32>>("status").unwrap_or(200),
            claim.get::<_, Option<_>>("body").unwrap_or_default(),
        ),
        "in_flight" => (409, b"ask again with the same key".to_vec()),
        "key_reused" => (422, b"this key was used for another payment".to_vec()),
        other => (500, other.as_bytes().to_vec()),
    };
    tx.commit().await?;
    Ok(answer)
}
