//! `sweep` and `run`: the deletion of expired records, once or until a signal.

use pg_idempotency::{Janitor, Swept};
use serde_json::json;
use tokio::time::timeout;

use crate::arguments::{Pace, Run, Sweep};
use crate::connection::Database;
use crate::failure::Failure;
use crate::probes;
use crate::process::{Ending, Signals, log, print};

fn janitor(pool: sqlx::PgPool, pace: &Pace) -> Janitor {
    Janitor::new(pool).batch_size(pace.batch_size).pause(pace.pause).grace(pace.grace)
}

pub(crate) async fn sweep(database: &Database, options: Sweep) -> Result<Ending, Failure> {
    let janitor = janitor(database.pool().await?, &options.pace);
    let mut signals = Signals::listen()?;
    // The log contains the warnings about deleted indeterminate records. Cron mails the log, even if the report is
    // dropped.
    log();
    let stop = async {
        match options.max_duration {
            Some(most) => drop(timeout(most, signals.received()).await),
            None => signals.received().await,
        }
    };
    let swept = janitor.sweep_until(u64::MAX, stop).await?;
    print(&report(&swept, options.json))?;
    Ok(if swept.limited { Ending::WorkLeft } else { Ending::Done })
}

pub(crate) async fn run(database: &Database, options: Run) -> Result<Ending, Failure> {
    let mut signals = Signals::listen()?;
    log();
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
        return format!("{report}\n");
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
