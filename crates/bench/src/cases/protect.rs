//! What it costs that the database refuses effects outside an idempotent operation.

use std::time::{Duration, Instant};

use pg_idempotency::OnEscape;
use pg_idempotency::mark::mark;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};

use crate::bench::Bench;
use crate::client::{key, next_call, response};
use crate::measure::{Sample, compare, in_turns};
use crate::results::{MAIN, NOT_DURABLE, Table};

pub(crate) const NAME: &str = "protect";

pub(crate) const WITHOUT: &str = "the same SQL by hand, without its token";
pub(crate) const STATEMENTS: &str = "Inserts in a transaction with a claim, 1 client";
pub(crate) const GUARDED: &str = "into a protected table";
pub(crate) const UNGUARDED: &str = "into an unprotected table";

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let response = response(300);
    bench.clear().await?;
    let without = bench.by_hand.without_token()?.first_call(response).named(WITHOUT);
    let calls = compare(bench, bench.plain(), 8, &[bench.by_hand.first_call(response), without]).await?;

    let pool = bench.plain().pool(1).await?;
    pool.execute("create table guarded (note text not null); create table unguarded (note text not null)").await?;
    pg_idempotency::protect(&pool, "guarded", OnEscape::Refuse).await?;
    let mut conn = pool.acquire().await?;
    let inserts = in_turns(bench.scale.rounds * 10, [UNGUARDED, GUARDED], async |guarded| {
        let mut tx = conn.begin().await?;
        let _ = mark(&mut tx, &key(next_call())?, Duration::from_secs(3600)).await?;
        let insert = format!("insert into {} values ($1)", ["unguarded", "guarded"][guarded]);
        let (started, mut latencies) = (Instant::now(), Vec::new());
        for _ in 0..100 {
            let began = Instant::now();
            sqlx::query(AssertSqlSafe(insert.clone())).bind("100.00 EUR").execute(&mut *tx).await?;
            latencies.push(began.elapsed().as_secs_f64() * 1e3);
        }
        let rate = latencies.len() as f64 / started.elapsed().as_secs_f64();
        tx.commit().await?;
        Ok(Sample { rate, latencies })
    })
    .await?;
    drop(conn);
    pool.execute("drop table guarded, unguarded").await?;
    pool.close().await;
    bench.clear().await?;
    Ok(vec![Table::new(MAIN, NOT_DURABLE, "calls", calls), Table::new(STATEMENTS, NOT_DURABLE, "inserts", inserts)])
}
