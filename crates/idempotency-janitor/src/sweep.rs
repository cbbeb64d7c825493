//! `sweep` and `run`.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::time::{Duration, Instant};

use pg_idempotency::janitor::{DueRecords, Swept};
use pg_idempotency::{Deployment, Janitor};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::arguments::{Pace, Run, Sweep};
use crate::connection::Database;
use crate::failure::{Failure, of};
use crate::{Ending, console, print, serve};

/// Longer than any cron waits, and short enough for the timer.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

fn janitor(pool: sqlx::PgPool, pace: &Pace) -> Result<Janitor, Failure> {
    Ok(Janitor::new(pool)
        .with_batch_size(pace.batch_size)?
        .with_pause(pace.pause)
        .with_grace(pace.grace)
        .with_deployment(Deployment::new().with_distributed(pace.distributed)))
}

pub(crate) async fn sweep(database: &Database, options: Sweep) -> Result<Ending, Failure> {
    let janitor = janitor(database.pool().await?, &options.pace)?;
    if options.dry_run {
        let due = janitor.dry_run().await.map_err(of)?;
        return print(&due_report(&due, options.json));
    }
    let mut signals = Signals::listen()?;
    let stop = async {
        tokio::select! {
            () = signals.received() => {}
            () = tokio::time::sleep(options.max_duration.unwrap_or(FOR_EVER)) => {}
        }
    };
    let limit = options.limit.unwrap_or(u64::MAX);
    let swept = janitor.sweep_until(limit, stop, progress()).await.map_err(of)?;
    print(&report(&swept, options.json))?;
    Ok(if swept.limited { Ending::Limited } else { Ending::Done })
}

/// SIGTERM and SIGINT: both ask to finish the batch and end.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(crate) fn listen() -> Result<Self, Failure> {
        let listen = |kind| signal(kind).map_err(Failure::Signals);
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    pub(crate) async fn received(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

pub(crate) async fn run(database: &Database, options: Run) -> Result<Ending, Failure> {
    let mut signals = Signals::listen()?;
    log();
    let janitor = janitor(database.patient_pool()?, &options.pace)?.with_interval(options.interval)?;
    let metrics = match options.metrics_addr {
        Some(address) => Some(serve::metrics(address, database).await?),
        None => None,
    };
    let console = match options.console_addr {
        Some(address) => Some(console::serve(address, &options.console, database).await?),
        None => None,
    };
    janitor.run(signals.received()).await;
    for server in metrics.into_iter().chain(console) {
        server.stop().await;
    }
    print("stopped\n")
}

/// To stderr, as RUST_LOG says.
pub(crate) fn log() {
    // Lossy: a RUST_LOG that is meant for others, or mistyped, should not keep the table from being swept.
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        // It would report an error of standard error on standard error, and panic.
        .log_internal_errors(false)
        .init();
}

/// Writes a line after each second of a sweep, on a terminal only: a log has no use for it.
fn progress() -> impl FnMut(&Swept) {
    let (watched, mut told) = (stderr().is_terminal(), Instant::now());
    move |so_far| {
        if watched && told.elapsed() >= Duration::from_secs(1) {
            told = Instant::now();
            // The sweep goes on without its terminal.
            let _ = writeln!(stderr(), "{} records deleted so far", so_far.rows());
        }
    }
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
