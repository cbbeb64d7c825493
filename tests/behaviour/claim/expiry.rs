//! Retention: it ends by the database's clock, and a duplicate is judged as of the moment it asked.

use std::pin::pin;
use std::time::Duration;

use futures_util::FutureExt as _;
use pg_idempotency::lease::{Lease, LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, Marked, mark};
use pg_idempotency::{Error, Idempotency, Misuse, OnDuplicate, ensure_idempotent};
use rig::cases::each;
use rig::database::{pool_of, until_blocked};
use rig::proxy::Proxy;
use sqlx::{PgConnection, PgPool};

use crate::support::{create_effects, effects, key, leave_effect, once, shown};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_transaction_longer_than_its_retention_is_not_acknowledged(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let error = Idempotency::new()
        .retention(Duration::from_millis(1))
        .run(&pool, &key("a"), "body", async |conn| {
            sqlx::query("select pg_sleep(0.01)").execute(&mut *conn).await?;
            leave_effect(conn, "too late").await
        })
        .await
        .expect_err("outlived");
    assert!(matches!(error, Error::OutlivedRetention), "{error:?}");
    assert_eq!(effects(&pool).await, 0);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn any_retention_is_kept_to_the_microsecond(pool: PgPool) -> anyhow::Result<()> {
    const SHORTEST: Duration = Duration::from_millis(1);
    for retention in [SHORTEST, Duration::from_micros(1_500_001), Duration::from_secs(10 * 366 * 86_400)] {
        sqlx::query("delete from idempotency.record").execute(&pool).await?;
        let _ =
            Idempotency::new().retention(retention).run(&pool, &key("a"), "body", async |_| Ok::<_, Error>(1)).await;
        let kept: Option<f64> =
            sqlx::query_scalar("select extract(epoch from expires_at - claimed_at)::float8 from idempotency.record")
                .fetch_optional(&pool)
                .await?;
        match kept {
            // The claim runs some time after the BEGIN.
            Some(kept) => assert!((-1e-6..5.0).contains(&(kept - retention.as_secs_f64())), "{kept}"),
            None => assert_eq!(retention, SHORTEST, "only that one may be over before the completion"),
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_duplicate_is_judged_as_of_the_moment_it_asked(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let expire = "update idempotency.record set expires_at = statement_timestamp()";
    let window = Duration::from_secs(3600);
    each(["ensure", "mark", "mark_many"], async |kind| {
        let key = key(kind);
        let mut first = pool.begin().await?;
        match kind {
            "ensure" => {
                let effect = async |conn: &mut sqlx::PgConnection| leave_effect(conn, "first").await;
                let _ = ensure_idempotent(&mut first, &key, "body", effect).await?;
            }
            _ => assert_eq!(mark(&mut first, &key, window).await?, Marked::First),
        }
        let duplicate = tokio::spawn({
            let (pool, key) = (pool.clone(), key.clone());
            async move {
                let mut tx = pool.begin().await?;
                let duplicate = match kind {
                    "ensure" => {
                        let effect = async |conn: &mut sqlx::PgConnection| leave_effect(conn, "second").await;
                        ensure_idempotent(&mut tx, &key, "body", effect).await?.is_replayed()
                    }
                    "mark" => mark(&mut tx, &key, window).await? == Marked::Duplicate,
                    _ => MarkOptions::new(window).mark_many(&mut tx, &[key]).await? == [Marked::Duplicate],
                };
                tx.commit().await?;
                Ok::<_, Error>(duplicate)
            }
        });
        until_blocked(&pool, 1).await?;
        sqlx::query(expire).execute(&mut *first).await?;
        first.commit().await?;
        assert!(duplicate.await??, "{kind}: performed twice within the window");
        Ok(())
    })
    .await;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_claim_after_a_wait_counts_its_retention_from_itself(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let mut first = pool.begin().await?;
    let _ = ensure_idempotent(&mut first, &key("a"), "body", async |conn| leave_effect(conn, "first").await).await?;
    let second = tokio::spawn({
        let pool = pool.clone();
        async move { once(&pool, &key("a"), "body").await }
    });
    until_blocked(&pool, 1).await?;
    let asked_before: chrono::DateTime<chrono::Utc> =
        sqlx::query_scalar("select clock_timestamp()").fetch_one(&pool).await?;
    first.rollback().await?;
    assert!(!second.await??.is_replayed());
    let whole: bool = sqlx::query_scalar("select expires_at >= $1 + interval '24 h' from idempotency.record")
        .bind(asked_before)
        .fetch_one(&pool)
        .await?;
    assert!(whole, "counted from before the wait");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_wait_is_shorter_than_what_is_remembered(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let second = Duration::from_secs(1);
    let wait = OnDuplicate::Wait(second);
    let body = "body";
    let leasing = LeaseOptions::new(Policy::AtLeastOnce { lease: Duration::from_millis(100) });
    let mut tx = pool.begin().await?;
    let effect = async |_: &mut PgConnection| -> Result<i64, Error> { panic!("it may be forgotten during the wait") };
    let work = async |_: &Lease| -> Result<i64, Error> { panic!("it may be forgotten during the wait") };
    for refused in [
        Idempotency::new()
            .on_duplicate(wait)
            .retention(second)
            .ensure(&mut tx, &key("a"), body, effect)
            .await
            .map(drop),
        Idempotency::new().retention(second).on_duplicate(wait).run(&pool, &key("a"), body, effect).await.map(drop),
        MarkOptions::new(second).on_duplicate(wait).mark(&mut tx, &key("a")).await.map(drop),
        MarkOptions::new(second).on_duplicate(wait).mark_many(&mut tx, &[key("a")]).await.map(drop),
        leasing.on_duplicate(wait).retention(second).run(&pool, &key("a"), body, work).await.map(drop),
        leasing.retention(Duration::from_millis(199)).run(&pool, &key("a"), body, work).await.map(drop),
    ] {
        assert!(matches!(refused, Err(Error::Misuse(Misuse::Options { .. }))), "{refused:?}");
    }
    drop(tx);

    // The default adapts itself.
    let mut tx = pool.begin().await?;
    let mut first = pool.begin().await?;
    let window = Duration::from_millis(200);
    assert_eq!(MarkOptions::new(Duration::from_secs(60)).mark(&mut first, &key("b")).await?, Marked::First);
    let started = std::time::Instant::now();
    let error = MarkOptions::new(window).mark(&mut tx, &key("b")).await.expect_err("in flight");
    assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    assert!(started.elapsed() >= window / 2 && started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    Ok(())
}

/// A suspended owner may wake, renew its lease, and die, all between another call's look and its take-over. The token
/// stays the same.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_is_renewed_after_the_look_is_not_taken_over_as_expired(pool: PgPool) -> anyhow::Result<()> {
    let insert = "insert into idempotency.record
            (mode, scope, operation, value, fingerprint, token, claimed_at, lease_until, expires_at)
        values ('at_least_once', 'tenant', 'operation', $1, '\\x0300', 7,
            now() - interval '2 h', now() - interval '1 h', now())";
    let key = key("a");
    sqlx::query(insert).bind(key.value()).execute(&pool).await?;

    let proxy = Proxy::listening(&pool.connect_options()).await?;
    let through = pool_of(1, &proxy.options).await;
    let mut tx = through.begin().await?;
    let options = Idempotency::new();
    let perform = async |_: &mut PgConnection| Ok::<_, Error>("another mode".to_owned());
    let mut call = pin!(options.ensure(&mut tx, &key, "another body", perform));
    // A connection prepares a statement before it executes it, so the take-over has not begun.
    while !proxy.statements().iter().any(|statement| statement.contains("pg_idempotency: take over")) {
        assert!(call.as_mut().now_or_never().is_none(), "the call ended without a take-over");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let renew = "update idempotency.record set expires_at = statement_timestamp() + interval '1 day' where value = $1";
    sqlx::query(renew).bind(key.value()).execute(&pool).await?;
    let refused = call.await.expect_err("the key belongs to a lease");
    assert!(matches!(refused, Error::OtherMode { .. }), "{refused:?}");
    assert_eq!(shown(&pool, &key).await.token, 7, "the record is as its owner left it");
    Ok(())
}
