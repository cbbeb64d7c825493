//! Mark mode.

use std::time::{Duration, Instant};

use pg_idempotency::mark::{Marked, Marking};
use pg_idempotency::testing;
use pg_idempotency::{Error, InFlight, Key};

use crate::{DISTRIBUTED, citus, scope};

const WINDOW: Duration = Duration::from_secs(3600);

fn marking() -> Marking {
    Marking::new(WINDOW).expect("a window").with_deployment(DISTRIBUTED)
}

/// So many keys over so many new scopes.
fn keys(count: usize, scopes: usize) -> Vec<Key> {
    let base = scope();
    (0..count).map(|at| Key::new(format!("{base} {}", at % scopes), "event", at.to_string()).expect("a key")).collect()
}

fn firsts(marked: &[Marked]) -> usize {
    marked.iter().filter(|marked| **marked == Marked::First).count()
}

#[tokio::test]
async fn batches_of_any_size_over_any_number_of_scopes_mark_each_key_once() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    for (count, scopes) in [(1, 1), (5, 5), (100, 1), (100, 20), (100, 100)] {
        let mut keys = keys(count, scopes);
        keys.push(keys[0].clone());
        let mut marked = Vec::new();
        for _ in 0..2 {
            let mut tx = citus.pool.begin().await?;
            marked.push(marking().mark_many(&mut tx, &keys).await?);
            tx.commit().await?;
        }
        assert_eq!((firsts(&marked[0]), firsts(&marked[1])), (count, 0), "{count} over {scopes}");
        assert_eq!(marked[0].last(), Some(&Marked::Duplicate), "twice in the batch");
        // Half of it is new, and one of the others is expired.
        let mut more = keys[..count.div_ceil(2)].to_vec();
        more.extend(self::keys(count - more.len(), scopes));
        testing::expire(&citus.pool, &keys[0]).await?;
        let mut tx = citus.pool.begin().await?;
        let marked = marking().mark_many(&mut tx, &more).await?;
        tx.commit().await?;
        assert_eq!(firsts(&marked), count / 2 + 1, "{count} over {scopes}");
        assert_eq!(marked[0], Marked::First, "after its window");
    }
    Ok(())
}

#[tokio::test]
async fn a_batch_waits_for_a_key_in_flight_with_a_bound() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    let keys = keys(20, 4);
    let mut owner = citus.pool.begin().await?;
    assert_eq!(marking().mark(&mut owner, &keys[7]).await?, Marked::First);
    let mut tx = citus.pool.begin().await?;
    let rejected = marking().with_in_flight(InFlight::Reject)?.mark_many(&mut tx, &keys).await;
    assert!(matches!(rejected, Err(Error::InFlight { .. })), "{rejected:?}");
    // The keys before the one in flight are not marked either.
    tx.commit().await?;
    let mut tx = citus.pool.begin().await?;
    let (limit, started) = (Duration::from_millis(300), Instant::now());
    let late = marking().with_in_flight(InFlight::Wait(limit))?.mark_many(&mut tx, &keys).await;
    assert!(matches!(late, Err(Error::InFlight { .. })), "{late:?}");
    assert!((limit..limit * 5).contains(&started.elapsed()), "{:?}", started.elapsed());
    tx.rollback().await?;
    let waiter = tokio::spawn({
        let (pool, keys) = (citus.pool.clone(), keys.clone());
        async move {
            let mut tx = pool.begin().await?;
            let marked = marking().mark_many(&mut tx, &keys).await?;
            tx.commit().await?;
            anyhow::Ok(marked)
        }
    });
    crate::a_moment().await;
    owner.commit().await?;
    let marked = waiter.await??;
    assert_eq!((firsts(&marked), marked[7]), (19, Marked::Duplicate));
    Ok(())
}

#[tokio::test]
async fn overlapping_batches_mark_each_key_once() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    for round in 0..5 {
        let keys = keys(90, 9);
        let answers = testing::race(&citus.pool, 8, async |pool| {
            let mut asked = keys.clone();
            asked.reverse();
            asked.rotate_left(round * 11);
            let mut tx = pool.begin().await?;
            let marked = marking().mark_many(&mut tx, &asked).await?;
            tx.commit().await?;
            anyhow::Ok(firsts(&marked))
        })
        .await?;
        let total: usize = answers.into_iter().collect::<anyhow::Result<Vec<_>>>()?.into_iter().sum();
        assert_eq!(total, keys.len());
    }
    Ok(())
}
