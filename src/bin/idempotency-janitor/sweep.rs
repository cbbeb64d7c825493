//! `sweep` and `run`.

use std::io::{IsTerminal as _, stderr};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use pg_idempotency::Janitor;
use pg_idempotency::janitor::{DueRecords, Swept};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::arguments::{Pace, Run, Sweep};
use crate::connection::Database;
use crate::failure::{Failure, of};
use crate::{Ending, print, serve};

/// Records between two looks at the clock and at the bar: some ten batches.
const STRIDE: u64 = 10_000;

fn janitor(pool: sqlx::PgPool, pace: &Pace) -> Result<Janitor, Failure> {
    let janitor = Janitor::new(pool)
        .with_batch_size(pace.batch_size)?
        .with_pause(pace.pause)
        .with_single_runner(pace.single_runner);
    Ok(match pace.max_rows_per_second {
        Some(rate) => janitor.with_max_rows_per_second(rate),
        None => janitor,
    })
}

pub(crate) async fn sweep(database: &Database, options: Sweep) -> Result<Ending, Failure> {
    let janitor = janitor(database.pool().await?, &options.pace)?;
    if options.dry_run {
        let due = janitor.dry_run().await.map_err(of)?;
        return print(&due_report(&due, options.json));
    }
    let started = Instant::now();
    let bar = progress_bar();
    let mut total = Swept::default();
    let limited = loop {
        let left = options.limit.map_or(u64::MAX, |limit| limit.saturating_sub(total.rows()));
        let out_of_time = options.max_duration.is_some_and(|most| started.elapsed() >= most);
        if left == 0 || out_of_time {
            break total.oldest_after.is_some() || total.batches == 0;
        }
        let swept = janitor.sweep_once(left.min(STRIDE)).await.map_err(of)?;
        add(&mut total, &swept);
        bar.set_position(total.rows());
        if !swept.limited || swept.rows() == 0 {
            break swept.limited;
        }
    };
    total.duration = started.elapsed();
    total.limited = limited;
    bar.finish_and_clear();
    print(&report(&total, options.json))?;
    Ok(if limited { Ending::Limited } else { Ending::Done })
}

fn add(total: &mut Swept, swept: &Swept) {
    if total.batches == 0 {
        total.oldest_before = swept.oldest_before;
    }
    total.completed += swept.completed;
    total.unfinished += swept.unfinished;
    total.marks += swept.marks;
    total.batches += swept.batches;
    total.oldest_after = swept.oldest_after;
}

pub(crate) async fn run(database: &Database, options: Run) -> Result<Ending, Failure> {
    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::Signals)?;
    tracing_subscriber::fmt().with_writer(stderr).with_ansi(stderr().is_terminal()).init();
    let janitor = janitor(database.patient_pool()?, &options.pace)?.with_interval(options.interval)?;
    if let Some(address) = options.metrics_addr {
        serve::metrics(address, database.clone()).await?;
    }
    janitor
        .run(async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        })
        .await;
    print("stopped\n")
}

/// On a terminal only: a log has no use for it.
fn progress_bar() -> ProgressBar {
    if !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{spinner} {pos} records deleted, {per_sec}, {elapsed}");
    ProgressBar::new_spinner().with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
}

fn report(swept: &Swept, as_json: bool) -> String {
    if as_json {
        let report = json!({
            "deleted": swept.rows(),
            "completed": swept.completed,
            "unfinished": swept.unfinished,
            "marks": swept.marks,
            "batches": swept.batches,
            "more_left": swept.limited,
            "seconds": swept.duration.as_secs_f64(),
            "oldest_expired_seconds_before": swept.oldest_before.map(|age| age.as_secs_f64()),
            "oldest_expired_seconds_after": swept.oldest_after.map(|age| age.as_secs_f64()),
        });
        return format!("{report}\n");
    }
    format!(
        "{} records deleted in {} batches: {} completed, {} unfinished, {} marks{}\n",
        swept.rows(),
        swept.batches,
        swept.completed,
        swept.unfinished,
        swept.marks,
        if swept.limited { "; stopped with more left" } else { "" },
    )
}

fn due_report(due: &DueRecords, as_json: bool) -> String {
    let rows = due.completed + due.unfinished + due.marks;
    if as_json {
        let report = json!({"due": rows, "completed": due.completed, "unfinished": due.unfinished, "marks": due.marks});
        return format!("{report}\n");
    }
    format!(
        "{rows} records are due, and none was deleted: {} completed, {} unfinished, {} marks\n",
        due.completed, due.unfinished, due.marks
    )
}
