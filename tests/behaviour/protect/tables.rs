//! Which tables can be protected, and what `health` finds.

use std::time::Duration;

use pg_idempotency::operator::{self, Warning};
use pg_idempotency::{Error, OnEscape, SetupError, protect, unprotect};
use rig::role::with_role;
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use super::refused::{assert_refused, create_orders, place};
use crate::support::{options, pool_of};

/// The tables and partitions with a trigger of `protect`.
async fn triggers(pool: &PgPool) -> Vec<String> {
    sqlx::query_scalar("select tgrelid::regclass::text from pg_trigger where tgname = 'idempotency_protect' order by 1")
        .fetch_all(pool)
        .await
        .expect("triggers")
}

/// The tables and partitions of `health`'s warnings of protection.
async fn gaps(pool: &PgPool) -> Vec<String> {
    let warnings = operator::health(pool, Duration::from_secs(3600)).await.expect("looked");
    let gaps = warnings.iter().filter_map(|warning| match warning {
        Warning::ProtectionGap { table } => Some(table.clone()),
        _ => None,
    });
    gaps.collect()
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn only_a_table_of_the_service_can_be_protected(pool: PgPool) -> anyhow::Result<()> {
    pool.execute(
        "create table \"Orders\" (id int);
         create view seen as select * from \"Orders\";
         create materialized view kept as select * from \"Orders\";
         create sequence numbers;
         create foreign data wrapper nowhere; create server elsewhere foreign data wrapper nowhere;
         create foreign table remote (id int) server elsewhere;
         create table mixed (id int) partition by list (id);
         create table mixed_1 partition of mixed for values in (1);
         create foreign table mixed_2 partition of mixed for values in (2) server elsewhere;
         create schema hidden; create table hidden.secret (id int)",
    )
    .await?;
    for (table, says) in [
        ("seen", "public.seen cannot be protected: it is a view"),
        ("kept", "public.kept cannot be protected: it is a view"),
        ("numbers", "it is not a table"),
        ("remote", "it is a foreign table"),
        ("mixed_1", "public.mixed_1 cannot be protected: it is a partition"),
        ("mixed", "public.mixed_2 cannot be protected: it is a foreign table"),
        ("idempotency.record", "it is a table of pg-idempotency itself"),
        ("idempotency._sqlx_migrations", "it is a table of pg-idempotency itself"),
        ("orders", "there is no table \"orders\""),
        ("secret", "there is no table \"secret\""),
        ("nowhere.orders", "there is no table \"nowhere.orders\""),
        ("a.b.c", "there is no table \"a.b.c\""),
        ("", "there is no table \"\""),
        ("seen; drop table \"Orders\"", "there is no table"),
        ("0", "there is no table \"0\""),
    ] {
        let error = protect(&pool, table, OnEscape::Refuse).await.expect_err(table);
        assert!(matches!(error, SetupError::Refused { .. }), "{table}: {error:?}");
        assert!(error.to_string().contains(says), "{table}: {error}");
        assert!(!error.is_transient());
    }
    assert_eq!(triggers(&pool).await, Vec::<String>::new(), "nothing half done");
    protect(&pool, "\"Orders\"", OnEscape::Refuse).await?;
    protect(&pool, "hidden.secret", OnEscape::Refuse).await?;
    assert_eq!(triggers(&pool).await, ["\"Orders\"", "hidden.secret"]);

    pool.execute("drop schema idempotency cascade").await?;
    let missing = protect(&pool, "\"Orders\"", OnEscape::Refuse).await;
    assert!(matches!(missing, Err(SetupError::Other(Error::SchemaMissing { .. }))), "{missing:?}");
    pool.execute("insert into \"Orders\" values (1)").await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_role_that_may_not_protect_a_table_is_told_so(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    unprotect(&pool, "line").await?;
    pool.execute("create schema hidden; create table hidden.secret (id int)").await?;
    let rights = "grant select on all tables in schema public to @role;
        grant usage on schema idempotency to @role; grant select on idempotency._sqlx_migrations to @role";
    with_role(&pool, rights, async |role| {
        let as_role = pool_of(1, &options(&pool).username(role)).await;
        for answer in [
            protect(&as_role, "line", OnEscape::Refuse).await,
            protect(&as_role, "hidden.secret", OnEscape::Refuse).await,
            unprotect(&as_role, "orders").await,
        ] {
            let error = answer.expect_err("refused");
            assert!(matches!(error, SetupError::Refused { .. }), "{error:?}");
            assert!(error.to_string().contains("do it as the owner of the table"), "{error}");
        }
        // It is protected already, so there is nothing that the role may not do.
        protect(&as_role, "orders", OnEscape::Refuse).await?;

        // A role without any right to the schema writes inside and is refused outside, like all others.
        let changed = format!("revoke all on schema idempotency from {role}; grant insert on orders to {role}");
        pool.execute(AssertSqlSafe(changed)).await?;
        assert_refused(place(&as_role, 1).await);
        let mut tx = as_role.begin().await?;
        tx.execute("set local idempotency.claim = 'exempt'").await?;
        place(&mut *tx, 1).await?;
        anyhow::Ok(())
    })
    .await
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn protecting_twice_is_protecting_once_and_the_last_mode_counts(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    let modes = async || operator::protected(&pool).await;
    // Nothing is locked, so the writer is not waited for.
    let mut writer = pool.begin().await?;
    writer.execute("set local idempotency.claim = 'exempt'").await?;
    place(&mut *writer, 1).await?;
    protect(&pool, "orders", OnEscape::Refuse).await?;
    writer.commit().await?;
    assert_eq!(modes().await?["public.orders"], OnEscape::Refuse);
    protect(&pool, "orders", OnEscape::Warn).await?;
    assert_eq!(modes().await?["public.orders"], OnEscape::Warn);
    place(&pool, 2).await?;
    protect(&pool, "orders", OnEscape::Refuse).await?;
    assert_refused(place(&pool, 3).await);
    assert_eq!(triggers(&pool).await, ["line", "orders"]);
    for _ in 0..2 {
        unprotect(&pool, "orders").await?;
        place(&pool, 3).await?;
        sqlx::raw_sql("delete from orders where id = 3").execute(&pool).await.expect_err("cascades to line");
        unprotect(&pool, "line").await?;
        sqlx::raw_sql("delete from orders where id = 3").execute(&pool).await?;
        protect(&pool, "line", OnEscape::Refuse).await?;
    }
    assert_eq!(modes().await?.keys().collect::<Vec<_>>(), ["public.line"]);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn services_that_start_at_once_protect_once(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(8, &pool.connect_options()).await;
    pool.execute("create table orders (id int, item text)").await?;
    let starting = (0..8).map(|_| {
        let pool = pool.clone();
        tokio::spawn(async move { protect(&pool, "orders", OnEscape::Refuse).await })
    });
    for started in starting.collect::<Vec<_>>() {
        started.await??;
    }
    assert_eq!(triggers(&pool).await, ["orders"]);
    // A trigger of this name that another person has created does not protect.
    pool.execute(
        "create table line (id int);
         create trigger idempotency_protect before insert on line execute function suppress_redundant_updates_trigger()",
    )
    .await?;
    protect(&pool, "line", OnEscape::Refuse).await.expect_err("the name is taken");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_partition_is_protected_and_health_names_a_gap(pool: PgPool) -> anyhow::Result<()> {
    pool.execute(
        "create table orders (id int, item text) partition by list (id);
         create table orders_1 partition of orders for values in (1);
         create table orders_2 partition of orders for values in (2) partition by list (item);
         create table orders_2_tea partition of orders_2 for values in ('tea')",
    )
    .await?;
    protect(&pool, "orders", OnEscape::Refuse).await?;
    assert_eq!(gaps(&pool).await, Vec::<String>::new());
    assert_eq!(operator::protected(&pool).await?.len(), 1, "partitions are parts of their table");
    for table in ["orders", "orders_1", "orders_2", "orders_2_tea"] {
        let delete = format!("delete from {table}");
        assert_refused(pool.execute(AssertSqlSafe(delete)).await);
    }

    pool.execute("create table orders_3 partition of orders for values in (3)").await?;
    assert_eq!(gaps(&pool).await, ["public.orders_3"]);
    // A statement that names the table fires its trigger, whichever partition it writes.
    assert_refused(place(&pool, 3).await);
    pool.execute("insert into orders_3 values (3, 'escapes')").await?;
    pool.execute("alter table orders_1 disable trigger idempotency_protect").await?;
    assert_eq!(gaps(&pool).await, ["public.orders_1", "public.orders_3"]);

    protect(&pool, "orders", OnEscape::Refuse).await?;
    assert_eq!(gaps(&pool).await, Vec::<String>::new());
    assert_refused(pool.execute("delete from orders_3").await);
    unprotect(&pool, "orders").await?;
    assert_eq!(triggers(&pool).await, Vec::<String>::new());
    pool.execute("delete from orders_3").await?;
    Ok(())
}

/// Each of these calls the function of the trigger, and lets some writes escape.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_trigger_that_somebody_made_by_hand_is_no_protection(pool: PgPool) -> anyhow::Result<()> {
    for (number, by_hand) in [
        "before insert on orders for each statement execute function idempotency.on_escape()",
        "before insert or update or delete on orders for each statement execute function idempotency.on_escape()",
        "before insert or update or delete on orders for each row execute function idempotency.on_escape()",
        "before insert or update of item or delete or truncate on orders for each statement
            execute function idempotency.on_escape()",
        "after insert or update or delete or truncate on orders for each statement
            execute function idempotency.on_escape('warn')",
        "before insert or update or delete or truncate on orders for each statement when (false)
            execute function idempotency.on_escape()",
        "before insert or update or delete or truncate on orders for each statement
            execute function idempotency.on_escape('other')",
    ]
    .iter()
    .enumerate()
    {
        let create = format!("create table orders (id int, item text); create trigger guard_{number} {by_hand}");
        pool.execute(AssertSqlSafe(create)).await?;
        assert_eq!(gaps(&pool).await, ["public.orders"], "{by_hand}");
        assert!(operator::protected(&pool).await?.is_empty(), "{by_hand}");
        protect(&pool, "orders", OnEscape::Refuse).await?;
        assert_eq!((gaps(&pool).await, triggers(&pool).await), (Vec::new(), vec!["orders".to_owned()]), "{by_hand}");
        for write in
            ["insert into orders values (1)", "update orders set id = 2", "delete from orders", "truncate orders"]
        {
            assert_refused(pool.execute(write).await);
        }
        pool.execute("drop table orders").await?;
    }
    Ok(())
}

/// Two calls that each held a weak lock of the table, and wanted the strong one, would end in a deadlock.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn calls_side_by_side_protect_and_unprotect_one_after_the_other(pool: PgPool) -> anyhow::Result<()> {
    let pool = pool_of(8, &pool.connect_options()).await;
    create_orders(&pool).await?;
    let mut first = pool.begin().await?;
    first.execute("select idempotency.protect('orders', 'warn')").await?;
    let calls = [false, true, false, true, false].map(|protects| {
        let pool = pool.clone();
        tokio::spawn(async move {
            match protects {
                true => protect(&pool, "orders", OnEscape::Warn).await,
                false => unprotect(&pool, "orders").await,
            }
        })
    });
    rig::database::until_blocked(&pool, 5).await?;
    first.commit().await?;
    for call in calls {
        call.await??;
    }
    Ok(())
}
