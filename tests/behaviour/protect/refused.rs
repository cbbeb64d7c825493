//! Writes to a protected table that are outside an idempotent operation.

use std::time::Duration;

use pg_idempotency::lease::LeaseOptions;
use pg_idempotency::mark::{MarkOptions, Marked, mark};
use pg_idempotency::{Error, Idempotency, OnEscape, Verdict, ensure_idempotent, protect};
use rig::lease::IN_STEPS;
use sqlx::{Acquire as _, Executor as _, PgConnection, PgPool};

use crate::support::key;

const WINDOW: Duration = Duration::from_secs(300);

/// A protected table of orders, and one of their lines, which a deletion of an order deletes.
pub(super) async fn create_orders(pool: &PgPool) -> anyhow::Result<()> {
    pool.execute(
        "create table orders (id int primary key, item text not null);
         create table line (orders int not null references orders on delete cascade)",
    )
    .await?;
    for table in ["orders", "line"] {
        protect(pool, table, OnEscape::Refuse).await?;
    }
    Ok(())
}

pub(super) async fn place<'c>(on: impl sqlx::PgExecutor<'c>, id: i32) -> sqlx::Result<i32> {
    sqlx::query("insert into orders values ($1, 'tea')").bind(id).execute(on).await.map(|_| id)
}

pub(super) async fn orders(pool: &PgPool) -> Vec<i32> {
    sqlx::query_scalar("select id from orders order by 1").fetch_all(pool).await.expect("orders")
}

