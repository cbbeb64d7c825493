//! script/with-postgres cargo run --example lease
//!
//! A charge at a payment gateway, which cannot commit together with a row: lease mode.
//!
//! ```text
//! attempt 1
//!   the gateway charges 1250 cents, key 38f1891177fad92fe245a02b0660cd83
//!   charged: ch_17
//! attempt 2
//!   charged before: ch_17
//! ```

use std::time::Duration;

use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::{Error, Key, Outcome};
use serde::Serialize;
use sqlx::PgPool;

/// If this process dies during the charge, the next caller charges again. That is safe only because the gateway ignores
/// a second request with the same downstream key. For a gateway that does not, take `Policy::AtMostOnce`, as the table
/// in `src/guide/promises.md` shows.
const POLICY: Policy = Policy::AtLeastOnce { lease: Duration::from_secs(40) };
/// A week for the late retries of a charge. After the retention, a retry charges again.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);

#[derive(Serialize)]
struct Order {
    number: u64,
    cents: i64,
}

/// A stand-in for the gateway's client. It answers with the charge's id.
async fn charge(order: &Order, idempotency_key: &str) -> anyhow::Result<String> {
    println!("  the gateway charges {} cents, key {idempotency_key}", order.cents);
    Ok(format!("ch_{}", order.number))
}

async fn pay(pool: &PgPool, order: &Order) -> anyhow::Result<Outcome<String>> {
    let key = Key::new("shop", "order.charge", order.number.to_string())?;
    // The lease is renewed while the work runs. No connection and no transaction is held meanwhile.
    let options = LeaseOptions::new(POLICY).retention(RETENTION);
    options.run(pool, &key, order, async |lease| charge(order, &lease.downstream_key()).await).await
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&pool).await?;

    let order = Order { number: 17, cents: 1250 };
    for attempt in 1..=2 {
        println!("attempt {attempt}");
        match pay(&pool, &order).await {
            Ok(Outcome::Performed(charge)) => println!("  charged: {charge}"),
            Ok(Outcome::Replayed(charge)) => println!("  charged before: {charge}"),
            Err(error) => match error.downcast_ref::<Error>() {
                Some(Error::InFlight { retry_after, .. }) => {
                    println!("  another worker has it; again in {retry_after:?}")
                }
                // Under AtMostOnce: an operator looks at the gateway, then runs `idempotency-janitor resolve` or
                // `release`.
                Some(Error::Indeterminate { .. }) => println!("  nobody knows whether it was charged"),
                _ => return Err(error),
            },
        }
    }
    Ok(())
}
