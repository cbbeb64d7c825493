//! The feature `testing`: the time that a test moves, and races and assertions, each of which passes and fails when it
//! should.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pg_idempotency::lease::Policy;
use pg_idempotency::operator::show;
use pg_idempotency::testing::{age, assert_performed_once, expire, lapse, race};
use pg_idempotency::{Error, Key, Misuse, Outcome};
use rig::database::backend;
use rig::fixture::Fixture;
use rig::gate::{Gate, cancel_after};
use sqlx::PgPool;

use crate::support::{create_effects, effects, expire_in, key, once};

const CALLS: u32 = 20;

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_race_performs_once_and_runs_all_at_once(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let answers = race(&pool, CALLS, async |pool| once(pool, &key("a"), "body").await).await?;
    assert_eq!(answers.len(), CALLS as usize);
    let id = assert_performed_once(answers);
    assert_eq!(effects(&pool).await, 1);
    let again: [Result<_, Error>; 1] = [once(&pool, &key("a"), "body").await];
    assert!(again.iter().all(|answer| matches!(answer, Ok(Outcome::Replayed(replayed)) if *replayed == id)));

    // No call waits for another to end: the last one to arrive lets all of them go.
    let (there, gate) = (AtomicUsize::new(0), Gate::new());
    let backends = race(&pool, CALLS, async |pool| {
        let mut conn = pool.acquire().await?;
        if there.fetch_add(1, Ordering::SeqCst) + 1 == CALLS as usize {
            (0..CALLS).for_each(|_| gate.open());
        }
        gate.pass().await;
        backend(&mut conn).await
    })
    .await?;
    let mut backends = backends.into_iter().collect::<Result<Vec<_>, _>>()?;
    backends.sort_unstable();
    backends.dedup();
    assert_eq!(backends.len(), CALLS as usize, "each has a connection of its own");
    assert!(race(&pool, 0, async |_| ()).await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_future_is_polled_as_often_as_asked_and_no_more() {
    let polled = AtomicUsize::new(0);
    let counted = std::future::poll_fn(|_| {
        polled.fetch_add(1, Ordering::SeqCst);
        std::task::Poll::<()>::Pending
    });
    assert_eq!(cancel_after(0, counted).await, None);
    assert_eq!(polled.load(Ordering::SeqCst), 0);
    let yields = || async {
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
    };
    for polls in 0..=4 {
        assert_eq!(cancel_after(polls, yields()).await.is_some(), polls == 4, "{polls}");
    }
}

/// The message of the panic of this call.
async fn panics(call: impl Future<Output = ()> + Send + 'static) -> String {
    let panic = tokio::spawn(call).await.expect_err("a panic").into_panic();
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => panic.downcast_ref::<&str>().copied().unwrap_or_default().to_owned(),
    }
}

#[tokio::test]
async fn performed_once_is_neither_twice_nor_never_nor_two_answers() {
    let (performed, replayed) = (|n| Ok(Outcome::Performed(n)), |n| Ok(Outcome::Replayed(n)));
    let failed = || Err(Error::Misuse(Misuse::AlreadyInTransaction));
    for (answers, says) in [
        (vec![performed(1), performed(1)], "performed 2 times"),
        (vec![replayed(1), replayed(1)], "no call performed"),
        (vec![], "no call performed"),
        (vec![performed(1), replayed(2)], "another answer"),
        (vec![performed(1), failed()], "a call failed"),
    ] {
        let told = panics(async move { assert_eq!(assert_performed_once(answers), 1) }).await;
        assert!(told.contains(says), "{told}");
    }
    assert_eq!(assert_performed_once([replayed(1), performed(1)]), 1);
}

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
