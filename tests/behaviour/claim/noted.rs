//! The setting `idempotency.claim`: the tokens of all claims of this transaction. That each way to claim notes its token,
//! and that a roll-back takes it back, show in `protect/`.

use std::time::Duration;

use pg_idempotency::mark::{Marked, mark, mark_many};
use pg_idempotency::{Error, ensure_idempotent};
use sqlx::{PgConnection, PgPool};

use crate::fixture::Fixture;
use crate::support::key;

const WINDOW: Duration = Duration::from_secs(300);

/// The claims that the transaction has noted.
async fn noted(conn: &mut PgConnection) -> Vec<i64> {
    let claims: Option<String> = sqlx::query_scalar("select current_setting('idempotency.claim', true)")
        .fetch_one(conn)
        .await
        .expect("a setting");
    claims.iter().flat_map(|claims| claims.split_whitespace()).map(|token| token.parse().expect("a token")).collect()
}

async fn token(conn: &mut PgConnection, value: &str) -> i64 {
    let select = sqlx::query_scalar("select token from idempotency.record where value = $1");
    select.bind(value).fetch_one(conn).await.expect("a record")
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn marks_are_noted_and_duplicates_are_not(pool: PgPool) -> anyhow::Result<()> {
    for value in ["two", "three"] {
        Fixture::completed(&key(value), "body", &1)?.expired().write(&pool).await?;
    }
    let mut tx = pool.begin().await?;
    assert_eq!(mark(&mut tx, &key("one"), WINDOW).await?, Marked::First);
    let mut claims = vec![token(&mut tx, "one").await];
    assert_eq!(noted(&mut tx).await, claims);
    assert_eq!(mark(&mut tx, &key("two"), WINDOW).await?, Marked::First);
    claims.push(token(&mut tx, "two").await);
    assert_eq!(noted(&mut tx).await, claims);
    let marked = mark_many(&mut tx, &[key("three"), key("four"), key("five")], WINDOW).await?;
    assert_eq!(marked, [Marked::First; 3]);
    // A batch is one claim: its tokens count up from the number that is noted. On a distributed table each key is a claim.
    let of_the_batch = if cfg!(idempotency_distributed) { 3 } else { 1 };
    let with_batch = noted(&mut tx).await;
    assert_eq!((&with_batch[..2], with_batch.len()), (&claims[..], 2 + of_the_batch));
    tx.commit().await?;

    let mut tx = pool.begin().await?;
    assert_eq!(mark(&mut tx, &key("one"), WINDOW).await?, Marked::Duplicate);
    assert_eq!(mark_many(&mut tx, &[key("two"), key("three")], WINDOW).await?, [Marked::Duplicate; 2]);
    let replay = ensure_idempotent(&mut tx, &key("six"), "body", async |_| Ok::<_, Error>(1)).await?;
    assert!(!replay.is_replayed());
    let six = token(&mut tx, "six").await;
    assert_eq!(noted(&mut tx).await, [six]);
    Ok(())
}
