//! The books: what was answered, and what stands in the tables, against what should.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sqlx::PgPool;

use crate::forger::{FORGED, STALE};
use crate::plan::Plan;
use crate::tally::Tally;

pub(crate) struct Audit {
    pool: PgPool,
    sender: String,
    plan: Arc<Plan>,
    lines: Vec<String>,
    pub(crate) wrong: Vec<String>,
}

impl Audit {
    pub(crate) fn new(pool: PgPool, sender: String, plan: Arc<Plan>) -> Self {
        Self { pool, sender, plan, lines: Vec::new(), wrong: Vec::new() }
    }

    /// Before the first real delivery: afterwards a trace of the forger's could not be told from the real event's.
    pub(crate) async fn forged(&mut self, forged: Tally) -> sqlx::Result<()> {
        let (marks, (events, _)) = (self.marks().await?, self.events().await?);
        self.check("forged, and refused", forged.forged, FORGED);
        self.check("stale, and refused", forged.stale, STALE);
        self.check("  marks that these left", marks, 0);
        self.check("  events that these left", events, 0);
        Ok(())
    }

    pub(crate) async fn delivered(&mut self, hung_up: Tally, mut delivered: Tally, took: Duration) -> sqlx::Result<()> {
        // Perhaps more often than once.
        self.check("hung up on, and in flight when it came again", hung_up.in_flight.min(1), 1);
        self.check("  first when it came once more", hung_up.first, 1);

        // It fails once, and that is heard only where the receiver has noticed the hang-up and has given up before.
        let failures = self.plan.failures() + hung_up.failed;
        delivered.add(hung_up);
        let (acknowledged, events) = (self.plan.deliveries(), self.plan.events);
        let again = delivered.failed + delivered.in_flight + delivered.unavailable;
        self.check("deliveries", delivered.deliveries(), acknowledged + again);
        self.check("  first", delivered.first, events);
        self.check("  duplicates", delivered.duplicates, acknowledged - events);
        self.check("  failed, and delivered again", delivered.failed, failures);
        // How many of these two, nobody knows beforehand.
        self.line("  in flight elsewhere, and delivered again", delivered.in_flight);
        self.line("  unavailable, and delivered again", delivered.unavailable);
        self.check("  anything else", delivered.errors + delivered.forged + delivered.stale, 0);
        self.wrong.extend(delivered.first_error.take().map(|error| format!("the first of these: {error}")));

        let (rows, ids) = self.events().await?;
        self.check("rows in account_event", rows, events);
        self.check("  of different events", ids, events);
        let (balances, expected) = (self.balances().await?, self.plan.balances());
        let right = expected.iter().filter(|(account, balance)| balances.get(*account) == Some(balance)).count();
        self.check("accounts", balances.len(), expected.len());
        self.check("  whose balance is the sum of their events", right, expected.len());
        let marks = self.marks().await?;
        self.check("marks in idempotency.record", marks, events);

        println!();
        self.lines.iter().for_each(|line| println!("{line}"));
        let (p50, p99) = (delivered.percentile(0.5), delivered.percentile(0.99));
        let (seconds, pace) = (took.as_secs_f64(), delivered.deliveries() as f64 / took.as_secs_f64());
        println!("\nlatency p50 {p50:.1} ms, p99 {p99:.1} ms; {seconds:.1} s, {pace:.0} deliveries a second");
        Ok(())
    }

    fn check(&mut self, what: &str, counted: usize, expected: usize) {
        self.line(what, counted);
        if counted != expected {
            self.wrong.push(format!("{}: {counted}, expected {expected}", what.trim()));
        }
    }

    fn line(&mut self, what: &str, counted: usize) {
        self.lines.push(format!("{what:<48}{counted:>8}"));
    }

    async fn marks(&self) -> sqlx::Result<usize> {
        let sql = "select count(*) from idempotency.record where scope = $1::text and mode = 'mark'";
        let marks: i64 = sqlx::query_scalar(sql).bind(&self.sender).fetch_one(&self.pool).await?;
        Ok(marks as usize)
    }

    /// Rows, and different events among them.
    async fn events(&self) -> sqlx::Result<(usize, usize)> {
        let sql = "select count(*), count(distinct event_id) from account_event";
        let (rows, ids): (i64, i64) = sqlx::query_as(sql).fetch_one(&self.pool).await?;
        Ok((rows as usize, ids as usize))
    }

    async fn balances(&self) -> sqlx::Result<BTreeMap<String, i64>> {
        let balances: Vec<(String, i64)> =
            sqlx::query_as("select id, balance from account").fetch_all(&self.pool).await?;
        Ok(balances.into_iter().collect())
    }
}
