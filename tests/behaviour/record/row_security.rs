//! Row level security on the crate's tables, and on those of the service.

use std::time::Duration;

use pg_idempotency::lease::{Finding, InDoubt, Lease};
use pg_idempotency::operator::{self, Warning};
use pg_idempotency::testing::expire;
use pg_idempotency::{Error, Idempotency, SettleError};
use rig::role::with_role;
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::lease::reconcile::{in_doubt, reconciler};
use crate::lease::resume::{abandoned, leasing};
use crate::support::{janitor, key, leave_effect, once, options, pool_of};

const HOUR: Duration = Duration::from_secs(3600);

/// A role that may read and write the crate's tables. A sweep names each partition.
const MEMBER: &str = "grant usage on schema idempotency to @role;
    grant select, insert, update, delete on all tables in schema idempotency to @role";

fn is_refused<R: std::fmt::Debug>(door: &str, answer: Result<R, Error>) {
    match answer {
        Err(Error::Database(error)) => {
            let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default().into_owned();
            assert_eq!(code, "42501", "{door}: {error}");
        }
        other => panic!("{door} says {other:?}"),
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn no_door_says_that_all_is_well_where_a_policy_could_hide_a_record(pool: PgPool) -> anyhow::Result<()> {
    crate::support::create_effects(&pool).await;
    in_doubt(&pool, "in doubt").await;
    abandoned(&pool, "abandoned").await;
    let shown = operator::show(&pool, &key("in doubt")).await?.expect("a record");
    with_role(&pool, MEMBER, async |role| {
        let of_role = &pool_of(1, &options(&pool).username(role)).await;
        let looks_up = async |_: &InDoubt| -> Result<Finding, Error> { panic!("it was not found") };
        let work = async |_: &Lease, _: String| -> Result<String, Error> { panic!("it was not found") };
        for policy in [
            "alter table idempotency.record enable row level security",
            "create policy own on idempotency.record using (scope = current_setting('app.scope', true))",
            "create policy every on idempotency.record using (true)",
        ] {
            pool.execute(policy).await?;
            is_refused("sweep", janitor(of_role).sweep_once(10).await);
            is_refused("unsettled", operator::unsettled(of_role, 10, None, Some(HOUR)).await);
            is_refused("show", operator::show(of_role, &key("in doubt")).await);
            is_refused("stats", operator::stats(of_role).await);
            let is_refused_to_settle = |verb: &str, settled: Result<(), SettleError>| match settled {
                Err(SettleError::Other(error)) => is_refused(verb, Err::<(), _>(error)),
                other => panic!("{verb} says {other:?}"),
            };
            is_refused_to_settle("forget", shown.clone().forget(of_role).await);
            is_refused_to_settle("resolve", shown.clone().resolve(of_role, &1, HOUR).await.map(drop));
            is_refused_to_settle("release", shown.clone().release(of_role, "").await.map(drop));
            is_refused_to_settle("grant", shown.clone().grant(of_role, "").await.map(drop));
            let mut tx = of_role.begin().await?;
            is_refused_to_settle("release in a transaction", shown.clone().release(&mut tx, "").await.map(drop));
            tx.rollback().await?;
            is_refused("reconciler", reconciler().visit_one(of_role, looks_up).await);
            is_refused("resumer", leasing().resume_one(of_role, "operation", work).await);
            let table = "idempotency.record".to_owned();
            let warnings = operator::health(of_role, HOUR).await?;
            assert_eq!(warnings, [Warning::RowSecurity { tables: table }], "{policy}");
        }
        pool.execute("alter table idempotency._sqlx_migrations enable row level security").await?;
        let warnings = operator::health(of_role, HOUR).await?;
        let tables = "idempotency._sqlx_migrations, idempotency.record".to_owned();
        assert_eq!(warnings, [Warning::RowSecurity { tables }]);
        // What the warning advises.
        pool.execute(AssertSqlSafe(format!("alter role {role} bypassrls"))).await?;
        assert!(operator::health(of_role, HOUR).await?.iter().all(|warning| warning.name() != "row_security"));
        // Not earlier: a sweep may delete from a partition before it asks the table, whose policies it meets.
        let _ = once(&pool, &key("expired"), "body").await?;
        expire(&pool, &key("expired")).await?;
        assert_eq!(janitor(of_role).sweep_once(10).await?.rows(), 1);
        assert_eq!(operator::unsettled(of_role, 10, None, None).await?.len(), 1);
        anyhow::Ok(())
    })
    .await
}

/// Otherwise the service's next statement on the connection would fail.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_policies_of_a_service_hold_beside_a_janitor_a_resumer_and_a_reconciler_on_its_pool(
    pool: PgPool,
) -> anyhow::Result<()> {
    in_doubt(&pool, "in doubt").await;
    abandoned(&pool, "abandoned").await;
    with_role(&pool, MEMBER, async |role| {
        let of_role = &pool_of(1, &options(&pool).username(role)).await;
        let create = format!(
            "create table orders (owner text not null); insert into orders values ('ann'), ('bob');
             alter table orders enable row level security;
             create policy own on orders using (owner = 'ann'); grant select on orders to {role};
             create table effect (id bigint generated always as identity, note text not null);
             alter table effect enable row level security; create policy every on effect using (true);
             grant select, insert on effect to {role}"
        );
        pool.execute(AssertSqlSafe(create)).await?;
        let orders = async || sqlx::query_scalar::<_, i64>("select count(*) from orders").fetch_one(of_role).await;
        janitor(of_role).sweep_once(10).await?;
        assert_eq!(orders().await?, 1);
        operator::unsettled(of_role, 10, None, None).await?;
        assert_eq!(orders().await?, 1);
        let looks_up = async |_: &InDoubt| Ok::<_, Error>(Finding::Unknown);
        reconciler().visit_one(of_role, looks_up).await?;
        assert_eq!(orders().await?, 1);
        // The step's code is the service's.
        let work = async |lease: &Lease, body: String| -> Result<i64, Error> {
            lease.step("effect", async |conn| leave_effect(conn, &body).await).await
        };
        assert!(leasing().resume_one(of_role, "operation", work).await?.is_some());
        assert_eq!(orders().await?, 1);
        let shown = operator::show(of_role, &key("in doubt")).await?.expect("a record");
        let mut tx = of_role.begin().await?;
        shown.release(&mut tx, "a test").await?;
        assert_eq!(sqlx::query_scalar::<_, i64>("select count(*) from orders").fetch_one(&mut *tx).await?, 1);
        tx.commit().await?;
        let _ = Idempotency::new()
            .run(of_role, &key("a call"), "body", async |conn| leave_effect(conn, "body").await)
            .await?;
        assert_eq!(orders().await?, 1);
        anyhow::Ok(())
    })
    .await
}
