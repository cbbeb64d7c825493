//! `migrations/partitions.sql` on one server: a plain table beside one with hash partitions.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use pg_idempotency::Janitor;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection};

use super::records::{store, store_expired, stored_key};
use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::response;
use crate::measure::interleave;
use crate::report::Report;
use crate::way::Way;

const BATCH: NonZeroU32 = NonZeroU32::new(10_000).unwrap();

pub(crate) const ABOUT: &str = "\
Two databases contain the same records: one in a plain table, the other in 16 hash partitions by `scope`. 8 clients make first \
calls, and replays of random keys. Then a fifth of that number of expired records is added, a sweep without pauses deletes them \
in batches of 10 000, and a vacuum follows. Autovacuum is off meanwhile.";

const NAME: &str = "partitions";
const PARTITIONS: &str = include_str!("../../../../migrations/partitions.sql");
const DATABASES: [(&str, &str); 2] = [("plain", "records_plain"), ("16 partitions", "records_partitioned")];

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    let setting = &bench.near()[0];
    let told = setting.told();
    let records = *bench.scale.sizes.last().expect("a largest size");
    let mut server = bench.plain().connect(None).await?;
    autovacuum(&mut server, "off").await?;
    for (name, database) in DATABASES {
        eprintln!("  storing {records} records, {name} …");
        let mut conn = bench.create_database(database).await?;
        if database != DATABASES[0].1 {
            sqlx::raw_sql(PARTITIONS).execute(&mut conn).await?;
        }
        store(&mut conn, records).await?;
    }
    let named = |(name, database): (&str, &str), way: Way| Way { name: name.to_owned(), ..way }.on(database);
    let first = DATABASES.map(|of| named(of, library::first_call(response(300).into())));
    let replay = DATABASES.map(|of| named(of, library::replay(move |call| stored_key(call, records))));
    for (unit, ways) in [("first calls", first), ("replays", replay)] {
        let measured = interleave(bench, setting, 8, ways.into()).await?;
        report.speeds(NAME, format!("{records} records, 8 clients"), told, unit, &measured);
    }
    for (name, database) in DATABASES {
        let mut conn = setting.connect(Some(database)).await?;
        let mut tell = |what: &str, seen: f64| {
            report.figure(NAME, format!("Partitions, {name}: {what}"), told, Some(seen));
        };
        let leaves = leaves(&mut conn).await?;
        tell("heap, GB", leaves.iter().map(|(_, heap, _)| *heap as f64 / 1e9).sum());
        tell("indexes, GB", leaves.iter().map(|(_, _, indexes)| *indexes as f64 / 1e9).sum());

        store_expired(&mut conn, records / 5).await?;
        let pool = setting.on(database).pool(1).await?;
        let janitor =
            Janitor::new(pool.clone()).with_grace(Duration::ZERO).with_batch_size(BATCH).with_pause(Duration::ZERO);
        let started = Instant::now();
        let swept = janitor.sweep_once(u64::MAX).await?;
        let swept_in = started.elapsed();
        pool.close().await;
        anyhow::ensure!(swept.rows() >= records / 5, "{} rows swept", swept.rows());
        tell("swept rows a second", swept.rows() as f64 / swept_in.as_secs_f64());

        let mut times = Vec::new();
        for (leaf, ..) in leaves {
            let started = Instant::now();
            conn.execute(AssertSqlSafe(format!("vacuum {leaf}"))).await?;
            times.push(started.elapsed().as_secs_f64());
        }
        tell("vacuum of the whole table after that, s", times.iter().sum());
        tell("its longest vacuum of one table, s", times.iter().copied().fold(0.0, f64::max));
        bench.drop_database(database).await?;
    }
    autovacuum(&mut server, "on").await
}

async fn autovacuum(server: &mut PgConnection, value: &str) -> anyhow::Result<()> {
    server.execute(AssertSqlSafe(format!("alter system set autovacuum = {value}"))).await?;
    server.execute("select pg_reload_conf()").await?;
    Ok(())
}

/// The tables that have rows: their names, and the bytes of heap and of indexes.
async fn leaves(conn: &mut PgConnection) -> anyhow::Result<Vec<(String, i64, i64)>> {
    let leaves = sqlx::query_as(
        "
        select oid::regclass::text, pg_table_size(oid), pg_indexes_size(oid)
        from pg_class
        where relnamespace = 'idempotency'::regnamespace and relkind = 'r' and relname like 'record%'
        ",
    );
    Ok(leaves.fetch_all(conn).await?)
}
