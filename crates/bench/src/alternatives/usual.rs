//! The code that people write by hand: insert, catch the unique violation, select, update.
//!
//! It has no retention, no bounded wait and no fence, so it does less than the crate.

use anyhow::{Context as _, ensure};
use pg_idempotency::Key;
use sha2::{Digest as _, Sha256};
use sqlx::Connection as _;

use crate::client::{BODY, Client, KeyOf, effect};
use crate::way::Way;

pub(crate) const NAME: &str = "usual hand-written code";

pub(crate) const TABLE: &str = "
    create table usual_key (
        account text not null,
        operation text not null,
        key text not null,
        request_hash bytea not null,
        response bytea,
        created_at timestamptz not null default now(),
        primary key (account, operation, key)
    )";

pub(crate) fn first_call(key: KeyOf, response: &'static str) -> Way {
    Way::new(NAME, move |client, call| {
        Box::pin(async move {
            ensure!(perform(client, &key(call)?, Some(response)).await?.is_none(), "every key is new");
            Ok(())
        })
    })
    .filling("usual_key")
}

pub(crate) fn replay(key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static) -> Way {
    Way::new(NAME, move |client, call| {
        let key = key(call);
        Box::pin(async move {
            perform(client, &key?, None).await?.context("every key is there")?;
            Ok(())
        })
    })
}

/// Returns the response of an earlier call.
async fn perform(client: &mut Client, key: &Key, response: Option<&str>) -> anyhow::Result<Option<String>> {
    let hash = Sha256::digest(BODY);
    let mut tx = client.conn.begin().await?;
    let inserted = sqlx::query("insert into usual_key (account, operation, key, request_hash) values ($1, $2, $3, $4)")
        .bind(key.scope())
        .bind(key.operation())
        .bind(key.value())
        .bind(&hash[..])
        .execute(&mut *tx)
        .await;
    match inserted {
        Ok(_) => {
            effect(&mut tx).await?;
            sqlx::query("update usual_key set response = $4 where account = $1 and operation = $2 and key = $3")
                .bind(key.scope())
                .bind(key.operation())
                .bind(key.value())
                .bind(serde_json::to_vec(&response)?)
                .execute(&mut *tx)
                .await?;
            tx.commit().await?;
            Ok(None)
        }
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
            tx.rollback().await?;
            let (stored, response): (Vec<u8>, Vec<u8>) = sqlx::query_as(
                "select request_hash, response from usual_key where account = $1 and operation = $2 and key = $3",
            )
            .bind(key.scope())
            .bind(key.operation())
            .bind(key.value())
            .fetch_one(&mut client.conn)
            .await?;
            ensure!(stored == hash[..], "another request");
            Ok(serde_json::from_slice(&response)?)
        }
        Err(error) => Err(error.into()),
    }
}
