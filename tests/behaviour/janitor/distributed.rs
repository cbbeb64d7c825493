//! The sweep of a table that refuses `ctid` in a delete, as a distributed one does. A trigger refuses in its place.

use std::num::NonZeroU32;

use sqlx::PgPool;

use crate::backend::until_blocked;
use crate::support::{create_effects, janitor, key, once};

/// Whether the table refuses it now.
async fn refuses_ctid(pool: &PgPool) -> bool {
    if crate::strict::partitioned() {
        eprintln!("skipped: a table is not both partitioned and distributed");
        return false;
    }
    sqlx::raw_sql(
        "
        create function refuse_ctid() returns trigger language plpgsql as $$
        begin
            if current_query() like '%ctid%' then
                raise exception 'ctid is not supported on distributed tables' using errcode = '0A000';
            end if;
            return null;
        end $$;
        create trigger refuse_ctid before delete on idempotency.record for each statement execute function refuse_ctid();
        ",
    )
    .execute(pool)
    .await
    .expect("a trigger");
    true
}

async fn left(pool: &PgPool) -> Vec<String> {
    sqlx::query_scalar("select value from idempotency.record order by value").fetch_all(pool).await.expect("keys")
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "a distributed table takes no triggers")]
async fn a_sweep_keeps_a_record_that_is_taken_over_while_it_waits(pool: PgPool) {
    create_effects(&pool).await;
    if !refuses_ctid(&pool).await {
        return;
    }
    let key = key("taken over");
    let _ = once(&pool, &key, "first").await.expect("performed");
    sqlx::raw_sql("update idempotency.record set expires_at = now() - interval '1 s'")
        .execute(&pool)
        .await
        .expect("expired");
    let mut taker = pool.begin().await.expect("begun");
    let outcome = pg_idempotency::ensure_idempotent(&mut taker, &key, "second", async |conn| {
        crate::support::leave_effect(conn, "second").await
    });
    let _ = outcome.await.expect("taken over");
    let sweep = tokio::spawn({
        let janitor = janitor(&pool);
        async move { janitor.sweep_once(u64::MAX).await }
    });
    until_blocked(&pool, 1).await.expect("blocked");
    taker.commit().await.expect("committed");
    assert_eq!(sweep.await.expect("joined").expect("swept").rows(), 0);
    assert_eq!(left(&pool).await, ["taken over"]);
}

/// Each batch begins where the one before ended, so that it does not walk over the index entries of what is deleted. It
/// shows by a record whose end is earlier still and that turns up in between: it is left to the next sweep.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "a distributed table takes no triggers")]
async fn a_batch_begins_where_the_one_before_ended(pool: PgPool) {
    if !refuses_ctid(&pool).await {
        return;
    }
    sqlx::raw_sql(
        "
        insert into idempotency.record (mode, scope, operation, value, token, completed_at, expires_at)
        select 'mark', 's', 'o', n, n, now(), now() - n * interval '1 s' from generate_series(1, 30) as n;
        create function turn_up() returns trigger language plpgsql as $$
        begin
            insert into idempotency.record (mode, scope, operation, value, token, completed_at, expires_at)
            values ('mark', 's', 'o', 'turned up', 0, now(), now() - interval '1 h');
            return null;
        end $$;
        create trigger turn_up after delete on idempotency.record
            for each row when (old.value = '30') execute function turn_up();
        ",
    )
    .execute(&pool)
    .await
    .expect("records");
    let janitor = janitor(&pool).with_batch_size(NonZeroU32::new(10).expect("not zero"));
    assert_eq!(janitor.sweep_once(u64::MAX).await.expect("swept").rows(), 30);
    assert_eq!(left(&pool).await, ["turned up"]);
    assert_eq!(janitor.sweep_once(u64::MAX).await.expect("swept").rows(), 1);
}
