//! Each statement has a name, by which a DBA finds it.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Lease, LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, mark};
use pg_idempotency::testing::{age, lapse};
use pg_idempotency::{Error, Idempotency, RoundTrips, ensure_idempotent};
use rig::database::backend;
use sqlx::PgPool;

use crate::support::{key, wide_pool};

const WINDOW: Duration = Duration::from_secs(300);

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_activity_of_the_server_shows_the_name_of_a_statement(pool: PgPool) -> anyhow::Result<()> {
    let mut tx = pool.begin().await?;
    let pid = backend(&mut tx).await?;
    let mut seen = Vec::new();
    let shown = async || -> Result<String, sqlx::Error> {
        sqlx::query_scalar("select query from pg_stat_activity where pid = $1").bind(pid).fetch_one(&pool).await
    };
    let _ = ensure_idempotent(&mut tx, &key("a"), "body", async |_| {
        seen.push(shown().await?);
        Ok::<_, Error>(1)
    })
    .await?;
    seen.push(shown().await?);
    for (query, name) in seen.iter().zip(["claim", "complete"]) {
        assert!(query.contains(&format!("/* pg_idempotency: {name} */")), "{query}");
    }
    // PostgreSQL 18 leaves out a comment at the start of a statement.
    assert!(seen.iter().all(|query| !query.trim_start().starts_with("/*")), "{seen:?}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_prepared_statement_has_a_name(pool: PgPool) -> anyhow::Result<()> {
    let pool = wide_pool(&pool.connect_options(), 1).await;
    let select_first = Idempotency::new().round_trips(RoundTrips::SelectFirst);
    let leasing = LeaseOptions::new(Policy::InSteps { lease: WINDOW });
    let leasing = leasing.store_request(true).max_attempts(NonZeroU32::MIN.saturating_add(1));
    let work = async |lease: &Lease, _: String| {
        lease.step("row", async |_| Ok::<_, Error>(1)).await?;
        lease.step_at_most_once("text", async |_| Ok::<_, Error>(1)).await
    };
    let mut tx = pool.begin().await?;
    for _ in ["first", "replay"] {
        let _ = ensure_idempotent(&mut tx, &key("a"), "body", async |_| Ok::<_, Error>(1)).await?;
        let _ = mark(&mut tx, &key("mark"), WINDOW).await?;
        let _ = MarkOptions::new(WINDOW).mark_many(&mut tx, &[key("batch")]).await?;
    }
    tx.commit().await?;
    let _ = select_first.run(&pool, &key("a"), "body", async |_| Ok::<_, Error>(1)).await?;
    let failed = leasing.run(&pool, &key("lease"), "body", async |_| Err::<i32, _>(Error::LeaseLost)).await;
    assert!(matches!(failed, Err(Error::LeaseLost)));
    age(&pool, &key("lease"), WINDOW).await?;
    assert_eq!(leasing.resume_one(&pool, "operation", work).await?, Some(1));
    drop(leasing.acquire::<i32, _>(&pool, &key("lapses"), "body").await?);
    lapse(&pool, &key("lapses")).await?;
    let unnamed: Vec<String> = sqlx::query_scalar(
        "select statement from pg_prepared_statements
        where statement like '%idempotency.%' and statement !~ '^\\s*\\w+ /\\* pg_idempotency: [a-z_ ]+ \\*/\\s'",
    )
    .persistent(false)
    .fetch_all(&pool)
    .await?;
    assert_eq!(unnamed, Vec::<String>::new());
    Ok(())
}
