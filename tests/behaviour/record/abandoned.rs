//! What nobody comes back for is listed, with the keys under which other services saw its steps; a pinned key can be
//! resolved; and a row whose key is not valid hides no other.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions, Policy};
use pg_idempotency::operator::{self, State};
use pg_idempotency::testing::lapse;
use sqlx::PgPool;

use crate::support::key;

const HOUR: Duration = Duration::from_secs(60 * 60);

/// The process dies inside the first step, after the gateway has charged. Gives the key that the gateway saw.
async fn charged_and_gone(pool: &PgPool, name: &str) -> anyhow::Result<String> {
    let leasing = LeaseOptions::new(Policy::InSteps { lease: Duration::from_secs(40) });
    let Acquired::Owner(lease) = leasing.acquire::<i64, _>(pool, &key(name), "body").await? else {
        anyhow::bail!("it is completed")
    };
    let mut seen = String::new();
    let charge = lease.step_at_least_once("charge", async |step| -> anyhow::Result<i64> {
        seen = step.downstream_key().to_owned();
        anyhow::bail!("the process dies here")
    });
    charge.await.expect_err("no answer");
    lapse(pool, &key(name)).await?;
    Ok(seen)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_charge_that_nobody_comes_back_for_is_listed_with_its_key(pool: PgPool) -> anyhow::Result<()> {
    let seen = charged_and_gone(&pool, "charged").await?;
    assert!(operator::unsettled(&pool, 10, None, None).await?.is_empty());
    assert!(operator::unsettled(&pool, 10, None, Some(HOUR)).await?.is_empty(), "not for an hour yet");
    sqlx::query("update idempotency.record set claimed_at = now() - interval '2 hours'").execute(&pool).await?;
    let listed = operator::unsettled(&pool, 10, None, Some(HOUR)).await?;
    assert!(listed.is_empty(), "its owner renewed the lease, and died a moment ago");
    sqlx::query("update idempotency.record set lease_until = now() - interval '1 hour'").execute(&pool).await?;
    let found = operator::unsettled(&pool, 10, None, Some(HOUR)).await?;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].state, found[0].steps.len()), (State::Lapsed, 0));
    assert_eq!(found[0].downstream_key_of_step("charge"), Some(seen));
    assert_eq!(found[0].downstream_key, None, "the operation itself called nobody");
    // The page's own statement.
    let page = include_str!("../../../src/guide/steps.md");
    let sql = page.split("```sql\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a statement");
    assert_eq!(sqlx::query(sql).fetch_all(&pool).await?.len(), 1, "{sql}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_pinned_key_can_be_resolved_and_stays_pinned(pool: PgPool) -> anyhow::Result<()> {
    charged_and_gone(&pool, "pinned").await?;
    sqlx::query("update idempotency.record set expires_at = 'infinity'").execute(&pool).await?;
    let shown = operator::show(&pool, &key("pinned")).await?.expect("a record");
    shown.resolve(&pool, &1, HOUR).await?;
    let pinned: bool =
        sqlx::query_scalar("select expires_at = 'infinity' from idempotency.record").fetch_one(&pool).await?;
    assert!(pinned);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_row_whose_key_is_not_valid_hides_no_other(pool: PgPool) -> anyhow::Result<()> {
    charged_and_gone(&pool, "by hand").await?;
    charged_and_gone(&pool, "by a caller").await?;
    let by_hand = "update idempotency.record set value = E'a\\nb' where value like '%by hand%'";
    sqlx::query(by_hand).execute(&pool).await.expect_err("the rule of strict.sql");
    sqlx::query("alter table idempotency.record drop constraint key_without_control_characters").execute(&pool).await?;
    assert_eq!(sqlx::query(by_hand).execute(&pool).await?.rows_affected(), 1);
    assert_eq!(operator::unsettled(&pool, 10, None, Some(Duration::ZERO)).await?.len(), 1);
    Ok(())
}
