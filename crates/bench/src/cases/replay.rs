//! A key that was used before: the answer of the first call.

use anyhow::ensure;
use pg_idempotency::Key;

use super::records;
use crate::alternatives::{library, redis, usual};
use crate::bench::Bench;
use crate::client::{key, next_call, of_clients, response};
use crate::footprint::footprint;
use crate::measure::{interleave, named, sample, team};
use crate::report::Report;
use crate::setting::Setting;
use crate::way::Way;

pub(crate) const ABOUT: &str = "\
Each call uses a connection that is not in a transaction. *Bare primary-key select* is the cost of one look at the record; \
it decides nothing. The tables with random keys contain only the alternatives whose records the benchmark can store in bulk.";

const NAME: &str = "replay";
pub(crate) const SELECT: &str = "bare primary-key select";
pub(crate) const CLIENTS: usize = 8;

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    bench.clear().await?;
    let hot = next_call();
    let text = response(300);
    let firsts = [library::first_call(text.as_str().into()), usual::first_call(text.as_str().into())];
    let mut caller = team(bench.plain(), 1, None).await?;
    for first in firsts {
        first.call(&mut caller[0], hot).await?;
    }
    let redis = bench.redis.as_ref().map(|_| redis::replay(text.as_str().into()));
    if let Some(redis) = &redis {
        sample(&mut caller, redis, std::time::Duration::ZERO).await?;
    }
    let records = bench.scale.stored;
    records::store(&mut bench.plain().connect(None).await?, records).await?;
    let of_hot = move |_| Ok(key(hot)?);
    let of_random = move |call| records::stored_key(call, records);
    let on_hot_key =
        || [select(of_hot), bench.by_hand.replay(of_hot), usual::replay(of_hot)].into_iter().chain(variants(of_hot));

    for setting in bench.settings() {
        // Other numbers of clients, but not over the network.
        for clients in [CLIENTS, 1, 32].into_iter().filter(|clients| *clients == CLIENTS || setting.rtt.is_none()) {
            let ways = on_hot_key().chain(redis.clone()).collect();
            measure(bench, report, setting, clients, title(clients), ways).await?;
        }
        let ways =
            [select(of_random), bench.by_hand.replay(of_random)].into_iter().chain(variants(of_random)).collect();
        let title = format!("Random keys of {records}, 300 B of response, 8 clients");
        measure(bench, report, setting, CLIENTS, title, ways).await?;
    }

    let counted = bench.counted()?;
    let mut costs = Vec::new();
    for way in on_hot_key() {
        costs.push((way.name.clone(), footprint(bench, &counted, &way, bench.scale.counted).await?));
    }
    let of_selected = costs.iter().find(|(way, _)| way == library::SELECT_FIRST).and_then(|(_, cost)| *cost);
    report.figure(NAME, "Replay, select first: round trips", None, of_selected.map(|cost| cost.round_trips));
    report.footprints(NAME, "replay", costs);
    bench.clear().await
}

/// Of a section about the hot key.
pub(crate) fn title(clients: usize) -> String {
    format!("One hot key, 300 B of response, {}", of_clients(clients))
}

async fn measure(
    bench: &Bench,
    report: &mut Report,
    setting: &Setting,
    clients: usize,
    title: String,
    ways: Vec<Way>,
) -> anyhow::Result<()> {
    let measured = interleave(bench, setting, clients, ways).await?;
    report.speeds(NAME, title, setting.told(), "replays", &measured);
    // The target is for 8 clients and a hot key.
    if clients == CLIENTS && named(&measured, usual::NAME).is_some() {
        for (name, way) in [("plain", library::NAME), ("select first", library::SELECT_FIRST)] {
            let ratio = named(&measured, way).map(|of_way| of_way.against(&measured[0]));
            let what = format!("Replay, {name}: rate over that of a bare primary-key select");
            report.figure(NAME, what, setting.told(), ratio);
        }
    }
    Ok(())
}

fn variants(key: impl Fn(u64) -> anyhow::Result<Key> + Copy + Send + Sync + 'static) -> impl Iterator<Item = Way> {
    library::VARIANTS.iter().map(move |variant| variant.replay(key))
}

fn select(key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static) -> Way {
    Way::new(SELECT, move |client, call| {
        let key = key(call);
        Box::pin(async move {
            let key = key?;
            let query = sqlx::query_scalar(
                "select response_body from idempotency.record where scope = $1 and operation = $2 and value = $3",
            );
            let query = query.bind(key.scope()).bind(key.operation()).bind(key.value());
            let stored: Vec<u8> = query.fetch_one(&mut client.conn).await?;
            let text: String = serde_json::from_slice(&stored)?;
            ensure!(!text.is_empty(), "every key is there");
            Ok(())
        })
    })
}
