//! The command line. Every flag is an environment variable too, for crontabs and containers.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

/// Keeps the table of pg-idempotency small, and tells what is in it.
#[derive(Parser)]
#[command(version, propagate_version = true)]
pub(crate) struct Arguments {
    /// Where the database is: postgres://role@host/database
    // The value may hold a password: never in --help.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, global = true)]
    pub(crate) database_url: Option<String>,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Deletes the records that are past their retention, then ends (for cron)
    Sweep(Sweep),
    /// Sweeps at every interval until SIGTERM or SIGINT
    Run(Run),
    /// Tells what is in the table
    Stats(Stats),
    /// Looks for what keeps a promise from holding; exit code 1 where something does
    Health {
        /// How long an expired record may wait for its sweep
        #[arg(long, env = "IDEMPOTENCY_MAX_LAG", default_value = "1h", value_parser = duration)]
        max_lag: Duration,
    },
    /// Shows the record of a key, without its response
    Show {
        #[command(flatten)]
        key: KeyArguments,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Forgets a key before its time: the next call with it is performed again
    Forget {
        #[command(flatten)]
        key: KeyArguments,
        /// Why; it is printed with what was forgotten, for the log
        #[arg(long)]
        reason: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Creates the schema and its table, or brings them up to date
    Migrate {
        /// Print the SQL, for a DBA to run, and touch no database
        #[arg(long)]
        print: bool,
    },
}

#[derive(Args)]
pub(crate) struct Sweep {
    #[command(flatten)]
    pub(crate) pace: Pace,
    /// Stop after this many records, with exit code 3 where more may be due
    #[arg(long, env = "IDEMPOTENCY_SWEEP_LIMIT")]
    pub(crate) limit: Option<u64>,
    /// Stop after this time, with exit code 3 where more may be due (30s, 5m, 1h)
    #[arg(long, env = "IDEMPOTENCY_MAX_DURATION", value_parser = duration)]
    pub(crate) max_duration: Option<Duration>,
    /// Count what is due, and delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) pace: Pace,
    /// How long to rest between two passes
    #[arg(long, env = "IDEMPOTENCY_INTERVAL", default_value = "60s", value_parser = duration)]
    pub(crate) interval: Duration,
    /// Serve /metrics in Prometheus' text and /healthz on this address: 127.0.0.1:9187
    #[arg(long, env = "IDEMPOTENCY_METRICS_ADDR")]
    pub(crate) metrics_addr: Option<SocketAddr>,
}

#[derive(Args)]
pub(crate) struct Pace {
    /// Records in one transaction, up to 50000
    #[arg(long, env = "IDEMPOTENCY_BATCH_SIZE", default_value_t = 1000)]
    pub(crate) batch_size: u32,
    /// How long to rest after a full batch
    #[arg(long, env = "IDEMPOTENCY_PAUSE", default_value = "50ms", value_parser = duration)]
    pub(crate) pause: Duration,
    /// A rate that is not exceeded
    #[arg(long, env = "IDEMPOTENCY_MAX_ROWS_PER_SECOND")]
    pub(crate) max_rows_per_second: Option<NonZeroU32>,
    /// Leave the floor to another janitor that is sweeping
    #[arg(long, env = "IDEMPOTENCY_SINGLE_RUNNER")]
    pub(crate) single_runner: bool,
}

#[derive(Args)]
pub(crate) struct Stats {
    /// Read every record instead of a sample
    #[arg(long)]
    pub(crate) exact: bool,
    /// Report as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Exit with 3 where an expired record has been due for longer
    #[arg(long, env = "IDEMPOTENCY_FAIL_IF_OLDER_THAN", value_parser = duration)]
    pub(crate) fail_if_older_than: Option<Duration>,
}

#[derive(Args)]
pub(crate) struct KeyArguments {
    /// Whose it is
    pub(crate) scope: String,
    /// What it is
    pub(crate) operation: String,
    /// The client's value
    pub(crate) value: String,
}

fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|character: char| character.is_ascii_alphabetic());
    let number: u64 = digits.parse().map_err(|_| format!("{text:?} is no duration; write 500ms, 30s, 5m, 2h or 7d"))?;
    let seconds = |unit: u64| number.checked_mul(unit).map(Duration::from_secs);
    match &text[digits.len()..] {
        "ms" => Some(Duration::from_millis(number)),
        "s" => seconds(1),
        "m" => seconds(60),
        "h" => seconds(60 * 60),
        "d" => seconds(24 * 60 * 60),
        _ => None,
    }
    .ok_or_else(|| format!("{text:?} is no duration; write 500ms, 30s, 5m, 2h or 7d"))
}
