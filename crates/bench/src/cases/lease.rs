//! Effects outside the database: acquire, then complete, each in a transaction of its own.

use std::sync::Arc;
use std::time::Duration;

use pg_idempotency::lease::{Leasing, Policy};

use crate::alternatives::{by_hand, library};
use crate::bench::Bench;
use crate::client::{effect, response};
use crate::footprint::footprint;
use crate::measure::{interleave, named};
use crate::report::Report;
use crate::setting::Setting;
use crate::way::Way;

pub(crate) const ABOUT: &str = "\
Each call acquires a lease with the policy at least once, and completes it with 300 B of result. There are 8 clients, and \
each alternative has a pool of 8 connections. *Two bare transactions* insert one row each. The transactions of a lease are \
durable whatever `synchronous_commit` says, also in the hand-written variant. The crate's lease renews itself in a separate \
task. The round trips include sqlx's pings: one before the pool lends each of the two connections, and one when a connection \
comes back, for which no call waits. No completion of a lease is a heap-only update, because it changes `expires_at`, which \
has an index.";

const NAME: &str = "lease";
const CLIENTS: usize = 8;

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    for setting in bench.settings() {
        bench.clear().await?;
        let measured = interleave(bench, setting, CLIENTS, ways(bench, setting).await?).await?;
        report.speeds(NAME, "8 clients", setting.told(), "leases", &measured);
        let of_hand = named(&measured, library::NAME).zip(named(&measured, by_hand::NAME));
        let ratio = of_hand.map(|(library, by_hand)| library.against(by_hand));
        report.figure(NAME, "Lease: rate over that of the same SQL by hand", setting.told(), ratio);
    }
    let counted = bench.counted()?;
    let mut costs = Vec::new();
    for way in ways(bench, &counted.0).await? {
        costs.push((way.name.clone(), footprint(bench, &counted, &way, bench.scale.counted).await?));
    }
    report.footprints(NAME, "lease", costs);
    bench.clear().await
}

async fn ways(bench: &Bench, setting: &Setting) -> anyhow::Result<Vec<Way>> {
    let response: Arc<str> = response(300).into();
    let leasing = Leasing::new(Policy::AtLeastOnce { lease: Duration::from_secs(60) })?;
    let pool = setting.pool(CLIENTS).await?;
    let bare = Way::new("two bare transactions", {
        move |_, _| {
            let pool = pool.clone();
            Box::pin(async move {
                for _ in 0..2 {
                    let mut tx = pool.begin().await?;
                    effect(&mut tx).await?;
                    tx.commit().await?;
                }
                Ok(())
            })
        }
    });
    let by_hand = bench.by_hand.lease(setting.pool(CLIENTS).await?, response.clone());
    let library = library::lease(setting.pool(CLIENTS).await?, leasing, response);
    Ok(vec![bare, by_hand, library])
}
