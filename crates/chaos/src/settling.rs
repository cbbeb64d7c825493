//! When the fault is over: what is still owed, and what is there.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use crate::checker::{Aftermath, Effect, Stored};
use crate::history::{What, now};
use crate::subject::Subject;
use crate::world::{PAUSE, World, pool};

/// When the fault is over, all keys must get their answers in this time.
pub(crate) const SETTLE_LIMIT: Duration = Duration::from_secs(60);
/// A mutant may never answer.
pub(crate) const MUTANT_SETTLE_LIMIT: Duration = Duration::from_secs(4);

impl World {
    /// When the fault is over: every key that anybody asked for is asked for until somebody answers.
    pub(crate) async fn settle(self: &Arc<Self>) -> anyhow::Result<()> {
        let pool = pool(&self.options, 8);
        let calls = self.history.calls();
        let keys: HashSet<&str> = calls.iter().map(|call| call.key.as_str()).collect();
        let mut keys: Vec<&str> = keys.into_iter().collect();
        keys.sort_unstable();
        let started = Instant::now();
        let limit = if self.subject == Subject::Crate { SETTLE_LIMIT } else { MUTANT_SETTLE_LIMIT };
        join_all((0..8).map(|settler| {
            let (keys, pool) = (&keys, &pool);
            async move {
                for key in keys.iter().skip(settler).step_by(8) {
                    for attempt in 0.. {
                        let request = self.request(key, &format!("settler-{}/{key}/{attempt}", now()));
                        let what = self.call(pool, &request).await;
                        let settled =
                            matches!(what, What::Performed(_) | What::Replayed(_) | What::Barred(_) | What::Wrong(_));
                        if settled || started.elapsed() > limit {
                            break;
                        }
                        sleep(PAUSE).await;
                    }
                }
            }
        }))
        .await;
        pool.close().await;
        Ok(())
    }

    pub(crate) async fn aftermath(&self) -> anyhow::Result<Aftermath> {
        let mut effects: Vec<Effect> =
            sqlx::query_as("select key, call, downstream_key from effect").fetch_all(&self.observer).await?;
        let mut records: Vec<Stored> = sqlx::query_as(
            "select value as key, token, completed_at is not null as completed,
                convert_from(response_body, 'utf8')::json #>> '{}' as response
            from idempotency.record where operation = 'chaos'",
        )
        .fetch_all(&self.observer)
        .await?;
        effects.retain(|effect| self.has(&effect.key));
        records.retain(|record| self.has(&record.key));
        Ok(Aftermath { effects, records })
    }
}
