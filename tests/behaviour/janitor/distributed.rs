//! The sweep of a table that refuses `ctid` in a delete, as a distributed one does. A trigger refuses in its place.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::Janitor;
use sqlx::PgPool;

use crate::backend::until_blocked;
use crate::support::{create_effects, key, once};

async fn refuse_ctid(pool: &PgPool) {
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
}

async fn left(pool: &PgPool) -> Vec<String> {
    sqlx::query_scalar("select value from idempotency.record order by value").fetch_all(pool).await.expect("keys")
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "a distributed table takes no triggers")]
async fn is_swept_in_batches_and_counted_by_kind(pool: PgPool) {
    if crate::strict::partitioned() {
        return eprintln!("skipped: a table is not both partitioned and distributed");
    }
    refuse_ctid(&pool).await;
    sqlx::raw_sql(
        "
        insert into idempotency.record (mode, scope, operation, value, fingerprint, token, lease_until, completed_at, expires_at)
        select mode, 's', mode, n, case when mode <> 'mark' then '\\x0100'::bytea end, n, lease_until, completed_at,
            now() - n * interval '1 s'
        from generate_series(1, 1500) as n, (values
            ('transaction', null, now()),
            ('mark', null, now()),
            ('at_least_once', now() - interval '1 s', null)
        ) as kind (mode, lease_until, completed_at);
        insert into idempotency.record (mode, scope, operation, value, fingerprint, token, lease_until, expires_at) values
            ('at_most_once', 's', 'o', 'live lease', '\\x0100', 0, now() + interval '1 min', now() - interval '1 h'),
            ('at_most_once', 's', 'o', 'not expired', '\\x0100', 0, now() - interval '1 min', now() + interval '1 h');
        ",
    )
    .execute(&pool)
    .await
    .expect("records");
    let janitor =
        Janitor::new(pool.clone()).with_grace(Duration::ZERO).with_batch_size(NonZeroU32::new(300).expect("not zero"));
    let limited = janitor.sweep_once(600).await.expect("swept");
    assert_eq!((limited.rows(), limited.limited), (600, true));
    let swept = janitor.sweep_once(u64::MAX).await.expect("swept");
    assert_eq!((swept.rows(), swept.limited), (3900, false));
    assert_eq!(
        (limited.completed + swept.completed, limited.unfinished + swept.unfinished, limited.marks + swept.marks),
        (1500, 1500, 1500)
    );
    assert_eq!(left(&pool).await, ["live lease", "not expired"]);
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "a distributed table takes no triggers")]
async fn keeps_what_is_taken_over_while_the_sweep_waits_for_it(pool: PgPool) {
    if crate::strict::partitioned() {
        return eprintln!("skipped: a table is not both partitioned and distributed");
    }
    create_effects(&pool).await;
    refuse_ctid(&pool).await;
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
        let janitor = Janitor::new(pool.clone()).with_grace(Duration::ZERO);
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
    if crate::strict::partitioned() {
        return eprintln!("skipped: a table is not both partitioned and distributed");
    }
    refuse_ctid(&pool).await;
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
    let janitor =
        Janitor::new(pool.clone()).with_grace(Duration::ZERO).with_batch_size(NonZeroU32::new(10).expect("not zero"));
    assert_eq!(janitor.sweep_once(u64::MAX).await.expect("swept").rows(), 30);
    assert_eq!(left(&pool).await, ["turned up"]);
    assert_eq!(janitor.sweep_once(u64::MAX).await.expect("swept").rows(), 1);
}
