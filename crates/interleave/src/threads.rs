//! The threads that share the work, each with a database of its own.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError, mpsc};

use sqlx::postgres::PgConnectOptions;
use tokio::runtime::{Builder, Runtime};

/// All tasks of a world run in one thread, so the order of their steps depends on little.
pub(crate) fn runtime() -> anyhow::Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// Shares work among some threads, each with a database of its own, and returns the results in the order in which they
/// came.
pub(crate) fn share<W: Send, R: Send>(
    databases: &[PgConnectOptions],
    work: Vec<W>,
    run: impl AsyncFn(&PgConnectOptions, W) -> R + Sync,
) -> anyhow::Result<Vec<R>> {
    let work = Mutex::new(VecDeque::from(work));
    let (sender, results) = mpsc::channel();
    let next = || work.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let (next, run) = (&next, &run);
    std::thread::scope(|scope| {
        let start = |database| {
            let sender = sender.clone();
            scope.spawn(move || {
                runtime()?.block_on(async {
                    while let Some(one) = next() {
                        let _ = sender.send(run(database, one).await);
                    }
                });
                anyhow::Ok(())
            })
        };
        let threads: Vec<_> = databases.iter().map(start).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a thread has panicked"))??;
        }
        Ok::<_, anyhow::Error>(())
    })?;
    drop(sender);
    Ok(results.into_iter().collect())
}
