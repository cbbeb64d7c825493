//! The setting for a distributed table, on a plain one. `tests/citus` has the opposite.

use pg_idempotency::testing::{self, assert_performed_once};
use pg_idempotency::{Deployment, Idempotency};
use sqlx::PgPool;

use crate::answers::{answered, answers};
use crate::support::{create_effects, effects, key, leave_effect};

const PLAIN: Deployment = Deployment::new().with_distributed(false);

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "the table is not plain there; tests/citus has the test of that table")]
async fn on_a_plain_table_the_setting_for_a_distributed_one_changes_no_answer(pool: PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql("create table answered (scope text not null)").execute(&pool).await?;
    let fits = answers(&pool, PLAIN, PLAIN).await?;
    let other = answers(&pool, PLAIN, PLAIN.with_distributed(true)).await?;
    let lines: Vec<String> = fits.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(answered(fits, other), lines);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn of_eight_callers_with_that_setting_one_performs(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let call = Idempotency::new().with_deployment(PLAIN.with_distributed(true));
    for round in 1..=5 {
        let answers = testing::race(&pool, 8, async |pool| {
            call.run(pool, &key("race"), "body", async |conn| leave_effect(conn, "raced").await).await
        });
        assert_performed_once(answers.await?);
        assert_eq!(effects(&pool).await, round);
        testing::expire(&pool, &key("race")).await?;
    }
    Ok(())
}
