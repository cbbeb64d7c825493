//! Effects outside the database: acquire a lease, then complete it, each in a transaction of its own.

use std::time::Duration;

use pg_idempotency::lease::{LeaseOptions, Policy};

use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::{effect, response};
use crate::footprint::footprints;
use crate::measure::compare;
use crate::results::{MAIN, Table};
use crate::setting::Setting;
use crate::way::Way;

pub(crate) const NAME: &str = "lease";

pub(crate) const BARE: &str = "two bare transactions";
const CLIENTS: usize = 8;

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let mut tables = Vec::new();
    for setting in bench.settings() {
        bench.clear().await?;
        let rows = compare(bench, setting, CLIENTS, &ways(setting).await?).await?;
        tables.push(Table::new(MAIN, setting.column(), "leases", rows));
    }
    let counted = bench.counted().await?;
    let counted_ways = ways(&counted.0).await?;
    tables.push(footprints(bench, counted, "lease", &counted_ways).await?);
    bench.clear().await?;
    Ok(tables)
}

async fn ways(setting: &Setting) -> anyhow::Result<Vec<Way>> {
    let pool = setting.pool(CLIENTS).await?;
    let bare = {
        let pool = pool.clone();
        Way::new(BARE, move |_, _| {
            let pool = pool.clone();
            Box::pin(async move {
                for _ in 0..2 {
                    let mut tx = pool.begin().await?;
                    effect(&mut tx).await?;
                    tx.commit().await?;
                }
                Ok(())
            })
        })
    };
    let leasing = LeaseOptions::new(Policy::AtLeastOnce { lease: Duration::from_secs(60) });
    Ok(vec![bare, library::lease(pool, leasing, response(300))])
}
