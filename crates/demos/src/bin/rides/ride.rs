//! The operation: a ride is recorded, charged, receipted and announced by text, in four steps.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Lease, Leasing, Policy};
use pg_idempotency::{Error, Key, Outcome};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use crate::gateways::{ChargeOrder, Receipt, TextOrder};
use crate::mutant::Mutant;
use crate::outside::{Charged, Failure, Outside};

/// 40 seconds are usual. This one has to be watched.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// Killed and suspended workers use up attempts, and there are many here. Ten are usual.
pub(crate) const ATTEMPTS: NonZeroU32 = NonZeroU32::new(50).expect("50 is not 0");
/// A minute is usual.
pub(crate) const RESUME_AFTER: Duration = Duration::from_millis(200);

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
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub(crate) enum Booking {
    Booked { ride: i64, charge: Receipt, text: Receipt },
    Declined { ride: i64 },
}

#[derive(Clone)]
pub(crate) struct Rides {
    pub(crate) pool: PgPool,
    pub(crate) outside: Outside,
    /// A resumer takes the operations of one name, so each run has its own.
    pub(crate) operation: String,
    pub(crate) mutant: Option<Mutant>,
}

/// The options of the operation. Clients, resumers and tests use the same.
pub(crate) fn leasing() -> Result<Leasing, Error> {
    let leasing = Leasing::new(Policy::InSteps { lease: LEASE })?;
    Ok(leasing.with_stored_request(true).with_max_attempts(ATTEMPTS).with_resume_after(RESUME_AFTER)?)
}

/// The name under which the text gateway sees an attempt. An operator can derive it.
pub(crate) fn reference(downstream_key: &str, attempt: u32) -> String {
    format!("{downstream_key}-{attempt}")
}

impl Rides {
    pub(crate) async fn book(&self, key: &Key, new: &NewRide) -> Result<Outcome<Booking>, Failure> {
        leasing()?.ensure(&self.pool, key, new, async |lease| self.perform(lease, new).await).await
    }

    /// One attempt. It continues after the last step that an earlier attempt has finished.
    pub(crate) async fn perform(&self, lease: &Lease, new: &NewRide) -> Result<Booking, Failure> {
        let ride = match self.mutant {
            Some(Mutant::RideWithoutStep) => insert_ride(&mut *self.pool.acquire().await?, new).await?,
            _ => lease.step("ride", async |conn| insert_ride(conn, new).await).await?,
        };
        let order = ChargeOrder { card: new.card.clone(), cents: new.cents };
        let charged = lease
            .step_at_least_once("charge", async |step| {
                let key = match self.mutant {
                    Some(Mutant::ChargeWithNewKey) => Uuid::new_v4().to_string(),
                    _ => step.downstream_key(),
                };
                self.outside.charge(&order, &key).await
            })
            .await?;
        let Charged::Paid(charge) = charged else { return Ok(Booking::Declined { ride }) };
        lease.step("receipt", async |conn| insert_receipt(conn, ride, charge).await).await?;
        let reference = reference(&lease.downstream_key(), lease.attempt());
        let order = TextOrder { reference, phone: new.phone.clone() };
        let text = match self.mutant {
            Some(Mutant::TextNotBegun) => {
                lease.step_at_least_once("text", async |_| self.outside.text(&order).await).await?
            }
            _ => {
                lease
                    .step_at_most_once("text", async |step| match self.outside.text(&order).await {
                        // Without these words, each error leaves the text to the operator.
                        Err(error @ Failure::NotDone(_)) => Err(step.not_performed(error)),
                        sent => sent,
                    })
                    .await?
            }
        };
        Ok(Booking::Booked { ride, charge, text })
    }
}

/// The tables have no unique constraint on what must happen once: only the steps prevent a second row.
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
