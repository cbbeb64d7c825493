//! The books: what each customer got, and whether it should be so.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use sqlx::PgPool;

use crate::client::{Answer, Customer};
use crate::crew::Crew;
use crate::gateways::Gateways;
use crate::operator::Decided;

/// With fewer attempts that were cut short, a run proves little.
const FEWEST_CUT_SHORT: i64 = 10;

/// The operations that are neither booked nor declined.
pub(crate) async fn unfinished(pool: &PgPool, operation: &str) -> sqlx::Result<i64> {
    let count = "select count(*) from idempotency.record where operation = $1 and completed_at is null";
    sqlx::query_scalar(count).bind(operation).fetch_one(pool).await
}

pub(crate) struct Audit<'a> {
    pub(crate) pool: &'a PgPool,
    pub(crate) operation: &'a str,
    pub(crate) gateways: &'a Gateways,
    pub(crate) customers: &'a [Customer],
    /// What each customer got in the storm, and once more at the end.
    pub(crate) answers: Vec<Vec<Answer>>,
    /// Counted before each customer asked once more.
    pub(crate) left_unfinished: i64,
    pub(crate) decided: &'a Decided,
}

impl Audit<'_> {
    /// Prints the counts, and returns what is wrong.
    pub(crate) async fn run(self, crew: &Crew) -> anyhow::Result<Vec<String>> {
        let mut wrong = Vec::new();
        let mut check = |what: String, counted: i64, expected: i64| {
            if counted != expected {
                wrong.push(format!("{what}: {counted}, expected {expected}"));
            }
        };
        let rows = self.rows().await?;
        for (customer, answers) in self.customers.iter().zip(&self.answers) {
            let (rides, receipts) = rows.get(&customer.ride.phone).copied().unwrap_or_default();
            let charges = self.gateways.charges_of(&customer.ride.card) as i64;
            let texts = self.gateways.texts_to(&customer.ride.phone) as i64;
            let paid = i64::from(!customer.is_declined());
            let of = |what: &str| format!("{what} of customer {}", customer.number);
            check(of("rides"), rides, 1);
            check(of("charges"), charges, paid);
            check(of("receipts"), receipts, paid);
            check(of("texts"), texts, paid);
            let differing = answers.iter().filter(|answer| **answer != answers[0]).count();
            check(of("differing answers"), differing as i64, 0);
        }
        check("rides left unfinished".to_owned(), self.left_unfinished, 0);
        let (attempts, again): (i64, i64) = sqlx::query_as(
            "select sum(attempt), count(*) filter (where attempt > 1) from idempotency.record where operation = $1",
        )
        .bind(self.operation)
        .fetch_one(self.pool)
        .await?;
        let [resolved, released] = [&self.decided.resolved, &self.decided.released].map(|n| n.load(Ordering::Relaxed));

        println!("{:<60}{:>6}", "customers", self.customers.len());
        for (what, count) in [
            ("  who never came back", self.customers.iter().filter(|customer| !customer.comes_back()).count()),
            ("  whose card was declined", self.customers.iter().filter(|customer| customer.is_declined()).count()),
            ("answers that they got", self.answers.iter().map(Vec::len).sum()),
            ("SIGKILLs to a worker", crew.killed),
            ("SIGSTOPs to a worker, for longer than its lease", crew.suspended),
            ("attempts", attempts as usize),
            ("  rides that took more than one", again as usize),
            ("charges that the gateway recognised by their key", self.gateways.deduplicated()),
            ("texts in doubt that were sent: the operator resolved them", resolved),
            ("texts in doubt that were not sent: the operator released them", released),
            ("rides left unfinished", self.left_unfinished as usize),
        ] {
            println!("{what:<60}{count:>6}");
        }
        if again < FEWEST_CUT_SHORT || resolved == 0 || released == 0 {
            wrong.push("too little went wrong, so this run proves nothing".to_owned());
        }
        Ok(wrong)
    }

    /// The number of rides and receipts for each phone.
    async fn rows(&self) -> sqlx::Result<HashMap<String, (i64, i64)>> {
        let counted: Vec<(String, i64, i64)> = sqlx::query_as(
            "
            select phone, count(distinct number), count(receipt.charge)
            from ride
            left join receipt on receipt.ride = ride.number
            group by phone
            ",
        )
        .fetch_all(self.pool)
        .await?;
        Ok(counted.into_iter().map(|(phone, rides, receipts)| (phone, (rides, receipts))).collect())
    }
}
