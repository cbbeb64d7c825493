//! Mark mode.

use std::time::Duration;

use pg_idempotency::Key;
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::testing;

use crate::{DISTRIBUTED, citus, scope};

const WINDOW: Duration = Duration::from_secs(3600);

fn marking() -> MarkOptions {
    MarkOptions::new(WINDOW).deployment(DISTRIBUTED)
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
