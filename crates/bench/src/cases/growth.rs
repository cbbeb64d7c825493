//! What a call costs as the table grows: databases of different sizes, in turns.

use super::records::{store, stored_key};
use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::response;
use crate::measure::interleave;
use crate::report::Report;

pub(crate) const ABOUT: &str = "\
There is one database for each size, on one server with 128 MB of shared buffers. So at best the largest table is in the \
operating system's cache. 8 clients make first calls, and replays of random keys. A first call needs a random page of the \
index, and a replay also one of the table. The first change of a page after a checkpoint writes the whole page to the WAL. \
The figures and the targets compare mean times, which are the inverse of the rates; the chart compares medians.";

const NAME: &str = "growth";

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    let setting = &bench.near()[0];
    let sizes = bench.scale.sizes;
    let database = |size: &u64| format!("records_{size}");
    for size in sizes {
        eprintln!("  storing {size} records …");
        store(&mut bench.create_database(&database(size)).await?, *size).await?;
    }
    let first = |size: &u64| library::first_call(response(300).into()).on(&database(size));
    let replay = |size: &u64| {
        let size = *size;
        library::replay(move |call| stored_key(call, size)).on(&database(&size))
    };
    let named = |mut way: crate::way::Way, size: &u64| {
        way.name = format!("{size} records");
        way
    };
    // The first without keys to replay.
    let filled = &sizes[1..];
    let cases = [
        ("first calls", sizes.iter().map(|size| named(first(size), size)).collect::<Vec<_>>()),
        ("replays", filled.iter().map(|size| named(replay(size), size)).collect()),
    ];
    for (unit, ways) in cases {
        let small = ways.iter().position(|way| way.name == "10000 records").unwrap_or_default();
        let measured = interleave(bench, setting, 8, ways).await?;
        report.speeds(NAME, "8 clients", setting.told(), unit, &measured);
        for one in &measured[small + 1..] {
            let cost = measured[small].against(one);
            let what = format!("Growth: time of {unit} at {} over that at 10000", one.way.name);
            report.figure(NAME, what, setting.told(), Some(cost));
        }
    }
    for size in sizes {
        bench.drop_database(&database(size)).await?;
    }
    Ok(())
}
