//! On a plain table, the setting for a distributed one changes no answer, and the two settings exclude each other. The
//! other direction is in `tests/citus`. `claim/answers.rs` and `mark/many.rs` ask with both settings, too.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pg_idempotency::Idempotency;
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::testing::{self, assert_performed_once};
use sqlx::PgPool;

use crate::support::{DEPLOYMENTS, create_effects, effects, key, leave_effect};

/// As during a roll-out of the setting: half of the callers have it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn of_eight_callers_with_either_setting_one_performs_and_one_marks_each_key(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let turns = AtomicUsize::new(0);
    let deployment = || DEPLOYMENTS[turns.fetch_add(1, Ordering::Relaxed) % DEPLOYMENTS.len()];
    let keys: Vec<_> = (0..20).map(|n| key(&n.to_string())).collect();
    for round in 1..=5 {
        let answers = testing::race(&pool, 8, async |pool| {
            let call = Idempotency::new().deployment(deployment());
            call.run(pool, &key("race"), "body", async |conn| leave_effect(conn, "raced").await).await
        });
        assert_performed_once(answers.await?);
        assert_eq!(effects(&pool).await, round);
        let marked = testing::race(&pool, 8, async |pool| {
            let marking = MarkOptions::new(Duration::from_secs(3600)).deployment(deployment());
            let mut tx = pool.begin().await?;
            let marked = marking.mark_many(&mut tx, &keys).await?;
            tx.commit().await?;
            anyhow::Ok(marked.into_iter().filter(|marked| *marked == Marked::First).count())
        });
        let firsts = marked.await?.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        assert_eq!(firsts.iter().sum::<usize>(), keys.len(), "{firsts:?}");
        for key in keys.iter().chain([&key("race")]) {
            testing::expire(&pool, key).await?;
        }
    }
    Ok(())
}
