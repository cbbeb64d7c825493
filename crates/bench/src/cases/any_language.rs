//! The SQL functions beside the library.

use sqlx::Executor as _;

use crate::alternatives::{bare_call, library, sql_functions};
use crate::bench::Bench;
use crate::client::{key, next_call, response};
use crate::measure::{compare, team};
use crate::results::Table;

pub(crate) const NAME: &str = "any_language";

pub(crate) const FIRST_CALLS: &str = "First calls, 300 B of response, 8 clients";
/// What the processors do at the same time hardly adds to these latencies.
pub(crate) const ALONE: &str = "First calls, 300 B of response, 1 client";
pub(crate) const REPLAYS: &str = "Replays, 300 B of response, 8 clients";

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    let text = response(300);
    let mut tables = Vec::new();
    bench.clear().await?;
    pg_idempotency::migrate_any_language(&bench.plain().lazy_pool(None)).await?;
    bench.plain().connect(None).await?.execute(sql_functions::PAY).await?;
    let first_calls =
        [bare_call(), library::first_call(text), sql_functions::first_call(text), sql_functions::run(text)];
    for setting in bench.settings() {
        let rows = compare(bench, setting, 8, &first_calls).await?;
        tables.push(Table::new(FIRST_CALLS, setting.column(), "calls", rows));
    }
    for setting in bench.settings() {
        let rows = compare(bench, setting, 1, &first_calls).await?;
        tables.push(Table::new(ALONE, setting.column(), "calls", rows));
    }
    bench.clear().await?;
    // Each door has its own record, because their fingerprints differ.
    let (of_library, of_sql) = (next_call(), next_call());
    let mut caller = team(bench.plain(), 1, None).await?;
    first_calls[1].call(&mut caller[0], of_library).await?;
    first_calls[2].call(&mut caller[0], of_sql).await?;
    let replays = [library::replay(move |_| Ok(key(of_library)?)), sql_functions::replay(move |_| Ok(key(of_sql)?))];
    for setting in bench.settings() {
        let rows = compare(bench, setting, 8, &replays).await?;
        tables.push(Table::new(REPLAYS, setting.column(), "replays", rows));
    }
    bench.clear().await?;
    Ok(tables)
}
