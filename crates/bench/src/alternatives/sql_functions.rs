//! The SQL functions of the crate, as a program without the library calls them. The driver is sqlx, too.

use anyhow::ensure;
use pg_idempotency::Key;
use sqlx::{Connection as _, PgExecutor};

use crate::alternatives::library::TABLE;
use crate::client::{BODY, effect, key};
use crate::way::Way;

pub(crate) const NAME: &str = "ensure and complete, in SQL";

pub(crate) const RUN: &str = "run, in SQL";
/// The effect of a call by `run`.
pub(crate) const PAY: &str = "
    create or replace function pay(argument jsonb, out status int, out headers jsonb, out body bytea) language plpgsql as $$
    begin
        insert into effect (note) values ('100.00 EUR');
        body := convert_to(argument::text, 'UTF8');
    end $$";

type Ensured = (String, Option<i64>, Option<Vec<u8>>);

pub(crate) fn first_call(response: &'static str) -> Way {
    Way::new(NAME, move |client, call| {
        Box::pin(async move {
            let key = key(call)?;
            let mut tx = client.conn.begin().await?;
            let (outcome, token, _) = ensured(&mut *tx, &key).await?;
            ensure!(outcome == "claimed", "every key is new");
            effect(&mut tx).await?;
            sqlx::query(
                "select idempotency.complete(
                    scope => $1::text, operation => $2::text, value => $3::text, token => $4::int8, body => $5::bytea
                )",
            )
            .bind(key.scope())
            .bind(key.operation())
            .bind(key.value())
            .bind(token)
            .bind(serde_json::to_vec(response)?)
            .execute(&mut *tx)
            .await?;
            Ok(tx.commit().await?)
        })
    })
    .filling(TABLE)
}

/// One statement in autocommit.
pub(crate) fn run(response: &'static str) -> Way {
    Way::new(RUN, move |client, call| {
        Box::pin(async move {
            let key = key(call)?;
            let query = sqlx::query_scalar(
                "select outcome from idempotency.run(scope => $1::text, operation => $2::text, value => $3::text,
                    fingerprint => idempotency.fingerprint($4::bytea), effect => 'public.pay', argument => $5::text::jsonb)",
            );
            let query = query.bind(key.scope()).bind(key.operation()).bind(key.value()).bind(BODY.as_bytes());
            let outcome: String = query.bind(serde_json::to_string(response)?).fetch_one(&mut client.conn).await?;
            ensure!(outcome == "performed", "every key is new");
            Ok(())
        })
    })
    .filling(TABLE)
}

/// In a transaction, because a caller does not know that a call is a replay.
pub(crate) fn replay(key: impl Fn(u64) -> anyhow::Result<Key> + Send + Sync + 'static) -> Way {
    Way::new(NAME, move |client, call| {
        let key = key(call);
        Box::pin(async move {
            let mut tx = client.conn.begin().await?;
            let (outcome, _, body) = ensured(&mut *tx, &key?).await?;
            let _: String = serde_json::from_slice(&body.unwrap_or_default())?;
            ensure!(outcome == "replayed", "every key is there");
            Ok(tx.commit().await?)
        })
    })
}

async fn ensured(executor: impl PgExecutor<'_>, key: &Key) -> sqlx::Result<Ensured> {
    let query = sqlx::query_as(
        "select outcome, token, body
        from idempotency.ensure(scope => $1::text, operation => $2::text, value => $3::text,
            fingerprint => idempotency.fingerprint($4::bytea))",
    );
    query.bind(key.scope()).bind(key.operation()).bind(key.value()).bind(BODY.as_bytes()).fetch_one(executor).await
}
