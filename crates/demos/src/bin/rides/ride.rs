//! The operation: a ride is recorded, charged, receipted and announced by text, in four steps.

use std::num::NonZeroU32;
use std::time::Duration;

use demos::gateway::Receipt;
use demos::outside::{Failure, Outside, reference};
use pg_idempotency::lease::{Lease, LeaseOptions, Policy};
use pg_idempotency::{Key, Outcome};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};

pub(crate) const TABLES: &str = "
    -- No unique constraints: only the steps prevent a second row.
    create table ride (
        number bigint generated always as identity primary key,
        phone text not null,
        origin text not null,
        destination text not null
    );
    create table receipt (ride bigint not null, charge bigint not null);
";

/// 40 seconds are usual. This one has to be watched.
const LEASE: Duration = Duration::from_secs(2);
/// Killed workers use up attempts, and there are many here. Ten are usual.
pub(crate) const ATTEMPTS: NonZeroU32 = NonZeroU32::new(50).expect("50 is not 0");
/// A minute is usual.
const RESUME_AFTER: Duration = Duration::from_millis(200);

/// The body of a request. It is stored in plain text until the ride is booked, so the card is a token.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewRide {
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) card: String,
    pub(crate) phone: String,
    pub(crate) cents: i64,
}

/// The response, which every repeat gets.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Booking {
    ride: i64,
    charge: Receipt,
    text: Receipt,
}

#[derive(Clone)]
pub(crate) struct Rides {
    pub(crate) pool: PgPool,
    pub(crate) outside: Outside,
    /// A resumer takes the operations of one name, so each run has its own.
    pub(crate) operation: String,
}

/// The options of the operation, the same for requests and resumers.
pub(crate) fn leasing() -> LeaseOptions {
    let leasing = LeaseOptions::new(Policy::InSteps { lease: LEASE });
    leasing.store_request(true).max_attempts(ATTEMPTS).resume_after(RESUME_AFTER)
}

impl Rides {
    pub(crate) async fn book(&self, key: &Key, new: &NewRide) -> Result<Outcome<Booking>, Failure> {
        leasing().run(&self.pool, key, new, async |lease| self.perform(lease, new).await).await
    }

    /// One attempt. It continues after the last step that an earlier attempt has finished.
    pub(crate) async fn perform(&self, lease: &Lease, new: &NewRide) -> Result<Booking, Failure> {
        let ride = lease.step("ride", async |conn| insert_ride(conn, new).await).await?;
        let charge = lease
            .step_at_least_once("charge", async |step| {
                self.outside.charge(&new.card, new.cents, step.downstream_key()).await
            })
            .await?;
        lease.step("receipt", async |conn| insert_receipt(conn, ride, charge).await).await?;
        let text = lease
            .step_at_most_once("text", async |step| {
                let reference = reference(step.downstream_key(), lease.attempt());
                match self.outside.text(reference, &new.phone).await {
                    // Every other error leaves the text to the operator.
                    Err(error @ Failure::NotDone(_)) => Err(step.not_performed(error)),
                    sent => sent,
                }
            })
            .await?;
        Ok(Booking { ride, charge, text })
    }
}

async fn insert_ride(conn: &mut PgConnection, new: &NewRide) -> Result<i64, Failure> {
    let insert = "insert into ride (phone, origin, destination) values ($1, $2, $3) returning number";
    let insert = sqlx::query_scalar(insert).bind(&new.phone).bind(&new.from).bind(&new.to);
    Ok(insert.fetch_one(conn).await?)
}

async fn insert_receipt(conn: &mut PgConnection, ride: i64, charge: Receipt) -> Result<(), Failure> {
    let insert = "insert into receipt (ride, charge) values ($1, $2)";
    sqlx::query(insert).bind(ride).bind(charge.number as i64).execute(conn).await?;
    Ok(())
}
