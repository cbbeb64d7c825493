//! script/with-postgres cargo run --example consumer
//!
//! A consumer of a queue that delivers at least once, and out of order after a rebalance: mark mode, batch by batch.
//!
//! ```text
//! messages [1, 2, 3, 4]: 4 of 4 are new
//! messages [3, 4, 5, 6]: 2 of 4 are new
//! 94 packets of tea are left
//! ```

use std::time::Duration;

use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{Error, Key};
use sqlx::PgPool;

/// Longer than the queue can hold a message back.
const WINDOW: Duration = Duration::from_secs(7 * 24 * 3600);

/// A message of the queue.
struct Message {
    id: u64,
    article: &'static str,
    sold: i64,
}

/// Processes the messages that are new, in one transaction with their marks. The caller acknowledges the batch to the
/// queue if this returns `Ok`; after an error, including [`Error::InFlight`], it leaves the batch to be delivered
/// again.
async fn consume(pool: &PgPool, batch: &[Message]) -> Result<usize, Error> {
    let keys: Vec<Key> = batch
        .iter()
        .map(|message| Key::new("warehouse", "article.sold", message.id.to_string()))
        .collect::<Result<_, _>>()?;
    let mut tx = pool.begin().await?;
    // One statement for the whole batch. The second occurrence of a key in it is a duplicate.
    let marked = MarkOptions::new(WINDOW).mark_many(&mut tx, &keys).await?;
    let new = || batch.iter().zip(&marked).filter(|(_, marked)| **marked == Marked::First);
    for (message, _) in new() {
        sqlx::query("update stock set left_over = left_over - $2 where article = $1")
            .bind(message.article)
            .bind(message.sold)
            .execute(&mut *tx)
            .await?;
    }
    pg_idempotency::commit(tx).await?;
    Ok(new().count())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&pool).await?;
    sqlx::raw_sql(
        "create table if not exists stock (article text primary key, left_over bigint not null);
         insert into stock values ('tea', 100) on conflict do nothing;",
    )
    .execute(&pool)
    .await?;

    let sold = |id| Message { id, article: "tea", sold: 1 };
    // The second batch repeats half of the first one, as after a consumer that died before it acknowledged.
    for batch in [[1, 2, 3, 4], [3, 4, 5, 6]] {
        let messages = batch.map(sold);
        println!("messages {batch:?}: {} of {} are new", consume(&pool, &messages).await?, messages.len());
    }
    let left: i64 = sqlx::query_scalar("select left_over from stock where article = 'tea'").fetch_one(&pool).await?;
    println!("{left} packets of tea are left");
    Ok(())
}
