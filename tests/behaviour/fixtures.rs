//! The fixtures that users get (feature `testing`), used as they use them.

use pg_idempotency::{Error, Idempotency, Outcome, testing};
use sqlx::PgPool;

use crate::support::{create_effects, effects, key, once, rejecting};

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn completed_is_replayed(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = pool.acquire().await?;
    testing::completed(&mut conn, &key("a"), "body", &7).await?;
    assert_eq!(once(&pool, &key("a"), "body").await?, Outcome::Replayed(7));
    testing::completed(&mut conn, &key("a"), "another", &8).await?;
    assert_eq!(once(&pool, &key("a"), "another").await?, Outcome::Replayed(8), "whatever stood there before");
    assert!(matches!(once(&pool, &key("a"), "body").await, Err(Error::KeyReused { .. })));
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn expired_is_performed_again(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    testing::expired(&mut *pool.acquire().await?, &key("a"), "body", &7).await?;
    assert_eq!(once(&pool, &key("a"), "another").await?, Outcome::Performed(1));
    assert_eq!(effects(&pool).await, 1);
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn in_flight_is_in_flight_until_it_completes_or_is_dropped(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let reject = async |name: &str| {
        let key = key(name);
        rejecting().run(&pool, &key, "body", async |_| -> Result<i64, Error> { panic!("not performed") }).await
    };
    let call = testing::in_flight(&pool, &key("a"), "body").await?;
    assert!(matches!(reject("a").await, Err(Error::InFlight { .. })));
    call.complete(&7).await?;
    assert_eq!(reject("a").await?, Outcome::Replayed(7));

    let call = testing::in_flight(&pool, &key("b"), "body").await?;
    assert!(matches!(reject("b").await, Err(Error::InFlight { .. })));
    drop(call);
    let outcome: Outcome<i64> = Idempotency::new().run(&pool, &key("b"), "body", async |_| Ok::<_, Error>(8)).await?;
    assert_eq!(outcome, Outcome::Performed(8));
    Ok(())
}
