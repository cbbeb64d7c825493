//! A setting that does not fit the table never gives a wrong answer.

use pg_idempotency::{Deployment, Error, Idempotency, testing};
use sqlx::PgPool;

use crate::answers::{answered, answers};
use crate::{DISTRIBUTED, citus, effect, effects, key};

const PLAIN: Deployment = Deployment::new().with_distributed(false);

fn plain() -> Idempotency {
    Idempotency::new().with_deployment(PLAIN)
}

async fn create_answered(pool: &PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql(
        "drop table if exists answered; create table answered (scope text collate \"C\" not null);
         select create_distributed_table('answered', 'scope', colocate_with => 'idempotency.record')",
    )
    .execute(pool)
    .await?;
    Ok(())
}

#[tokio::test]
async fn without_the_setting_every_entry_point_refuses() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    create_answered(&citus.pool).await?;
    let fits = answers(&citus.pool, DISTRIBUTED, DISTRIBUTED).await?;
    let other = answers(&citus.pool, DISTRIBUTED, PLAIN).await?;
    // A replay without a claim.
    assert_eq!(answered(fits, other), ["run, select first: Completed", "run, both: Completed"]);
    Ok(())
}

#[tokio::test]
async fn a_plain_first_call_on_a_distributed_table_is_an_error_that_says_so() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    for way in [plain(), plain().with_select_first(true), plain().with_fewest_round_trips(true)] {
        let key = key("mismatch");
        let result = way.run(&citus.pool, &key, "body", async |conn| effect(conn, &key).await).await;
        assert!(matches!(result, Err(Error::WrongDeployment { .. })), "{way:?}: {result:?}");
        assert!(!result.expect_err("wrong").is_transient());
        testing::assert_no_trace(&citus.pool, &key).await;
        assert_eq!(effects(&mut *citus.pool.acquire().await?, &key).await?, 0);
    }
    Ok(())
}
