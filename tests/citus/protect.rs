//! A table that Citus distributes cannot be protected, because the workers do not see the claim.

use pg_idempotency::operator::protected;
use pg_idempotency::{Error, OnEscape, SetupError, protect, unprotect};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection};

use crate::{calls, citus, key, scope};

#[tokio::test]
async fn a_distributed_table_is_refused_with_a_reason_and_a_local_one_is_protected() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    let name = |kind: &str| format!("{kind}_{}", scope().replace('-', "_"));
    let (sharded, reference, local) = (name("sharded"), name("reference"), name("local"));
    let tables = format!(
        "create table {sharded} (id int); create table {reference} (id int); create table {local} (id int);
         select create_distributed_table('{sharded}', 'id'); select create_reference_table('{reference}')"
    );
    citus.pool.execute(AssertSqlSafe(tables)).await?;
    for table in [&sharded, &reference] {
        let error = protect(&citus.pool, table, OnEscape::Refuse).await.expect_err("distributed");
        assert!(matches!(error, SetupError::Refused { .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("{table} cannot be protected: Citus distributes it")), "{error}");
        // It is written as before.
        citus.pool.execute(AssertSqlSafe(format!("insert into {table} values (1)"))).await?;
        unprotect(&citus.pool, table).await?;
    }
    protect(&citus.pool, &local, OnEscape::Refuse).await?;
    let escaped = citus.pool.execute(AssertSqlSafe(format!("insert into {local} values (1)"))).await;
    let error = escaped.expect_err("refused");
    assert_eq!(error.as_database_error().and_then(|error| error.code()).as_deref(), Some("IK006"));
    let listed = protected(&citus.pool).await?;
    assert!(listed.contains_key(&format!("public.{local}")), "{listed:?}");
    assert!(![&sharded, &reference].iter().any(|table| listed.contains_key(&format!("public.{table}"))), "{listed:?}");

    // The claim of a distributed key marks the coordinator's transaction.
    let write = AssertSqlSafe(format!("insert into {local} values (1)"));
    let perform = async |conn: &mut PgConnection| -> Result<(), Error> {
        conn.execute(write).await?;
        Ok(())
    };
    assert!(!calls().run(&citus.pool, &key("protected"), "body", perform).await?.is_replayed());
    citus.pool.execute(AssertSqlSafe(format!("drop table {sharded}, {reference}, {local}"))).await?;
    Ok(())
}
