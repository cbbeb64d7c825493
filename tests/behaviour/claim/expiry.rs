//! Retention: it ends by the database's clock, and a duplicate is judged as of the moment it asked.

use std::time::Duration;

use pg_idempotency::lease::{Leasing, Policy};
use pg_idempotency::mark::{Marked, Marking, mark, mark_many};
use pg_idempotency::{Error, Idempotency, InFlight, Outcome, ensure_idempotent};
use sqlx::PgPool;

use crate::backend::until_blocked;
use crate::support::{WAYS, create_effects, effects, expire_in, key, leave_effect, once, rejecting};

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn an_expired_key_is_new_also_unswept_and_with_another_body(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for options in [Idempotency::new(), rejecting()] {
        let key = key(if options == rejecting() { "reject" } else { "wait" });
        let _ = once(&pool, &key, "body").await?;
        expire_in(&pool, &key, Duration::ZERO).await?;
        let outcome = options.run(&pool, &key, "other", async |conn| leave_effect(conn, "other").await).await?;
        assert!(!outcome.is_replayed());
        let again = options.run(&pool, &key, "other", async |conn| leave_effect(conn, "other").await).await?;
        assert!(matches!(again, Outcome::Replayed(id) if id == outcome.into_inner()));
    }
    assert_eq!(effects(&pool).await, 4);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn retention_is_exact_by_the_databases_clock(pool: PgPool) -> anyhow::Result<()> {
    let window = Duration::from_secs(300);
    let options = Idempotency::new().with_retention(window)?;
    let _ = options.run(&pool, &key("a"), "body", async |_| -> Result<i64, Error> { Ok(1) }).await?;
    let exact: bool = sqlx::query_scalar(
        "select expires_at - claimed_at between interval '300 s' and interval '301 s' from idempotency.record",
    )
    .fetch_one(&pool)
    .await?;
    assert!(exact, "counted from the claim");

    // The edge, without waiting for it: the statement's own time is the bound, so a record that ends in a minute is
    // alive, and one that ended a microsecond ago is not.
    expire_in(&pool, &key("a"), Duration::from_secs(60)).await?;
    assert!(once(&pool, &key("a"), "body").await.is_ok_and(|outcome| outcome.is_replayed()));
    sqlx::query("update idempotency.record set expires_at = statement_timestamp()").execute(&pool).await?;
    let outcome = options.run(&pool, &key("a"), "body", async |_| -> Result<i64, Error> { Ok(2) }).await?;
    assert!(!outcome.is_replayed());
    Ok(())
}

/// Both sides of the edge, in one transaction whose `statement_timestamp()` moves on: never replayed past the end,
/// never performed before it.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_short_retention_ends_when_the_clock_says_so(pool: PgPool) -> anyhow::Result<()> {
    let options = Idempotency::new().with_retention(Duration::from_millis(200))?;
    let _ = options.run(&pool, &key("a"), "body", async |_| -> Result<i64, Error> { Ok(1) }).await?;
    let mut turned = false;
    while !turned {
        let before: bool = sqlx::query_scalar("select clock_timestamp() >= expires_at from idempotency.record")
            .fetch_one(&pool)
            .await?;
        let outcome = options.run(&pool, &key("a"), "body", async |_| -> Result<i64, Error> { Ok(2) }).await?;
        turned = !outcome.is_replayed();
        assert!(turned || !before, "replayed although it was past its end before it was asked for");
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
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

#[test]
fn durations_that_make_no_sense_are_refused() {
    let options = Idempotency::new();
    for sensible in [Duration::from_millis(1), Duration::from_secs(300), Duration::from_secs(30 * 86_400)] {
        assert!(options.with_retention(sensible).is_ok(), "{sensible:?}");
    }
    for absurd in [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(100 * 366 * 86_400), Duration::MAX] {
        let error = options.with_retention(absurd).expect_err("absurd");
        assert_eq!(error.given, absurd);
        assert!(error.to_string().contains("retention"), "{error}");
    }
    for absurd in [Duration::ZERO, Duration::from_secs(86_400)] {
        options.with_in_flight(pg_idempotency::InFlight::Wait(absurd)).expect_err("absurd");
    }
}

/// The owner lets its own record expire while the duplicate waits: the duplicate had asked before.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
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
                    _ => mark_many(&mut tx, &[key], window).await? == [Marked::Duplicate],
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

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
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

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_wait_is_shorter_than_what_is_remembered(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let second = Duration::from_secs(1);
    let wait = InFlight::Wait(second);
    let refused = |error: &Error| matches!(error, Error::InvalidDuration(invalid) if invalid.option == "wait");
    for options in [
        Idempotency::new().with_in_flight(wait)?.with_retention(second)?,
        Idempotency::new().with_retention(second)?.with_in_flight(wait)?,
    ] {
        let error = options.run(&pool, &key("a"), "body", async |_| Ok::<_, Error>(1)).await.expect_err("too long");
        assert!(refused(&error), "{error:?}");
    }
    let marking = Marking::new(second)?.with_in_flight(wait)?;
    let mut tx = pool.begin().await?;
    assert!(refused(&marking.mark(&mut tx, &key("a")).await.expect_err("too long")));
    assert!(refused(&marking.mark_many(&mut tx, &[key("a")]).await.expect_err("too long")));
    let lease = Policy::AtLeastOnce { lease: Duration::from_millis(100) };
    let leasing = Leasing::new(lease)?.with_in_flight(InFlight::Wait(second))?.with_retention(second)?;
    let error = leasing.acquire::<i64, _>(&pool, &key("a"), "body").await.expect_err("too long");
    assert!(refused(&error), "{error:?}");

    // The default adapts itself.
    let mut first = pool.begin().await?;
    let window = Duration::from_millis(200);
    assert_eq!(Marking::new(Duration::from_secs(60))?.mark(&mut first, &key("b")).await?, Marked::First);
    let started = std::time::Instant::now();
    let error = Marking::new(window)?.mark(&mut tx, &key("b")).await.expect_err("in flight");
    assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    assert!(started.elapsed() >= window / 2 && started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    Ok(())
}
