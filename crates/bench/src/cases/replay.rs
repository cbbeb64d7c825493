//! A key that was used before: the answer of the first call.

use std::time::Duration;

use anyhow::ensure;
use pg_idempotency::Key;
use sqlx::PgExecutor;

use super::first_call::CLIENTS;
use crate::alternatives::{library, redis, usual};
use crate::bench::Bench;
use crate::client::{key, next_call, of_clients, response};
use crate::footprint::footprints;
use crate::measure::{compare, sample, team};
use crate::results::{MAIN, Table};
use crate::way::Way;

pub(crate) const NAME: &str = "replay";

pub(crate) const SELECT: &str = "bare primary-key select";
pub(crate) const SELECT_FROM_POOL: &str = "bare primary-key select, from the pool";
pub(crate) const BY_CLIENTS: &str = "Replays by the number of clients, 300 B of response, Unix socket";

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
    bench.clear().await?;
    let hot = next_call();
    let of_hot = move |_| Ok(key(hot)?);
    let text = response(300);
    let mut caller = team(bench.plain(), 1, None).await?;
    for first in [library::first_call(text), usual::first_call(key, text)] {
        first.call(&mut caller[0], hot).await?;
    }
    let redis = bench.redis.as_ref().map(|_| redis::replay(text));
    if let Some(redis) = &redis {
        sample(&mut caller, redis, Duration::ZERO).await?;
    }
    let mut ways = vec![select(of_hot), select_from_pool(of_hot), usual::replay(of_hot)];
    ways.extend(library::VARIANTS.iter().map(|variant| variant.replay(of_hot)));
    let counted = ways.clone();
    ways.extend(redis);

    let mut tables = Vec::new();
    for setting in bench.settings() {
        let rows = compare(bench, setting, 8, &ways).await?;
        tables.push(Table::new(MAIN, setting.column(), "replays", rows));
    }
    let some = [usual::NAME, library::NAME, library::REPLAY_FIRST];
    let some: Vec<_> = ways.into_iter().filter(|way| some.contains(&way.name.as_str())).collect();
    for clients in CLIENTS {
        let rows = compare(bench, bench.socket(), clients, &some).await?;
        tables.push(Table::new(BY_CLIENTS, of_clients(clients), "replays", rows));
    }
    tables.push(footprints(bench, bench.counted().await?, "replay", &counted).await?);
    bench.clear().await?;
    Ok(tables)
}

pub(crate) fn select(key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static) -> Way {
    Way::new(SELECT, move |client, call| {
        let key = key(call);
        Box::pin(async move { stored(&mut client.conn, &key?).await })
    })
}

/// With `replay_first`, a call takes a connection of the pool, and so the pool's ping is a part of it.
fn select_from_pool(key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static) -> Way {
    Way::new(SELECT_FROM_POOL, move |client, call| {
        let key = key(call);
        Box::pin(async move { stored(&client.pool, &key?).await })
    })
}

async fn stored(executor: impl PgExecutor<'_>, key: &Key) -> anyhow::Result<()> {
    let query = sqlx::query_scalar(
        "select response_body from idempotency.record where scope = $1 and operation = $2 and value = $3",
    );
    let query = query.bind(key.scope()).bind(key.operation()).bind(key.value());
    let stored: Vec<u8> = query.fetch_one(executor).await?;
    let text: String = serde_json::from_slice(&stored)?;
    ensure!(!text.is_empty(), "every key is there");
    Ok(())
}
