//! The crate's own SQL, by hand through sqlx. The difference to it is what the crate adds to its statements.
//!
//! The texts are those that the crate has just prepared. The parameters are bound as in `src/record/claim.rs` and
//! `src/record/ends.rs`.

use anyhow::{Context as _, ensure};
use pg_idempotency::{Error, Fingerprint, Key, ensure_idempotent};
use sha2::{Digest as _, Sha256};
use sqlx::postgres::PgArguments;
use sqlx::postgres::types::PgInterval;
use sqlx::query::Query;
use sqlx::{Connection as _, PgConnection, Postgres};

use crate::alternatives::library::TABLE;
use crate::client::{BODY, effect, key};
use crate::setting::Setting;
use crate::way::Way;

pub(crate) const NAME: &str = "the same SQL by hand";
pub(crate) const UNGUARDED: &str = "the same SQL by hand, without look, lock and token";

#[derive(Clone, Copy)]
pub(crate) struct ByHand {
    claim: &'static str,
    complete: &'static str,
}

const DAY: PgInterval = PgInterval { months: 0, days: 0, microseconds: 86_400_000_000 };

impl ByHand {
    pub(crate) async fn capture(setting: &Setting) -> anyhow::Result<Self> {
        let mut conn = setting.connect(None).await?;
        let mut tx = conn.begin().await?;
        let _ = ensure_idempotent(&mut tx, &key(u64::MAX)?, BODY, async |_| Ok::<_, Error>(())).await?;
        tx.commit().await?;
        let prepared = sqlx::query_scalar("select statement from pg_prepared_statements");
        let texts: Vec<String> = prepared.fetch_all(&mut conn).await?;
        let named = |name: &str| {
            let found = texts.iter().find(|text| text.contains(name));
            // The texts live as long as the process.
            anyhow::Ok(&*found.with_context(|| format!("the crate has prepared nothing with {name}"))?.clone().leak())
        };
        Ok(Self { claim: named("/* pg_idempotency: claim */")?, complete: named("/* pg_idempotency: complete */")? })
    }

    /// The claim leaves no token on its transaction.
    pub(crate) fn without_token(self) -> anyhow::Result<Self> {
        let (insert, token) = self.claim.rsplit_once("returning").context("the claim returns its token")?;
        ensure!(token.contains("set_config('idempotency.claim'"), "the claim returns its token");
        Ok(Self { claim: format!("{insert}returning $4::int8::text").leak(), ..self })
    }

    /// The claim neither looks for a record, nor takes the lock, nor leaves its token. What remains is the price of the
    /// table: the columns of a record, and its indexes.
    pub(crate) fn unguarded(self) -> anyhow::Result<Self> {
        let (insert, guards) = self.claim.split_once("where case").context("the claim has a condition")?;
        ensure!(
            guards.contains("on conflict (scope, operation, value) do nothing"),
            "the claim does nothing on conflict"
        );
        Ok(Self { claim: format!("{insert}on conflict (scope, operation, value) do nothing").leak(), ..self })
    }

    pub(crate) fn first_call(self, response: &'static str) -> Way {
        Way::new(NAME, move |client, call| {
            Box::pin(async move {
                let key = key(call)?;
                let mut tx = client.conn.begin().await?;
                let (token, won) = self.claim(&mut tx, &key).await?;
                ensure!(won, "every key is new");
                effect(&mut tx).await?;
                // The closure makes the same copy for the crate.
                let response = response.to_owned();
                let completed = of(&key, self.complete)
                    .bind(token)
                    .bind(serde_json::to_vec(&response)?)
                    .bind(None::<i16>)
                    .bind(None::<String>)
                    .execute(&mut *tx)
                    .await?;
                ensure!(completed.rows_affected() == 1, "the claim is ours");
                Ok(tx.commit().await?)
            })
        })
        .filling(TABLE)
    }

    async fn claim(self, conn: &mut PgConnection, key: &Key) -> anyhow::Result<(i64, bool)> {
        let token = getrandom::u64()?.cast_signed();
        let query = of(key, self.claim)
            .bind(token)
            .bind(Fingerprint::of_json(BODY)?.as_bytes().to_vec())
            .bind(DAY)
            .bind(None::<PgInterval>)
            .bind("transaction")
            .bind(lock_of(key)?);
        Ok((token, query.execute(conn).await?.rows_affected() == 1))
    }
}

/// A hash of the key, though not the crate's.
fn lock_of(key: &Key) -> anyhow::Result<i64> {
    let digest = Sha256::digest(key.value());
    Ok(digest[..8].try_into().map(i64::from_be_bytes)?)
}

fn of<'q>(key: &'q Key, sql: &'static str) -> Query<'q, Postgres, PgArguments> {
    sqlx::query(sql).bind(key.scope()).bind(key.operation()).bind(key.value())
}
