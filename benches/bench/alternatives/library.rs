//! The crate, as its users call it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, ensure};
use pg_idempotency::dedup::{Marked, mark, mark_many};
use pg_idempotency::lease::{Acquired, Leasing};
use pg_idempotency::{Error, Key, ensure_idempotent};
use sqlx::{Connection as _, PgPool};

use crate::client::{BODY, Client, effect, key};
use crate::way::Way;

pub(crate) const NAME: &str = "pg-idempotency";
pub(crate) const TABLE: &str = "idempotency.record";
const WINDOW: Duration = Duration::from_secs(3600);

pub(crate) fn first_call(response: Arc<str>) -> Way {
    Way::new(NAME, move |client, call| {
        let response = response.clone();
        Box::pin(async move {
            ensure!(!ensure_with(client, &key(call)?, &response).await?, "every key is new");
            Ok(())
        })
    })
    .filling(TABLE)
}

pub(crate) fn replay(key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static) -> Way {
    Way::new(NAME, move |client, call| {
        let key = key(call);
        Box::pin(async move {
            ensure!(ensure_with(client, &key?, "").await?, "every key is there");
            Ok(())
        })
    })
}

/// Whether it was replayed.
async fn ensure_with(client: &mut Client, key: &Key, response: &str) -> Result<bool, Error> {
    let outcome = ensure_idempotent(&mut client.conn, key, BODY, async |conn| -> Result<String, Error> {
        effect(conn).await?;
        Ok(response.to_owned())
    })
    .await?;
    Ok(outcome.is_replayed())
}

pub(crate) fn lease(pool: PgPool, leasing: Leasing, response: Arc<str>) -> Way {
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
