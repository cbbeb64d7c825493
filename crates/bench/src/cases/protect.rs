//! What it costs that the database refuses effects outside an idempotent operation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pg_idempotency::OnEscape;
use pg_idempotency::mark::mark;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};

use crate::alternatives::by_hand;
use crate::bench::Bench;
use crate::client::{key, next_call, response};
use crate::measure::{interleave_from_empty, median, named};
use crate::report::Report;

pub(crate) const ABOUT: &str = "\
Every claim leaves a mark on its transaction, whether or not a table is protected: a setting, for which the trigger of a \
protected table asks once a statement. *Without the mark* is the same SQL by hand without that setting. The trigger's cost is \
that of one client's inserts into a protected and an unprotected table, in turns, in transactions with a claim.";

const NAME: &str = "protect";
const WITHOUT: &str = "the same SQL by hand, without the mark";

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    let (setting, response): (_, Arc<str>) = (bench.plain(), response(300).into());
    bench.clear().await?;
    let mut without = bench.by_hand.without_mark()?.first_call(response.clone());
    WITHOUT.clone_into(&mut without.name);
    let ways = vec![bench.by_hand.first_call(response), without];
    let measured = interleave_from_empty(bench, setting, 8, ways).await?;
    report.speeds(NAME, "First calls with and without the mark, 8 clients", setting.told(), "calls", &measured);
    let ratio =
        named(&measured, by_hand::NAME).zip(named(&measured, WITHOUT)).map(|(with, without)| with.against(without));
    report.figure(NAME, "First call: rate with the mark over that without", None, ratio);
    report.figure(NAME, "Protected table: µs that a statement takes more", None, Some(trigger(bench).await?));
    bench.clear().await
}

/// The difference of the medians, in microseconds.
async fn trigger(bench: &Bench) -> anyhow::Result<f64> {
    let pool = bench.plain().pool(1).await?;
    pool.execute("create table guarded (note text not null); create table unguarded (note text not null)").await?;
    pg_idempotency::protect(&pool, "guarded", OnEscape::Refuse).await?;
    let mut conn = pool.acquire().await?;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..bench.scale.counted / 100 {
        let mut tx = conn.begin().await?;
        let _ = mark(&mut tx, &key(next_call())?, Duration::from_secs(3600)).await?;
        for _ in 0..100 {
            for (table, times) in ["guarded", "unguarded"].into_iter().zip(&mut times) {
                let insert = sqlx::query(AssertSqlSafe(format!("insert into {table} values ($1)"))).bind("100.00 EUR");
                let began = Instant::now();
                insert.execute(&mut *tx).await?;
                times.push(began.elapsed().as_secs_f64() * 1e6);
            }
        }
        tx.commit().await?;
    }
    drop(conn);
    pool.execute("drop table guarded, unguarded").await?;
    pool.close().await;
    let [guarded, unguarded] = times.map(median);
    Ok(guarded - unguarded)
}
