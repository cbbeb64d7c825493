//! diesel-async: the key, the payment and the answer commit in one transaction.

use diesel::sql_types::{BigInt, Binary, Integer, Nullable, Text};
use diesel::{QueryResult, QueryableByName, sql_query};
use diesel_async::{AsyncConnection as _, AsyncPgConnection, RunQueryDsl as _};

const OPERATION: &str = "POST /payments";

#[derive(QueryableByName)]
struct Claim {
    #[diesel(sql_type = Text)]
    outcome: String,
    #[diesel(sql_type = Nullable<BigInt>)]
    token: Option<i64>,
    #[diesel(sql_type = Nullable<Integer>)]
    status: Option<i32>,
    #[diesel(sql_type = Nullable<Binary>)]
    body: Option<Vec<u8>>,
}

#[derive(QueryableByName)]
struct Payment {
    #[diesel(sql_type = BigInt)]
    id: i64,
}

/// Makes a payment of this user once for each key. Returns the status and the body of the answer.
///
/// # Errors
///
/// After an error, either nothing was paid, or the outcome is unknown. Send the request again with the same key.
pub async fn pay(conn: &mut AsyncPgConnection, user: &str, key: &str, cents: i64) -> QueryResult<(i32, Vec<u8>)> {
    conn.transaction(async |conn| {
        let ensure = "select outcome, token, status, body
            from idempotency.ensure($1, $2, $3, idempotency.fingerprint($4::bytea))";
        let ensure = sql_query(ensure).bind::<Text, _>(user).bind::<Text, _>(OPERATION).bind::<Text, _>(key);
        let request = format!("POST /payments\n{cents}").into_bytes();
        let claim: Claim = ensure.bind::<Binary, _>(request).get_result(conn).await?;
        Ok(match (&*claim.outcome, claim.token) {
            ("claimed", Some(token)) => {
                let insert = sql_query("insert into payments (payer, cents) values ($1, $2) returning id");
                let Payment { id } = insert.bind::<Text, _>(user).bind::<BigInt, _>(cents).get_result(conn).await?;
                let (status, body) = (201, format!("{{\"id\":{id}}}").into_bytes());
                let complete = "select idempotency.complete($1, $2, $3, $4, status => $5, body => $6::bytea)";
                let complete =
                    sql_query(complete).bind::<Text, _>(user).bind::<Text, _>(OPERATION).bind::<Text, _>(key);
                let complete = complete.bind::<BigInt, _>(token).bind::<Integer, _>(status);
                complete.bind::<Binary, _>(body.clone()).execute(conn).await?;
                (status, body)
            }
            ("replayed", _) => (claim.status.unwrap_or(200), claim.body.unwrap_or_default()),
            ("in_flight", _) => (409, b"ask again with the same key".to_vec()),
            ("key_reused", _) => (422, b"this key was used for another payment".to_vec()),
            (other, _) => (500, other.as_bytes().to_vec()),
        })
    })
    .await
}
