//! script/with-postgres cargo run --example ride
//!
//! A ride that is booked, charged and announced by text: a lease with `InSteps`. The first attempt fails after the
//! charge, its client does not come back, and a resumer finishes the operation.
//!
//! ```text
//! the gateway charges 1250 cents to tok_4711
//! the client gets an error, and does not come back: the text gateway is busy
//! the gateway sends a text to +12025550101
//! a late retry of the client: Replayed(Ride { number: 1, charge: "ch_1", text: 2 })
//! ```

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::ensure;
use pg_idempotency::Key;
use pg_idempotency::lease::{Lease, LeaseOptions, Policy, Resumer};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::sync::Notify;

const POLICY: Policy = Policy::InSteps { lease: Duration::from_secs(40) };
/// A week for a person who settles a step in doubt. After the retention, a retry books, charges and announces again.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// A ride that fails each time is left to an operator after ten attempts.
const ATTEMPTS: NonZeroU32 = NonZeroU32::new(10).expect("ten");
/// Here the client never comes back. The default of a minute gives it time for a retry.
const RESUME_AFTER: Duration = Duration::from_millis(100);

/// The claim stores this body in plain text, so it has a token for the card, and not the card's number.
#[derive(Serialize, Deserialize)]
struct Request {
    rider: String,
    phone: String,
    card: String,
    cents: i64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Ride {
    number: i64,
    charge: String,
    text: u32,
}

/// Stand-ins for the clients of two gateways.
#[derive(Default)]
struct Gateways {
    charges: AtomicU32,
    text_requests: AtomicU32,
    text_sent: Notify,
}

impl Gateways {
    /// A real gateway ignores a second request with the same idempotency key.
    async fn charge(&self, card: &str, cents: i64, _idempotency_key: &str) -> anyhow::Result<String> {
        println!("the gateway charges {cents} cents to {card}");
        Ok(format!("ch_{}", 1 + self.charges.fetch_add(1, Ordering::SeqCst)))
    }

    /// This gateway does not deduplicate. A person finds a text by its reference. The gateway refuses the first
    /// request, and promises that it has sent nothing.
    async fn text(&self, phone: &str, _reference: &str) -> anyhow::Result<u32> {
        let requests = 1 + self.text_requests.fetch_add(1, Ordering::SeqCst);
        ensure!(requests > 1, "the text gateway is busy");
        println!("the gateway sends a text to {phone}");
        self.text_sent.notify_one();
        Ok(requests)
    }
}

/// The work of an attempt, the client's or a resumer's. A step that an earlier attempt has finished returns its stored
/// result. The code between the steps runs in each attempt.
async fn book(gateways: &Gateways, lease: &Lease, request: &Request) -> anyhow::Result<Ride> {
    // The row and the step's result commit together.
    let insert = "insert into ride (rider) values ($1) returning number";
    let number = lease
        .step("ride", async |conn| -> anyhow::Result<i64> {
            Ok(sqlx::query_scalar(insert).bind(&request.rider).fetch_one(conn).await?)
        })
        .await?;
    // After a crash in the middle, this step is performed again, and the gateway knows the key.
    let charge = lease
        .step_at_least_once("charge", async |step| {
            gateways.charge(&request.card, request.cents, step.downstream_key()).await
        })
        .await?;
    // After a crash in the middle, an operator settles this step. Each error of this gateway means that it sent
    // nothing.
    let text = lease
        .step_at_most_once("text", async |step| {
            let sent = gateways.text(&request.phone, step.downstream_key()).await;
            sent.map_err(|error| step.not_performed(error))
        })
        .await?;
    Ok(Ride { number, charge, text })
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&pool).await?;
    let table = "create table if not exists ride (number bigint generated always as identity, rider text not null)";
    sqlx::raw_sql(table).execute(&pool).await?;

    let gateways = Gateways::default();
    let options = LeaseOptions::new(POLICY).retention(RETENTION).store_request(true);
    let options = options.max_attempts(ATTEMPTS).resume_after(RESUME_AFTER);
    let rider = format!("user:{}", uuid::Uuid::new_v4());
    let key = Key::new(&rider, "POST /rides", "5a1d93c2")?;
    let request = Request { rider, phone: "+12025550101".to_owned(), card: "tok_4711".to_owned(), cents: 1250 };
    let request_of_client =
        async || options.run(&pool, &key, &request, async |lease| book(&gateways, lease, &request).await).await;

    let error = request_of_client().await.expect_err("the text gateway is busy");
    println!("the client gets an error, and does not come back: {error}");
    let resumer = Resumer::new(options, key.operation())?.interval(Duration::from_millis(100));
    // In a service this runs in a task of its own, until the service ends.
    let work = async |lease: &Lease, request: Request| book(&gateways, lease, &request).await;
    resumer.run(&pool, gateways.text_sent.notified(), work).await;
    let ride = request_of_client().await?;
    println!("a late retry of the client: {ride:?}");
    let count = "select count(*) from ride where rider = $1";
    let rides: i64 = sqlx::query_scalar(count).bind(&request.rider).fetch_one(&pool).await?;
    let charges = gateways.charges.load(Ordering::SeqCst);
    ensure!(ride.is_replayed() && (rides, charges) == (1, 1), "not exactly once");
    Ok(())
}
