//! script/with-postgres cargo run --example transfer
//!
//! A transfer between two accounts that a client may request again: transaction mode, in a transaction of the caller.
//!
//! ```text
//! attempt 1: transferred, Receipt { number: 1, balance_cents: 7500 }
//! attempt 2: transferred before, Receipt { number: 1, balance_cents: 7500 }
//! another amount under the same key: the key was used before for another request; send that request again, or use a new key for another operation (operation "POST /transfers")
//! ```

use pg_idempotency::{Error, Key, Outcome, ensure_idempotent};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

/// The request. Another request under the same key is refused, so everything that matters to it belongs here.
#[derive(Serialize)]
struct Transfer {
    payer: String,
    payee: String,
    cents: i64,
}

/// The response. It is stored with the key, and each retry gets it.
#[derive(Debug, Serialize, Deserialize)]
struct Receipt {
    number: i64,
    balance_cents: i64,
}

/// `key` is the client's: a UUID that it makes before its first attempt and sends again with each retry.
async fn transfer(pool: &PgPool, request: &Transfer, key: &str) -> anyhow::Result<Outcome<Receipt>> {
    let key = Key::new(&request.payer, "POST /transfers", key)?;
    let mut tx = pool.begin().await?;
    let outcome = ensure_idempotent(&mut tx, &key, request, async |conn| -> anyhow::Result<Receipt> {
        let balance_cents = sqlx::query_scalar(
            "update account set cents = cents - $2 where owner = $1 and cents >= $2 returning cents",
        )
        .bind(&request.payer)
        .bind(request.cents)
        .fetch_optional(&mut *conn)
        .await?
        // An error undoes everything, also the claim of the key: the client may try again later.
        .ok_or_else(|| anyhow::anyhow!("{} cannot pay {} cents", request.payer, request.cents))?;
        sqlx::query("update account set cents = cents + $2 where owner = $1")
            .bind(&request.payee)
            .bind(request.cents)
            .execute(&mut *conn)
            .await?;
        let number =
            sqlx::query_scalar("insert into transfer (payer, payee, cents) values ($1, $2, $3) returning number")
                .bind(&request.payer)
                .bind(&request.payee)
                .bind(request.cents)
                .fetch_one(conn)
                .await?;
        Ok(Receipt { number, balance_cents })
    })
    .await?;
    // Unlike `tx.commit()`, it fails if an earlier error has aborted the transaction and nothing would be saved.
    pg_idempotency::commit(tx).await?;
    Ok(outcome)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&pool).await?;
    sqlx::raw_sql(
        "create table if not exists account (owner text primary key, cents bigint not null);
         create table if not exists transfer (
             number bigint generated always as identity, payer text not null, payee text not null, cents bigint not null
         );
         insert into account values ('ada', 10000), ('bob', 0) on conflict do nothing;",
    )
    .execute(&pool)
    .await?;

    let mut request = Transfer { payer: "ada".to_owned(), payee: "bob".to_owned(), cents: 2500 };
    for attempt in 1..=2 {
        match transfer(&pool, &request, "5a1d93c2-6f0e-4c53-9d57-2f1f6f3b8a10").await? {
            Outcome::Performed(receipt) => println!("attempt {attempt}: transferred, {receipt:?}"),
            Outcome::Replayed(receipt) => println!("attempt {attempt}: transferred before, {receipt:?}"),
        }
    }

    request.cents = 9900;
    let error = transfer(&pool, &request, "5a1d93c2-6f0e-4c53-9d57-2f1f6f3b8a10").await.expect_err("another request");
    match error.downcast_ref::<Error>() {
        Some(Error::KeyReused { .. }) => println!("another amount under the same key: {error}"),
        _ => return Err(error),
    }
    Ok(())
}
