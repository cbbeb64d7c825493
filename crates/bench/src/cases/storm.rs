//! Many duplicates of one slow request at once, and what they do to callers with other keys.

use std::time::Duration;

use pg_idempotency::{Error, Idempotency, OnDuplicate};
use sqlx::{Executor as _, PgPool};
use tokio::time::sleep;

use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::{BODY, key, next_call, response};
use crate::measure::{in_turns, paced, team};
use crate::results::{Row, Table};
use crate::way::Way;

pub(crate) const NAME: &str = "storm";

pub(crate) const TITLE: &str = "Other keys beside 32 duplicates of one";
pub(crate) const ALONE: &str = "alone";
pub(crate) const BESIDE: &str = "beside the storm";
const DUPLICATES: usize = 32;
const OTHERS: usize = 4;
const PAUSE: Duration = Duration::from_millis(5);
const RETRY: Duration = Duration::from_millis(50);

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let mut tables = Vec::new();
    for (name, in_flight) in [("Wait", OnDuplicate::Wait(Duration::from_secs(20))), ("Reject", OnDuplicate::Reject)] {
        bench.clear().await?;
        let options = Idempotency::new().on_duplicate(in_flight);
        let pool = bench.socket().pool(DUPLICATES).await?;
        let duplicate = |hot, work| duplicate(pool.clone(), options, hot, work);
        let other = library::first_call(response(300));
        let rows = storm(bench, bench.scale.slice, DUPLICATES, duplicate, OTHERS, &other).await?;
        tables.push(Table::new(TITLE, name, "first calls", rows));
    }
    bench.clear().await?;
    Ok(tables)
}

/// The calls of `others` clients, alone and beside the storm in turns, each for two slices. A duplicate requests the
/// key with the number that it is given until it is answered, and says whether it performed. The one that performs
/// takes as long as `work`.
pub(crate) async fn storm<D>(
    bench: &Bench,
    work: Duration,
    duplicates: usize,
    duplicate: impl Fn(u64, Duration) -> D,
    others: usize,
    other: &Way,
) -> anyhow::Result<Vec<Row>>
where
    D: Future<Output = anyhow::Result<bool>> + Send + 'static,
{
    let mut others = team(bench.socket(), others, None).await?;
    let length = bench.scale.slice * 2;
    in_turns(bench.scale.rounds, [ALONE, BESIDE], async |beside| {
        let hot = next_call();
        let storm: Vec<_> = (0..duplicates * beside).map(|_| tokio::spawn(duplicate(hot, work))).collect();
        let sample = paced(&mut others, other, length, PAUSE).await?;
        let mut performed = 0;
        for task in storm {
            performed += usize::from(task.await??);
        }
        anyhow::ensure!(performed == beside, "{performed} of the duplicates performed");
        Ok(sample)
    })
    .await
}

async fn duplicate(pool: PgPool, options: Idempotency, hot: u64, work: Duration) -> anyhow::Result<bool> {
    let key = key(hot)?;
    loop {
        let outcome = options
            .run(&pool, &key, BODY, async |conn| -> Result<(), Error> {
                conn.execute(sqlx::query("select pg_sleep($1)").bind(work.as_secs_f64())).await?;
                Ok(())
            })
            .await;
        match outcome {
            Ok(outcome) => return Ok(!outcome.is_replayed()),
            Err(Error::InFlight { .. }) => sleep(RETRY).await,
            Err(error) => return Err(error.into()),
        }
    }
}
