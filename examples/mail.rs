//! script/with-postgres cargo run --example mail
//!
//! An order and the mail that confirms it. The mail does not belong to the response, so the order's transaction only
//! writes a job. A worker sends the mail under a lease, with the id of the job as the key.
//!
//! ```text
//! the order: 1, first call
//! the retry: 1, replayed
//! mail to ada@example.org about order 1
//! 1 order, 0 jobs
//! ```

use std::time::Duration;

use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::{Error, Idempotency, Key, Outcome};
use serde::Serialize;
use sqlx::{Executor as _, PgPool};

/// After a crash, the next worker sends the mail again, so a mail can arrive twice and is never lost. If a second mail
/// would do harm, take `Policy::AtMostOnce`.
const POLICY: Policy = Policy::AtLeastOnce { lease: Duration::from_secs(40) };

#[derive(Serialize)]
struct Order {
    mail: String,
}

async fn place(pool: &PgPool, key: &Key, order: &Order) -> Result<Outcome<i64>, Error> {
    Idempotency::new()
        .run(pool, key, order, async |conn| {
            let insert = "insert into purchase default values returning id";
            let id: i64 = sqlx::query_scalar(insert).fetch_one(&mut *conn).await?;
            // The job commits with the order and with the response, so a retry writes no second job.
            sqlx::query("insert into mail_job (id, address, purchase) values (gen_random_uuid(), $1, $2)")
                .bind(&order.mail)
                .bind(id)
                .execute(conn)
                .await?;
            Ok(id)
        })
        .await
}

/// A stand-in for the client of the mail service, which receives the key of the mail.
async fn send(address: &str, purchase: i64, _idempotency_key: &str) -> anyhow::Result<()> {
    println!("mail to {address} about order {purchase}");
    Ok(())
}

/// Sends the mail of the oldest job. A worker calls this in a loop, and pauses after `false`. In a real worker, a mail
/// that has failed waits for a later attempt, so that the other mails do not wait for it.
async fn work(pool: &PgPool) -> anyhow::Result<bool> {
    let oldest = "select id::text, address, purchase from mail_job order by purchase limit 1";
    let Some(job) = sqlx::query_as::<_, (String, String, i64)>(oldest).fetch_optional(pool).await? else {
        return Ok(false);
    };
    let (id, address, purchase) = &job;
    let key = Key::new("shop", "mail.sent", id)?;
    let sent = LeaseOptions::new(POLICY)
        .run(pool, &key, &job, async |lease| send(address, *purchase, &lease.downstream_key()).await)
        .await;
    match sent {
        // Also if another worker has sent the mail and then died: `run` has returned, so the job is done.
        Ok(_) => {
            let mut tx = pool.begin().await?;
            // If the table is protected, the database refuses a write that belongs to no key.
            tx.execute("set local idempotency.claim = 'exempt'").await?;
            sqlx::query("delete from mail_job where id::text = $1").bind(id).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(true)
        }
        Err(error) if error.downcast_ref::<Error>().is_some_and(|error| matches!(error, Error::InFlight { .. })) => {
            // Another worker sends this mail.
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&pool).await?;
    let tables = "
        create table if not exists purchase (id bigint generated always as identity primary key);
        -- A random id, because a number can return after a restore, while its key is still stored.
        create table if not exists mail_job (id uuid primary key, address text not null, purchase bigint not null)
    ";
    sqlx::raw_sql(tables).execute(&pool).await?;

    let key = Key::new("customer-7", "order.placed", "a key from the client")?;
    let order = Order { mail: "ada@example.org".to_owned() };
    for call in ["order", "retry"] {
        match place(&pool, &key, &order).await? {
            Outcome::Performed(id) => println!("the {call}: {id}, first call"),
            Outcome::Replayed(id) => println!("the {call}: {id}, replayed"),
        }
    }
    while work(&pool).await? {}
    let left = "select (select count(*) from purchase), (select count(*) from mail_job)";
    let (orders, jobs): (i64, i64) = sqlx::query_as(left).fetch_one(&pool).await?;
    println!("{orders} order, {jobs} jobs");
    Ok(())
}
