//! The crate, as its users call it.

use std::time::Duration;

use anyhow::{bail, ensure};
use pg_idempotency::lease::{Acquired, LeaseOptions};
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{Error, Idempotency, Key};
use sqlx::{Connection as _, PgConnection, PgPool};

use crate::client::{BODY, Client, KeyOf, effect, key};
use crate::way::Way;

pub(crate) const NAME: &str = "pg-idempotency";
pub(crate) const TABLE: &str = "idempotency.record";
const WINDOW: Duration = Duration::from_secs(3600);

pub(crate) const REPLAY_FIRST: &str = "pg-idempotency, with replay_first";
pub(crate) const FROM_POOL: &str = "pg-idempotency, begun from the pool";
pub(crate) const BY_RUN: &str = "pg-idempotency, by run";
/// The ways in which the crate makes a call, the plain one first.
pub(crate) const VARIANTS: &[Variant] = &[
    Variant { name: NAME, options: PLAIN, through: Through::Transaction },
    Variant { name: REPLAY_FIRST, options: PLAIN.replay_first(true), through: Through::Pool },
    Variant { name: FROM_POOL, options: PLAIN, through: Through::PooledTransaction },
    Variant { name: BY_RUN, options: PLAIN, through: Through::Pool },
];

const PLAIN: Idempotency = Idempotency::new();

#[derive(Clone, Copy)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    options: Idempotency,
    through: Through,
}

#[derive(Clone, Copy)]
enum Through {
    /// A transaction of the caller.
    Transaction,
    /// A transaction of the caller, which begins it from the client's pool.
    PooledTransaction,
    /// The client's pool, by `run`.
    Pool,
}

impl Variant {
    pub(crate) fn first_call(&'static self, key: KeyOf, response: &'static str) -> Way {
        Way::new(self.name, move |client, call| {
            Box::pin(async move {
                ensure!(!self.ensure(client, &key(call)?, response).await?, "every key is new");
                Ok(())
            })
        })
        .filling(TABLE)
    }

    pub(crate) fn replay(&'static self, key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static) -> Way {
        Way::new(self.name, move |client, call| {
            let key = key(call);
            Box::pin(async move {
                ensure!(self.ensure(client, &key?, "").await?, "every key is there");
                Ok(())
            })
        })
    }

    /// Says whether the call was replayed.
    async fn ensure(&self, client: &mut Client, key: &Key, response: &str) -> Result<bool, Error> {
        let perform = async |conn: &mut PgConnection| -> Result<String, Error> {
            effect(conn).await?;
            Ok(response.to_owned())
        };
        let outcome = match self.through {
            Through::Transaction => {
                let mut tx = client.conn.begin().await?;
                let outcome = self.options.ensure(&mut tx, key, BODY, perform).await?;
                tx.commit().await?;
                outcome
            }
            Through::PooledTransaction => {
                let mut tx = client.pool.begin().await?;
                let outcome = self.options.ensure(&mut tx, key, BODY, perform).await?;
                tx.commit().await?;
                outcome
            }
            // The future of a pool's connection is large, and the box keeps it out of the futures of the other ways.
            Through::Pool => Box::pin(self.options.run(&client.pool, key, BODY, perform)).await?,
        };
        Ok(outcome.is_replayed())
    }
}

pub(crate) fn first_call(response: &'static str) -> Way {
    VARIANTS[0].first_call(key, response)
}

pub(crate) fn replay(key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static) -> Way {
    VARIANTS[0].replay(key)
}

pub(crate) fn lease(pool: PgPool, leasing: LeaseOptions, response: &'static str) -> Way {
    Way::new(NAME, move |_, call| {
        let pool = pool.clone();
        Box::pin(async move {
            let Acquired::Owner(lease) = leasing.acquire::<String, _>(&pool, &key(call)?, BODY).await? else {
                bail!("every key is new");
            };
            Ok(lease.complete(&response.to_owned()).await?)
        })
    })
    .filling(TABLE)
}

pub(crate) fn marks(batch: u64) -> Way {
    Way::new(format!("{NAME}, {batch} at once"), move |client, call| {
        let keys: Result<Vec<_>, _> = (0..batch).map(|n| key(call << 16 | n)).collect();
        Box::pin(async move {
            let keys = keys?;
            let marking = MarkOptions::new(WINDOW);
            let mut tx = client.conn.begin().await?;
            let marked = match &keys[..] {
                [one] => vec![marking.mark(&mut tx, one).await?],
                many => marking.mark_many(&mut tx, many).await?,
            };
            tx.commit().await?;
            ensure!(marked.iter().all(|marked| *marked == Marked::First), "every key is new");
            Ok(())
        })
    })
    .of_units(batch as usize)
    .filling(TABLE)
}
