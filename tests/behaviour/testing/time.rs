//! The time that a test moves.

use std::time::Duration;

use pg_idempotency::lease::Policy;
use pg_idempotency::operator::show;
use pg_idempotency::testing::{age, expire, lapse};
use pg_idempotency::{Error, Key, Outcome};
use rig::fixture::Fixture;
use sqlx::PgPool;

use crate::support::{expire_in, key, once};

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

async fn state(pool: &PgPool, key: &Key) -> anyhow::Result<String> {
    let shown = show(pool, key).await?;
    Ok(shown.map_or_else(|| "no record".to_owned(), |shown| shown.state.to_string()))
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn time_passes_when_the_test_moves_it(pool: PgPool) -> anyhow::Result<()> {
    let key = key("a");
    for (move_it, is) in [(0, "completed"), (1, "completed"), (2, "expired"), (3, "expired")] {
        Fixture::completed(&key, "body", &7)?.write(&pool).await?;
        match move_it {
            0 => {}
            1 => age(&pool, &key, DAY - HOUR).await?,
            2 => age(&pool, &key, DAY).await?,
            _ => expire(&pool, &key).await?,
        }
        assert_eq!(state(&pool, &key).await?, is, "{move_it}");
    }

    // A live lease protects its record, until it lapses.
    let live = Fixture::leased(&key, "body", Policy::AtLeastOnce { lease: HOUR })?;
    live.clone().write(&pool).await?;
    expire_in(&pool, &key, Duration::ZERO).await?;
    assert_eq!(state(&pool, &key).await?, "in_flight");
    lapse(&pool, &key).await?;
    assert_eq!(state(&pool, &key).await?, "expired");
    live.clone().write(&pool).await?;
    lapse(&pool, &key).await?;
    assert_eq!(state(&pool, &key).await?, "lapsed");
    live.clone().write(&pool).await?;
    age(&pool, &key, HOUR).await?;
    assert_eq!(state(&pool, &key).await?, "lapsed");
    live.write(&pool).await?;
    expire(&pool, &key).await?;
    assert_eq!(state(&pool, &key).await?, "expired");
    Ok(())
}

/// Otherwise a typing error in a key would make a test that tests nothing.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_does_not_exist_cannot_be_moved(pool: PgPool) -> anyhow::Result<()> {
    Fixture::completed(&key("a"), "body", &7)?.write(&pool).await?;
    for moved in [
        age(&pool, &key("b"), HOUR).await,
        expire(&pool, &key("b")).await,
        lapse(&pool, &key("b")).await,
        lapse(&pool, &key("a")).await,
    ] {
        assert!(matches!(moved, Err(Error::Database(sqlx::Error::RowNotFound))), "{moved:?}");
    }
    assert_eq!(once(&pool, &key("a"), "body").await?, Outcome::Replayed(7), "it is as it was");
    Ok(())
}