/// Refused with a text that says what happened, and what to do.
#[track_caller]
pub(super) fn assert_refused<T>(written: sqlx::Result<T>) {
    let error = written.err().expect("it is refused");
    let refusal = error.as_database_error().expect("by the server");
    assert_eq!(refusal.code().as_deref(), Some("IK006"), "{refusal}");
    let advice = "set local idempotency.claim = 'exempt'";
    for part in ["was written outside an idempotent operation", "write through the transaction of the call", advice] {
        assert!(refusal.message().contains(part), "{refusal}");
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn another_connection_and_autocommit_are_refused(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    assert_refused(place(&pool, 1).await);
    let mut tx = pool.begin().await?;
    assert_refused(place(&mut *tx, 1).await);
    tx.rollback().await?;
    let key = key("a");
    let placed = Idempotency::new().run(&pool, &key, "body", async |conn| {
        assert_refused(place(&pool, 1).await);
        let mut other = pool.begin().await?;
        assert_refused(place(&mut *other, 1).await);
        Ok::<_, Error>(place(conn, 2).await?)
    });
    assert!(!placed.await?.is_replayed());
    assert_eq!(orders(&pool).await, [2]);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_write_after_a_replay_or_a_duplicate_is_refused(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    let keys = [key("many 1"), key("many 2")];
    let mut tx = pool.begin().await?;
    let perform = async |conn: &mut PgConnection| Ok::<_, Error>(place(conn, 1).await?);
    assert!(!ensure_idempotent(&mut tx, &key("call"), "body", perform).await?.is_replayed());
    assert_eq!(mark(&mut tx, &key("mark"), WINDOW).await?, Marked::First);
    assert_eq!(MarkOptions::new(WINDOW).mark_many(&mut tx, &keys).await?, [Marked::First; 2]);
    tx.commit().await?;

    let mut tx = pool.begin().await?;
    assert!(ensure_idempotent(&mut tx, &key("call"), "body", perform).await?.is_replayed());
    assert_refused(place(&mut *tx, 2).await);
    tx.rollback().await?;
    let mut tx = pool.begin().await?;
    assert_eq!(mark(&mut tx, &key("mark"), WINDOW).await?, Marked::Duplicate);
    assert_refused(place(&mut *tx, 2).await);
    tx.rollback().await?;
    let mut tx = pool.begin().await?;
    assert_eq!(MarkOptions::new(WINDOW).mark_many(&mut tx, &keys).await?, [Marked::Duplicate; 2]);
    assert_refused(place(&mut *tx, 2).await);
    tx.rollback().await?;

    // If the same transaction has claimed another key, the database sees no difference.
    let mut tx = pool.begin().await?;
    assert_eq!(mark(&mut tx, &key("mark"), WINDOW).await?, Marked::Duplicate);
    assert_eq!(mark(&mut tx, &key("another"), WINDOW).await?, Marked::First);
    place(&mut *tx, 2).await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_claim_that_is_undone_permits_no_write(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    let mut tx = pool.begin().await?;
    let mut savepoint = tx.begin().await?;
    let _ = mark(&mut savepoint, &key("undone"), WINDOW).await?;
    place(&mut *savepoint, 1).await?;
    savepoint.rollback().await?;
    assert_refused(place(&mut *tx, 1).await);
    tx.rollback().await?;

    let mut tx = pool.begin().await?;
    let failing = async |_: &mut PgConnection| Err::<Verdict<i32>, Error>(Error::LeaseLost);
    Idempotency::new().ensure_isolated(&mut tx, &key("released"), "body", failing).await.expect_err("perform fails");
    assert_refused(place(&mut *tx, 1).await);
    Ok(())
}

/// The mistake that the guide's page `promises` lists: such writes stay if the table is not protected.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_write_after_perform_has_ended_its_transaction_is_refused(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    for end in ["commit", "rollback", "commit; begin"] {
        let key = key(end);
        let result = Idempotency::new().run(&pool, &key, "body", async |conn| {
            sqlx::raw_sql(sqlx::AssertSqlSafe(end)).execute(&mut *conn).await?;
            assert_refused(place(&mut *conn, 1).await);
            Ok::<_, Error>(1)
        });
        result.await.expect_err("it is not acknowledged");
    }
    assert!(orders(&pool).await.is_empty());
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_work_of_a_lease_outside_a_step_is_refused(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    let leasing = LeaseOptions::new(IN_STEPS);
    let key = key("a");
    let working = leasing.run(&pool, &key, "body", async |lease| {
        assert_refused(place(&pool, 1).await);
        let id = lease.step("order", async |conn| Ok::<_, Error>(place(conn, 2).await?)).await?;
        let mut tx = pool.begin().await?;
        assert_refused(place(&mut *tx, 1).await);
        // A step outside the database has no transaction.
        lease
            .step_at_least_once("call", async |_| {
                assert_refused(place(&pool, 1).await);
                Ok::<_, Error>(())
            })
            .await?;
        Ok::<_, Error>(id)
    });
    assert_eq!(working.await?.into_inner(), 2);
    assert_eq!(orders(&pool).await, [2]);
    Ok(())
}

/// The trigger fires for the statement, whatever it finds to write.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn every_statement_that_writes_is_refused(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    pool.execute(
        "create table plain (id int primary key);
         insert into plain values (1);
         create function place(int) returns void language sql as 'insert into orders values ($1, ''tea'')';
         create view of_tea as select * from orders where item = 'tea'",
    )
    .await?;
    let mut statements = vec![
        "insert into orders values (1, 'tea')",
        "insert into orders values (1, 'tea') on conflict (id) do update set item = 'tea'",
        "insert into orders values (1, 'tea') on conflict do nothing",
        "insert into orders select id, 'tea' from plain where false",
        "update orders set item = 'tea'",
        "delete from orders where false",
        "with deleted as (delete from orders returning id) select count(*) from deleted",
        "truncate orders cascade",
        "truncate plain, orders, line",
        "select place(1)",
        "insert into of_tea values (1, 'tea')",
        "do $$ begin insert into orders values (1, 'tea'); end $$",
    ];
    let version: i32 = sqlx::query_scalar("select current_setting('server_version_num')::int").fetch_one(&pool).await?;
    if version >= 15_00_00 {
        statements.push(
            "merge into orders using plain on orders.id = plain.id when not matched then insert values (1, 'tea')",
        );
    }
    for statement in statements {
        assert_refused(sqlx::raw_sql(statement).execute(&pool).await);
    }
    let mut conn = pool.acquire().await?;
    let copied = async {
        let mut copy = conn.copy_in_raw("copy orders from stdin").await?;
        copy.send(&b"1\ttea\n"[..]).await?;
        copy.finish().await
    };
    assert_refused(copied.await);
    // What only reads is none of the trigger's business.
    pool.execute("begin; select * from orders for update; commit").await?;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_cascade_from_a_table_that_is_not_protected_is_refused(pool: PgPool) -> anyhow::Result<()> {
    create_orders(&pool).await?;
    pg_idempotency::unprotect(&pool, "orders").await?;
    place(&pool, 1).await?;
    assert_refused(pool.execute("delete from orders").await);
    // Without lines, too: the cascade is a statement that touches no row.
    let mut tx = pool.begin().await?;
    let _ = mark(&mut tx, &key("a"), WINDOW).await?;
    tx.execute("delete from orders").await?;
    Ok(())
}
