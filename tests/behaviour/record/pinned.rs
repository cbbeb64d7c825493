//! Times that only a person sets: `infinity` for a key that they pin, and others that a client cannot read.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, Marked, mark};
use pg_idempotency::operator::{health, show, stats, unsettled};
use pg_idempotency::{Error, Idempotency, Janitor, Key, Outcome};
use rig::fixture::Fixture;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE};
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::support::{key, rejecting, shown};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// What a person may do to a record by hand.
const EDITS: [&str; 5] = [
    "expires_at = 'infinity'",
    // Later than the last year of chrono.
    "expires_at = '290000-01-01'",
    "expires_at = 'infinity', claimed_at = '-infinity'",
    "expires_at = 'infinity', claimed_at = 'infinity', completed_at = case when completed_at is not null then 'infinity'::timestamptz end",
    "expires_at = 'infinity', lease_until = case when lease_until > now() then 'infinity'::timestamptz else lease_until end",
];

/// One key of each kind, all edited.
async fn edited(pool: &PgPool, edit: &str) -> anyhow::Result<()> {
    pool.execute("truncate idempotency.record").await?;
    Fixture::completed(&key("completed"), "body", "response")?.write(pool).await?;
    Fixture::marked(&key("mark")).write(pool).await?;
    Fixture::leased(&key("live"), "body", AT_LEAST_ONCE)?.write(pool).await?;
    Fixture::lapsed(&key("lapsed"), "body", AT_LEAST_ONCE)?.write(pool).await?;
    Fixture::lapsed(&key("resolved"), "body", AT_MOST_ONCE)?.write(pool).await?;
    Fixture::lapsed(&key("let go"), "body", AT_MOST_ONCE)?.write(pool).await?;
    Fixture::indeterminate(&key("forgotten"), "body")?.write(pool).await?;
    pool.execute(AssertSqlSafe(format!("update idempotency.record set {edit}"))).await?;
    Ok(())
}

async fn acquire(pool: &PgPool, key: &Key, policy: Policy) -> Result<Acquired<String>, Error> {
    LeaseOptions::new(policy).acquire(pool, key, "body").await
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn operators_see_and_settle_a_record_that_somebody_has_pinned(pool: PgPool) -> anyhow::Result<()> {
    for edit in EDITS {
        edited(&pool, edit).await?;
        let mut waiting: Vec<_> =
            unsettled(&pool, 100, None, None).await?.into_iter().map(|found| found.key.value().to_owned()).collect();
        waiting.sort();
        assert_eq!(waiting, ["forgotten", "let go", "resolved"], "{edit}");
        for value in ["completed", "mark", "live", "lapsed", "resolved", "let go", "forgotten"] {
            let shown = show(&pool, &key(value)).await?.expect(value);
            assert!(shown.retention_left > DAY * 365_000, "{edit}, {value}: {shown:?}");
            assert_eq!(shown.lease_left.is_some(), value == "live", "{edit}, {value}: {shown:?}");
        }
        stats(&pool).await?;
        health(&pool, DAY).await?;
        assert_eq!(Janitor::new(pool.clone()).sweep_once(100).await?.rows(), 0, "{edit}");
        let resolved = shown(&pool, &key("resolved")).await.resolve(&pool, &"by hand".to_owned(), DAY).await?;
        assert!(resolved.retention_left > DAY * 365_000, "{edit}: it stays pinned: {resolved:?}");
        shown(&pool, &key("let go")).await.release(&pool, "no effect").await?;
        shown(&pool, &key("forgotten")).await.forget(&pool).await?;
        assert!(unsettled(&pool, 100, None, None).await?.is_empty(), "{edit}");
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn callers_get_the_usual_answers_for_a_record_that_somebody_has_pinned(pool: PgPool) -> anyhow::Result<()> {
    for edit in EDITS {
        edited(&pool, edit).await?;
        let perform = async |_: &mut sqlx::PgConnection| Ok::<_, Error>("performed".to_owned());
        for replay_first in [false, true] {
            let way = Idempotency::new().replay_first(replay_first);
            let replayed = way.run(&pool, &key("completed"), "body", perform).await?;
            assert_eq!(replayed, Outcome::Replayed("response".to_owned()), "{edit}");
            let reused = way.run(&pool, &key("completed"), "another body", perform).await;
            assert!(matches!(reused, Err(Error::KeyReused { .. })), "{edit}: {reused:?}");
            let indeterminate = way.run(&pool, &key("forgotten"), "body", perform).await;
            assert!(matches!(indeterminate, Err(Error::Indeterminate { .. })), "{edit}: {indeterminate:?}");
        }
        let mut tx = pool.begin().await?;
        assert_eq!(mark(&mut tx, &key("mark"), DAY).await?, Marked::Duplicate, "{edit}");
        assert_eq!(
            MarkOptions::new(DAY).mark_many(&mut tx, &[key("mark"), key(edit)]).await?,
            [Marked::Duplicate, Marked::First]
        );
        tx.rollback().await?;
        let live = acquire(&pool, &key("live"), AT_LEAST_ONCE).await;
        assert!(matches!(&live, Err(Error::InFlight { .. })), "{edit}: {live:?}");
        let lapsed = acquire(&pool, &key("resolved"), AT_MOST_ONCE).await;
        assert!(matches!(&lapsed, Err(Error::Indeterminate { .. })), "{edit}: {lapsed:?}");
        match acquire(&pool, &key("lapsed"), AT_LEAST_ONCE).await? {
            Acquired::Owner(lease) => {
                assert_eq!(lease.attempt(), 2);
                lease.complete(&"done".to_owned()).await?;
            }
            Acquired::Replayed(response) => panic!("{edit}: {response}"),
        }
        let replayed = rejecting().run(&pool, &key("completed"), "body", perform).await?;
        assert_eq!(replayed, Outcome::Replayed("response".to_owned()));
    }
    Ok(())
}
