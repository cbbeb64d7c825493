//! The crate's own SQL, by hand through sqlx: what the crate adds to its statements shows against this.
//!
//! The texts are heard on the wire, on which the crate has just sent them: so they are always the crate's, and go in as
//! many round trips. The parameters are bound, and the rows read, as in `src/record.rs` and
//! `src/record/claim.rs`.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use pg_idempotency::lease::{Acquired, Leasing, Policy};
use pg_idempotency::{Error, Fingerprint, Key, ensure_idempotent};
use sha2::{Digest as _, Sha256};
use sqlx::postgres::types::PgInterval;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::types::chrono::{DateTime, Utc};
use sqlx::{Connection as _, PgConnection, PgPool, Postgres, Row as _};

use crate::alternatives::library::TABLE;
use crate::client::{BODY, effect, key};
use crate::setting::Setting;
use crate::way::Way;

pub(crate) const NAME: &str = "the same SQL by hand";

#[derive(Clone, Copy)]
pub(crate) struct ByHand {
    /// With commits that wait for the disk, whatever the session says.
    begin_durable: &'static str,
    claim: &'static str,
    look: &'static str,
    complete: &'static str,
    resolve: &'static str,
}

const DAY: PgInterval = PgInterval { months: 0, days: 0, microseconds: 86_400_000_000 };
/// The call has waited for nothing before its look.
const NOT_WAITED: PgInterval = PgInterval { months: 0, days: 0, microseconds: 0 };
const LEASE: PgInterval = PgInterval { months: 0, days: 0, microseconds: 60_000_000 };

impl ByHand {
    pub(crate) async fn capture(setting: &Setting) -> anyhow::Result<Self> {
        let (setting, proxy) = setting.clone().heard()?;
        let pool = setting.pool(1).await?;
        let mut conn = pool.acquire().await?;
        let asked = key(u64::MAX)?;
        for _ in 0..2 {
            let mut tx = conn.begin().await?;
            let _ = ensure_idempotent(&mut tx, &asked, BODY, async |_| Ok::<_, Error>(())).await?;
            tx.commit().await?;
        }
        drop(conn);
        let in_transaction_mode = proxy.texts();
        let leasing = Leasing::new(Policy::AtLeastOnce { lease: std::time::Duration::from_secs(60) })?;
        match leasing.acquire(&pool, &key(u64::MAX - 1)?, BODY).await? {
            Acquired::Owner(lease) => lease.complete(&()).await?,
            Acquired::Replayed(()) => {}
        }
        let in_lease_mode = proxy.texts();
        pool.close().await;
        let holding = |texts: &[String], part: &str| {
            let found = texts.iter().find(|text| text.contains(part));
            // A handful for the life of the process.
            anyhow::Ok(&*found.with_context(|| format!("the crate has sent nothing with {part}"))?.clone().leak())
        };
        Ok(Self {
            begin_durable: holding(&in_lease_mode, "begin")?,
            claim: holding(&in_transaction_mode, "insert into idempotency.record")?,
            look: holding(&in_transaction_mode, "left join idempotency.record")?,
            complete: holding(&in_transaction_mode, "set completed_at = pg_catalog.statement_timestamp()")?,
            resolve: holding(&in_lease_mode, "lease_until = null")?,
        })
    }

    /// The claim leaves no mark on its transaction.
    pub(crate) fn without_mark(self) -> anyhow::Result<Self> {
        let (insert, mark) = self.claim.rsplit_once("returning").context("the claim returns its mark")?;
        ensure!(mark.contains("set_config('idempotency.claim'"), "the claim returns its mark");
        Ok(Self { claim: format!("{insert}returning $4::int8::text").leak(), ..self })
    }

