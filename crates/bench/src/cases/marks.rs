//! Marks, one by one and in batches.

use sqlx::{Connection as _, Executor as _};

use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::spread;
use crate::footprint::footprints;
use crate::measure::compare;
use crate::results::Table;
use crate::way::Way;

pub(crate) const NAME: &str = "marks";

pub(crate) const TITLE: &str = "8 clients";
pub(crate) const BARE: &str = "bare insert, one by one";

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let mut conn = bench.plain().connect(None).await?;
    conn.execute("create table bare_mark (key text primary key)").await?;
    let ways: Vec<Way> = std::iter::once(bare()).chain([1, 10, 100].map(library::marks)).collect();
    let mut tables = Vec::new();
    for setting in bench.settings() {
        bench.clear().await?;
        let rows = compare(bench, setting, 8, &ways).await?;
        tables.push(Table::new(TITLE, setting.column(), "keys", rows));
    }
    tables.push(footprints(bench, bench.counted().await?, "key", &ways).await?);
    bench.clear().await?;
    Ok(tables)
}

pub(crate) fn name(batch: u64) -> String {
    library::marks(batch).name
}

fn bare() -> Way {
    Way::new(BARE, |client, call| {
        Box::pin(async move {
            let mut tx = client.conn.begin().await?;
            let query =
                sqlx::query("insert into bare_mark (key) values ($1) on conflict do nothing").bind(spread(call));
            query.execute(&mut *tx).await?;
            Ok(tx.commit().await?)
        })
    })
    .filling("bare_mark")
}
