//! Operations of several parts, and operations that a resumer finishes.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use pg_idempotency::Error;
use pg_idempotency::lease::{Leasing, Policy};

use super::records::store_abandoned;
use crate::alternatives::library::{self, Kind};
use crate::bench::Bench;
use crate::client::effect;
use crate::footprint::footprint;
use crate::measure::{interleave, named};
use crate::report::Report;
use crate::setting::Setting;
use crate::way::Way;

pub(crate) const ABOUT: &str = "\
Each call claims an operation in steps, performs its steps, and completes it with a short result. A step in the database inserts \
one row; the steps outside have no effect, so only the crate's own cost is measured. *Three bare transactions* insert one row each. \
There are 8 clients, and each alternative has a pool of 16 connections. The round trips include sqlx's pings, two for each \
transaction. Then 8 resumers finish operations whose callers never came back, without a step.";

const NAME: &str = "steps";
const CLIENTS: usize = 8;
const BARE: &str = "three bare transactions";
const KINDS: &[(&str, &[Kind])] = &[
    ("no step", &[]),
    ("a step in the database", &[Kind::InDatabase]),
    ("a step at least once", &[Kind::AtLeastOnce]),
    ("a step at most once", &[Kind::AtMostOnce]),
    ("three steps in the database", &[Kind::InDatabase; 3]),
];

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    for setting in bench.settings() {
        bench.clear().await?;
        let measured = interleave(bench, setting, CLIENTS, ways(setting).await?).await?;
        report.speeds(NAME, "8 clients", setting.told(), "operations", &measured);
        let of_bare = named(&measured, "three steps in the database").zip(named(&measured, BARE));
        let ratio = of_bare.map(|(steps, bare)| steps.against(bare));
        report.figure(NAME, "Three steps: rate over three bare transactions", setting.told(), ratio);
    }
    let counted = bench.counted()?;
    let mut costs = Vec::new();
    for way in ways(&counted.0).await? {
        costs.push((way.name.clone(), footprint(bench, &counted, &way, bench.scale.counted).await?));
    }
    report.footprints(NAME, "operation", costs);
    bench.clear().await?;
    resume(bench, report).await?;
    bench.clear().await
}

async fn ways(setting: &Setting) -> anyhow::Result<Vec<Way>> {
    let pool = setting.pool(2 * CLIENTS).await?;
    let bare = Way::new(BARE, {
        let pool = pool.clone();
        move |_, _| {
            let pool = pool.clone();
            Box::pin(async move {
                for _ in 0..3 {
                    let mut tx = pool.begin().await?;
                    effect(&mut tx).await?;
                    tx.commit().await?;
                }
                Ok(())
            })
        }
    })
    .with_pool(pool);
    let mut ways = vec![bare];
    for (name, kinds) in KINDS {
        ways.push(library::in_steps(setting.pool(2 * CLIENTS).await?, leasing()?, name, kinds));
    }
    Ok(ways)
}

fn leasing() -> anyhow::Result<Leasing> {
    Ok(Leasing::new(Policy::InSteps { lease: Duration::from_secs(60) })?)
}

async fn resume(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    let setting = &bench.near()[0];
    store_abandoned(&mut setting.connect(None).await?, bench.scale.counted as u64).await?;
    let leasing = leasing()?.with_max_attempts(NonZeroU32::MAX);
    let pool = setting.pool(2 * CLIENTS).await?;
    let started = Instant::now();
    let mut resumers = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let pool = pool.clone();
        resumers.spawn(async move {
            let mut resumed = 0;
            while leasing
                .resume_one(&pool, "POST /payments", async |_, body: String| Ok::<_, Error>(body))
                .await?
                .is_some()
            {
                resumed += 1;
            }
            Ok::<usize, Error>(resumed)
        });
    }
    let mut resumed = 0;
    for each in resumers.join_all().await {
        resumed += each?;
    }
    let took = started.elapsed();
    anyhow::ensure!(resumed <= bench.scale.counted, "no operation is resumed twice");
    let rate = resumed as f64 / took.as_secs_f64();
    report.figure(NAME, "Resumed operations a second, 8 resumers", setting.told(), Some(rate));
    pool.close().await;
    Ok(())
}