    pub(crate) fn first_call(self, response: Arc<str>) -> Way {
        Way::new(NAME, move |client, call| {
            let response = response.clone();
            Box::pin(async move {
                let key = key(call)?;
                let mut tx = client.conn.begin().await?;
                let (token, won) = self.claim(&mut tx, &key, "transaction", None).await?;
                ensure!(won, "every key is new");
                effect(&mut tx).await?;
                // As the closure makes it for the crate.
                let response = response.to_string();
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

    pub(crate) fn replay(self, key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static) -> Way {
        Way::new(NAME, move |client, call| {
            let key = key(call);
            Box::pin(async move {
                let key = key?;
                let mut tx = client.conn.begin().await?;
                let (_, won) = self.claim(&mut tx, &key, "transaction", None).await?;
                ensure!(!won, "every key is there");
                let look = of(&key, self.look).bind(lock_of(&key)?).bind(None::<DateTime<Utc>>).bind(NOT_WAITED);
                let stored = read(&look.fetch_one(&mut *tx).await?)?;
                tx.commit().await?;
                let _: String = serde_json::from_slice(&stored)?;
                Ok(())
            })
        })
    }

    pub(crate) fn lease(self, pool: PgPool, response: Arc<str>) -> Way {
        let of_way = pool.clone();
        Way::new(NAME, move |_, call| {
            let (pool, response) = (pool.clone(), response.clone());
            Box::pin(async move {
                let key = key(call)?;
                let mut tx = pool.begin_with(self.begin_durable).await?;
                let (token, won) = self.claim(&mut tx, &key, "at_least_once", Some(LEASE)).await?;
                ensure!(won, "every key is new");
                tx.commit().await?;
                let response = serde_json::to_vec(&response.to_string())?;
                let mut tx = pool.begin_with(self.begin_durable).await?;
                let resolved = of(&key, self.resolve)
                    .bind(token)
                    .bind(response)
                    .bind(None::<i16>)
                    .bind(None::<String>)
                    .bind(DAY)
                    .bind(true)
                    .execute(&mut *tx)
                    .await?;
                ensure!(resolved.rows_affected() == 1, "the lease is ours");
                Ok(tx.commit().await?)
            })
        })
        .filling(TABLE)
        .with_pool(of_way)
    }

    async fn claim(
        self,
        conn: &mut PgConnection,
        key: &Key,
        mode: &str,
        lease: Option<PgInterval>,
    ) -> anyhow::Result<(i64, bool)> {
        let token = getrandom::u64()?.cast_signed();
        let query = of(key, self.claim)
            .bind(token)
            .bind(Fingerprint::of_json(BODY)?.as_bytes().to_vec())
            .bind(DAY)
            .bind(lease)
            .bind(mode)
            .bind(lock_of(key)?)
            .bind(None::<String>);
        Ok((token, query.execute(conn).await?.rows_affected() == 1))
    }

    /// A first call for pgbench, which prepares one statement at a time: BEGIN is alone.
    pub(crate) fn script(self, response: &str) -> String {
        let fingerprint = "'\\x01e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'";
        let day = "'1 day'";
        let claim = [":key", ":token", fingerprint, day, "null", "'transaction'", ":lock", "null"];
        let complete = [":key", ":token", &format!("'\"{response}\"'"), "null", "null"];
        format!(
            "\\set key random(1, 9223372036854775806)\n\\set token random(1, 9223372036854775806)\n\
             \\set lock random(1, 9223372036854775806)\nbegin;\n{};\n\
             insert into effect (note) values ('100.00 EUR') returning id;\n{};\ncommit;\n",
            filled(self.claim, &claim),
            filled(self.complete, &complete),
        )
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

/// What is stored, from all that decides what is done about it.
fn read(row: &PgRow) -> anyhow::Result<Vec<u8>> {
    ensure!(row.try_get::<&str, _>("mode")? == "transaction", "another mode");
    ensure!(row.try_get::<&[u8], _>("fingerprint")? == Fingerprint::of_json(BODY)?.as_bytes(), "another request");
    ensure!(row.try_get::<&str, _>("state")? == "completed", "nothing to replay");
    let _: (i64, i32) = (row.try_get("token")?, row.try_get("attempt")?);
    let _: DateTime<Utc> = row.try_get("claimed_at")?;
    let _: bool = row.try_get("claimed_by_this_transaction")?;
    let _: (Option<f64>, Option<String>) = (row.try_get("lease_left")?, row.try_get("last_error")?);
    let _: (Option<i16>, Option<String>) = (row.try_get("response_status")?, row.try_get("response_headers")?);
    Ok(row.try_get("response_body")?)
}

/// The statement with these for its parameters from $3 on.
fn filled(sql: &str, values: &[&str]) -> String {
    let values = [&["'account'", "'POST /payments'"], values].concat();
    // From the last, so that $1 is not found in $10.
    let numbered = values.iter().enumerate().rev();
    numbered.fold(sql.to_owned(), |sql, (at, value)| sql.replace(&format!("${}", at + 1), value))
}
