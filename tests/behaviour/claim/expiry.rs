//! Retention: it ends by the database's clock, and a duplicate is judged as of the moment it asked.

use std::time::Duration;

use pg_idempotency::lease::{Leasing, Policy};
use pg_idempotency::mark::{Marked, Marking, mark};
use pg_idempotency::{Error, Idempotency, InFlight, Janitor, ensure_idempotent};
use rig::database::until_blocked;
use sqlx::PgPool;

use crate::support::{WAYS, create_effects, effects, key, leave_effect, once};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_transaction_longer_than_its_retention_is_not_acknowledged(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for way in WAYS {
        let error = way
            .with_retention(Duration::from_millis(1))?
            .run(&pool, &key("a"), "body", async |conn| {
                sqlx::query("select pg_sleep(0.01)").execute(&mut *conn).await?;
                leave_effect(conn, "too late").await
            })
            .await
            .expect_err("outlived");
        assert!(matches!(error, Error::OutlivedRetention), "{error:?}");
        assert_eq!(effects(&pool).await, 0);
    }
    Ok(())
}

/// Each option that takes a duration, with durations that make no sense for it.
#[sqlx::test(migrations = false)]
async fn durations_that_make_no_sense_are_refused(pool: PgPool) -> anyhow::Result<()> {
    let options = Idempotency::new();
    let at_most_once = |lease| Leasing::new(Policy::AtMostOnce { lease });
    let lease = Duration::from_secs(40);
    let janitor = Janitor::new(pool);
    let day = Duration::from_secs(86_400);
    for sensible in [Duration::from_millis(1), Duration::from_secs(300), day * 30] {
        assert!(options.with_retention(sensible).is_ok(), "{sensible:?}");
    }
    at_most_once(lease)?.with_retention(lease * 2)?;
    janitor.clone().with_interval(Duration::from_secs(5))?;
    let century = day * 366 * 100;
    for (option, refused) in [
        ("retention", options.with_retention(Duration::ZERO).err()),
        ("retention", options.with_retention(Duration::from_nanos(1)).err()),
        ("retention", options.with_retention(century).err()),
        ("retention", options.with_retention(Duration::MAX).err()),
        ("retention", Marking::new(Duration::ZERO).err()),
        ("retention", Marking::new(Duration::MAX).err()),
        ("retention", at_most_once(lease)?.with_retention(lease * 2 - Duration::from_millis(1)).err()),
        ("wait", options.with_in_flight(InFlight::Wait(Duration::ZERO)).err()),
        ("wait", options.with_in_flight(InFlight::Wait(day)).err()),
        ("lease", at_most_once(Duration::ZERO).err()),
        ("lease", at_most_once(day).err()),
        ("interval", janitor.with_interval(Duration::ZERO).err()),
    ] {
        let refused = refused.expect(option);
        assert_eq!(refused.option, option, "{refused}");
        assert!(refused.to_string().contains(option), "{refused}");
    }
    Ok(())
}

/// The owner lets its own record expire while the duplicate waits: the duplicate had asked before.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_duplicate_is_judged_as_of_the_moment_it_asked(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let expire = "update idempotency.record set expires_at = statement_timestamp()";
    let window = Duration::from_secs(3600);
    for kind in ["ensure", "mark", "mark_many"] {
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
                    _ => Marking::new(window)?.mark_many(&mut tx, &[key]).await? == [Marked::Duplicate],
                };
                tx.commit().await?;
                Ok::<_, Error>(duplicate)
            }
        });
        until_blocked(&pool, 1).await?;
        sqlx::query(expire).execute(&mut *first).await?;
        first.commit().await?;
        assert!(duplicate.await??, "{kind}: performed twice within the window");
    }
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
    let wait = InFlight::Wait(second);
    // Whichever setter comes last refuses.
    let leasing = Leasing::new(Policy::AtLeastOnce { lease: Duration::from_millis(100) })?;
    for refused in [
        Idempotency::new().with_in_flight(wait)?.with_retention(second).err(),
        Idempotency::new().with_retention(second)?.with_in_flight(wait).err(),
        Marking::new(second)?.with_in_flight(wait).err(),
        leasing.with_in_flight(wait)?.with_retention(second).err(),
        leasing.with_retention(second)?.with_in_flight(wait).err(),
    ] {
        let refused = refused.expect("the wait is as long as the retention");
        assert_eq!((refused.option, refused.given), ("wait", second));
        // The limits that it names can be chosen.
        Idempotency::new().with_retention(second)?.with_in_flight(InFlight::Wait(refused.longest))?;
        assert!(refused.longest < second && refused.shortest < refused.longest, "{refused}");
    }

    // The default adapts itself.
    let mut tx = pool.begin().await?;
    let mut first = pool.begin().await?;
    let window = Duration::from_millis(200);
    assert_eq!(Marking::new(Duration::from_secs(60))?.mark(&mut first, &key("b")).await?, Marked::First);
    let started = std::time::Instant::now();
    let error = Marking::new(window)?.mark(&mut tx, &key("b")).await.expect_err("in flight");
    assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    assert!(started.elapsed() >= window / 2 && started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    Ok(())
}
