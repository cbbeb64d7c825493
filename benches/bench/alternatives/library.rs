//! The crate, as its users call it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, ensure};
use pg_idempotency::dedup::{Marked, mark, mark_many};
use pg_idempotency::lease::{Acquired, Leasing};
use pg_idempotency::{Error, Idempotency, Key};
use sqlx::{Connection as _, PgPool};

use crate::client::{BODY, Client, effect, key};
use crate::way::Way;

pub(crate) const NAME: &str = "pg-idempotency";
pub(crate) const TABLE: &str = "idempotency.record";
const WINDOW: Duration = Duration::from_secs(3600);

/// The ways that the crate has to make a call, the plain one first: a line in each case with first calls or replays. Beside
/// the name, what its latency may be over a network, as a multiple: of the bare transaction, and of a bare select.
pub(crate) const VARIANTS: &[Variant] =
    &[Variant { name: NAME, options: Idempotency::new(), first_call: None, replay: None }];

#[derive(Clone, Copy)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) options: Idempotency,
    pub(crate) first_call: Option<f64>,
    pub(crate) replay: Option<f64>,
}

impl Variant {
    /// What is promised of replays is promised of the way that is meant for them, if there is one.
    pub(crate) fn is_for_replays(&self) -> bool {
        self.replay.is_some() || VARIANTS.iter().all(|variant| variant.replay.is_none())
    }
}

pub(crate) fn first_call(response: Arc<str>) -> Way {
    first_call_with(Idempotency::new(), response)
}

pub(crate) fn first_call_with(options: Idempotency, response: Arc<str>) -> Way {
    Way::new(NAME, move |client, call| {
        let response = response.clone();
        Box::pin(async move {
            ensure!(!ensure_with(options, client, &key(call)?, &response).await?, "every key is new");
            Ok(())
        })
    })
    .filling(TABLE)
}

pub(crate) fn replay(key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static) -> Way {
    replay_with(Idempotency::new(), key)
}

pub(crate) fn replay_with(
    options: Idempotency,
    key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static,
) -> Way {
    Way::new(NAME, move |client, call| {
        let key = key(call);
        Box::pin(async move {
            ensure!(ensure_with(options, client, &key?, "").await?, "every key is there");
            Ok(())
        })
    })
}

/// Whether it was replayed.
async fn ensure_with(options: Idempotency, client: &mut Client, key: &Key, response: &str) -> Result<bool, Error> {
    let outcome = options
        .ensure(&mut client.conn, key, BODY, async |conn| -> Result<String, Error> {
            effect(conn).await?;
            Ok(response.to_owned())
        })
        .await?;
    Ok(outcome.is_replayed())
}

pub(crate) fn lease(pool: PgPool, leasing: Leasing, response: Arc<str>) -> Way {
    let of_way = pool.clone();
    Way::new(NAME, move |_, call| {
        let (pool, response) = (pool.clone(), response.clone());
        Box::pin(async move {
            let Acquired::Lease(lease) = leasing.acquire::<String, _>(&pool, &key(call)?, BODY).await? else {
                bail!("every key is new");
            };
            Ok(lease.complete(&response.to_string()).await?)
        })
    })
    .filling(TABLE)
    .with_pool(of_way)
}

pub(crate) fn marks(batch: usize) -> Way {
    Way::new(format!("{NAME}, {batch} at once"), move |client, call| {
        Box::pin(async move {
            let keys: Vec<_> = (0..batch as u64).map(|n| key(call << 16 | n)).collect::<Result<_, _>>()?;
            let mut tx = client.conn.begin().await?;
            let marked = match &keys[..] {
                [one] => vec![mark(&mut tx, one, WINDOW).await?],
                many => mark_many(&mut tx, many, WINDOW).await?,
            };
            tx.commit().await?;
            ensure!(marked.iter().all(|marked| *marked == Marked::First), "every key is new");
            Ok(())
        })
    })
    .of_units(batch)
    .filling(TABLE)
}
