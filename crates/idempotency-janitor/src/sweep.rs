//! `sweep` and `run`: the deletion of expired records, once or until a signal.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::ProgressBar;
use pg_idempotency::{Janitor, Swept};
use serde_json::json;
use tokio::time::timeout;

use crate::arguments::{Pace, Run, Sweep};
use crate::connection::Database;
use crate::failure::Failure;
use crate::probes;
use crate::process::{Ending, Signals, json_line, log, print, progress};

/// How many records are deleted between two updates of the count on a terminal. Frequent updates would be slow, because
/// after each update another sweep begins, and every sweep first checks the schema.
const SHOWN_EVERY: u64 = 20_000;

fn janitor(pool: sqlx::PgPool, pace: &Pace) -> Janitor {
    Janitor::new(pool).batch_size(pace.batch_size).pause(pace.pause).grace(pace.grace)
}

pub(crate) async fn sweep(database: &Database, options: Sweep) -> Result<Ending, Failure> {
    let janitor = janitor(database.pool().await?, &options.pace);
    let mut signals = Signals::listen()?;
    // The log contains the warnings about deleted indeterminate records. Cron mails the log, even if the report is
    // dropped.
    let bar = progress("deleting");
    log(&bar);
    let mut stop = pin!(async {
        match options.max_duration {
            Some(most) => drop(timeout(most, signals.received()).await),
            None => signals.received().await,
        }
    });
    // A person at a terminal sees the count grow. Without a terminal, one call deletes all records that are due.
    let most = if bar.is_hidden() { u64::MAX } else { SHOWN_EVERY };
    let stopped = AtomicBool::new(false);
    let mut swept = Swept::default();
    loop {
        let stopping = async {
            stop.as_mut().await;
            stopped.store(true, Ordering::Relaxed);
        };
        let part = janitor.sweep_until(most, stopping).await?;
        add(&mut swept, part);
        bar.set_message(format!(": {} records", swept.rows()));
        if !part.limited || stopped.load(Ordering::Relaxed) {
            break;
        }
    }
    drop(bar);
    print(&report(&swept, options.output.json))?;
    Ok(if swept.limited { Ending::WorkLeft } else { Ending::Done })
}

fn add(swept: &mut Swept, part: Swept) {
    swept.completed += part.completed;
    swept.unfinished += part.unfinished;
    swept.indeterminate += part.indeterminate;
    swept.marks += part.marks;
    swept.batches += part.batches;
    (swept.limited, swept.oldest_after) = (part.limited, part.oldest_after);
}

pub(crate) async fn run(database: &Database, options: Run) -> Result<Ending, Failure> {
    let mut signals = Signals::listen()?;
    log(&ProgressBar::hidden());
    let janitor = janitor(database.patient_pool()?, &options.pace).interval(options.interval);
    let metrics = match options.metrics_addr {
        Some(address) => Some(probes::serve(address, database).await?),
        None => None,
    };
    janitor.run(signals.received()).await;
    if let Some(metrics) = metrics {
        metrics.stop().await;
    }
    print("stopped\n")
}

fn report(swept: &Swept, as_json: bool) -> String {
    if as_json {
        let report = json!({
            "deleted": swept.rows(),
            "completed": swept.completed,
            "unfinished": swept.unfinished,
            "indeterminate": swept.indeterminate,
            "marks": swept.marks,
            "batches": swept.batches,
            "more_left": swept.limited,
            "oldest_expired_seconds_after": swept.oldest_after.map(|age| age.as_secs_f64()),
        });
        return json_line(&report);
    }
    format!(
        "{} records deleted in {} batches: {} completed, {} unfinished, {} indeterminate, {} marks{}\n",
        swept.rows(),
        swept.batches,
        swept.completed,
        swept.unfinished,
        swept.indeterminate,
        swept.marks,
        if swept.limited { "; stopped with more left" } else { "" },
    )
}
