//! Marks, one by one and in batches.

use sqlx::Connection as _;

use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::spread;
use crate::footprint::footprint;
use crate::measure::{interleave_from_empty, named};
use crate::report::Report;
use crate::way::Way;

pub(crate) const ABOUT: &str = "\
The rate counts keys. Each key is new, and each call has its own transaction. Each alternative begins its turn with an empty \
table. *Bare insert* is `insert … on conflict do \
nothing` into a table with one column. It has no retention and no wait with a limit, and cannot distinguish *duplicate* from \
*in flight*. A latency is that of one call with all its keys.";

const NAME: &str = "marks";
const BATCHES: [usize; 3] = [1, 10, 100];

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    let mut conn = bench.plain().connect(None).await?;
    sqlx::query("create table bare_mark (key text primary key)").execute(&mut conn).await?;
    let ways = || std::iter::once(bare()).chain(BATCHES.map(library::marks)).collect::<Vec<_>>();
    for setting in bench.settings() {
        bench.clear().await?;
        let measured = interleave_from_empty(bench, setting, 8, ways()).await?;
        report.speeds(NAME, "8 clients", setting.told(), "keys", &measured);
        let of = |batch| named(&measured, &library::marks(batch).name);
        let ratio = of(100).zip(of(1)).map(|(many, one)| many.against(one));
        report.figure(NAME, "Marks: rate of a hundred at once over that of one by one", setting.told(), ratio);
    }
    let counted = bench.counted()?;
    let mut costs = Vec::new();
    for way in ways() {
        costs.push((way.name.clone(), footprint(bench, &counted, &way, bench.scale.counted).await?));
    }
    report.footprints(NAME, "key", costs);
    bench.clear().await
}

fn bare() -> Way {
    Way::new("bare insert, one by one", |client, call| {
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
