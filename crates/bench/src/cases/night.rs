//! First calls whose plans were made when the statistics knew no live record, or hardly any record.

use sqlx::Executor as _;

use super::records::{settle, store};
use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::response;
use crate::measure::compare;
use crate::results::{NOT_DURABLE, Table};

pub(crate) const NAME: &str = "night";

pub(crate) const LIVE: &str = "live records";
pub(crate) const EXPIRED: &str = "expired records of one time";
pub(crate) const SMALL: &str = "50 records, before the next analyze";
pub(crate) const TITLE: &str = "First calls of 4 clients after a night";

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let records = bench.scale.expired * 3 / 10;
    let databases = [(LIVE, "live", records), (EXPIRED, "expired", records), (SMALL, "small", 50)];
    for (name, database, records) in databases {
        let mut conn = bench.create_database(database).await?;
        // An analyze during the measurement would replace the plans.
        conn.execute("alter table idempotency.record set (autovacuum_enabled = off)").await?;
        store(&mut conn, records, 1).await?;
        if name == EXPIRED {
            conn.execute("update idempotency.record set expires_at = now() - interval '1 h'").await?;
            settle(&mut conn).await?;
        }
    }
    let ways = databases.map(|(name, database, _)| library::first_call(response(300)).on(database).named(name));
    let rows = compare(bench, bench.plain(), 4, &ways).await?;
    for (_, database, _) in databases {
        bench.drop_database(database).await?;
    }
    Ok(vec![Table::new(TITLE, NOT_DURABLE, "calls", rows)])
}
