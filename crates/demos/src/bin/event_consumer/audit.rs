//! The books: what stands in the tables, and whether it should.

use std::time::Duration;

use sqlx::{AssertSqlSafe, PgPool};

use crate::worker::LEASE;

/// With fewer, a run proves little.
const FEWEST_KILLS: usize = 10;

/// What is counted, and of which rows.
const COUNTED: [(&str, &str); 22] = [
    ("messages", "message"),
    ("  completed", "message where state = 'completed'"),
    ("  set aside as poison", "message where state = 'poison'"),
    ("requests", "request"),
    ("  that came twice", "request where messages > 1"),
    ("  completed, with one stored result", "request join stored using (request_id) where completed"),
    (
        "  set aside as poison, with no result",
        "request left join stored using (request_id) where set_aside and result is null",
    ),
    ("SIGKILLs to a worker", "delivery where outcome = 'killed'"),
    ("  in the middle: after its effect, before its result", "delivery where claimed_at is not null"),
    ("deliveries", "delivery"),
    ("  performed", "delivery where outcome = 'performed'"),
    ("  replayed", "delivery where outcome = 'replayed'"),
    ("  in flight elsewhere, so delivered again", "delivery where outcome = 'in flight'"),
    ("  failed, so delivered again", "delivery where outcome = 'failed'"),
    ("  lease lost, so delivered again", "delivery where outcome = 'lease lost'"),
    ("  killed, so delivered again", "delivery where outcome = 'killed'"),
    ("  set aside, after three attempts", "delivery where outcome = 'set aside'"),
    ("effects", "effect"),
    ("  completed requests whose effect ran once", "request where completed and effects = 1"),
    ("  twice: an attempt was cut short", "request where completed and effects = 2"),
    ("  three times: two attempts were cut short", "request where completed and effects > 2"),
    ("  of requests that were set aside", "effect join request using (request_id) where set_aside"),
];

/// What must not be. An attempt is cut short by a kill, a failure or a lost lease, and may have had its effect; the
/// third that is cut short is the last, whatever cut it.
const NEVER: [(&str, &str); 9] = [
    ("messages neither completed nor set aside", "message where state not in ('completed', 'poison')"),
    ("requests that always fail, not set aside", "request where body = 'always_fails' and not set_aside"),
    ("requests set aside before three attempts", "request where set_aside and cut_short < 3"),
    ("requests both completed and set aside", "request where set_aside and completed"),
    ("completed requests without an effect", "request where completed and effects = 0"),
    ("effects that nothing accounts for", "request where effects > cut_short + case when completed then 1 else 0 end"),
    (
        "completed requests without one stored result",
        "request left join stored using (request_id) where completed and result is null",
    ),
    ("results that were stored twice", "request where performed > 1"),
    (
        "results that differ from the stored one",
        "message join stored using (request_id) where message.result <> stored.result",
    ),
];

/// Prints the table, and returns what is wrong.
pub(crate) async fn audit(pool: &PgPool, took: Duration) -> anyhow::Result<Vec<String>> {
    let mut wrong = Vec::new();
    println!();
    for (what, rows) in COUNTED {
        println!("{what:<56}{:>5}", count(pool, rows).await?);
    }

    let taken_over = taken_over(pool).await?;
    println!("\ntaken over after a kill, counted from the killed claim  {:>5}", taken_over.len());
    let mut after: Vec<f64> = taken_over.iter().map(|(_, after)| *after).collect();
    after.sort_by(f64::total_cmp);
    if let (Some(min), Some(median), Some(max)) = (after.first(), after.get(after.len() / 2), after.last()) {
        println!("  min {min:.2} s, median {median:.2} s, max {max:.2} s");
        if *min < LEASE.as_secs_f64() {
            wrong.push(format!("a claim was taken over after {min:.3} s, within its lease of {LEASE:?}"));
        }
    }
    for line in taken_over.chunks(4) {
        let line: Vec<String> = line.iter().map(|(request_id, after)| format!("{request_id} {after:.2} s")).collect();
        println!("  {}", line.join("   "));
    }
    if taken_over.len() < FEWEST_KILLS {
        wrong.push(format!("{} claims were taken over after a kill, expected {FEWEST_KILLS}", taken_over.len()));
    }

    println!();
    for (what, rows) in NEVER {
        let counted = count(pool, rows).await?;
        println!("{what:<56}{counted:>5}");
        if counted != 0 {
            wrong.push(format!("{what}: {counted}, expected 0"));
        }
    }
    let killed = count(pool, "delivery where claimed_at is not null").await?;
    println!("{:<56}{:>5}", "kills in the middle that nobody took over", killed - taken_over.len() as i64);
    if taken_over.len() as i64 != killed {
        wrong.push(format!("{killed} kills in the middle, {} claims taken over", taken_over.len()));
    }
    if wrong.is_empty() {
        println!("\nevery count is right, after {:.1} s", took.as_secs_f64());
    }
    Ok(wrong)
}

async fn count(pool: &PgPool, rows: &'static str) -> sqlx::Result<i64> {
    sqlx::query_scalar(AssertSqlSafe(format!("select count(*) from {rows}"))).fetch_one(pool).await
}

/// The requests whose owner was killed, and how long after his claim the next effect came.
async fn taken_over(pool: &PgPool) -> sqlx::Result<Vec<(String, f64)>> {
    let sql = "
        select killed.request_id, extract(epoch from min(later.at) - killed.claimed_at)::float8
        from delivery as killed
        join effect as its on its.delivery = killed.number
        join effect as later on later.request_id = killed.request_id and later.attempt > its.attempt
        where killed.claimed_at is not null
        group by killed.number
        order by killed.request_id, killed.number
    ";
    sqlx::query_as(sql).fetch_all(pool).await
}
