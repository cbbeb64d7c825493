//! Work that is shared by as many threads as there are processors, each with a database of its own.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError, mpsc};

use sqlx::postgres::PgConnectOptions;
use tokio::runtime::{Builder, Runtime};

use crate::world;

/// All tasks of a world run in one thread, so the order of their steps depends on little.
pub(crate) fn runtime() -> anyhow::Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// Does all work, and returns the results in the order in which they came.
pub(crate) fn share<W: Send, R: Send>(
    server: &PgConnectOptions,
    database: &str,
    work: Vec<W>,
    run: impl AsyncFn(&PgConnectOptions, W) -> R + Sync,
) -> anyhow::Result<Vec<R>> {
    let work = Mutex::new(VecDeque::from(work));
    let (sender, results) = mpsc::channel();
    let (work, run) = (&work, &run);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..std::thread::available_parallelism()?.get())
            .map(|thread| {
                let sender = sender.clone();
                scope.spawn(move || {
                    runtime()?.block_on(async {
                        let database = world::create_database(server, &format!("{database}_{thread}")).await?;
                        loop {
                            let next = work.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                            let Some(next) = next else { return anyhow::Ok(()) };
                            let _ = sender.send(run(&database, next).await);
                        }
                    })
                })
            })
            .collect();
        drop(sender);
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a thread has panicked"))??;
        }
        Ok(results.into_iter().collect())
    })
}
