//! The command line. Commands that crontabs and containers run also take their flags from environment variables.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use axum::http::HeaderName;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use pg_idempotency::{InvalidKey, Key};

/// Deletes expired records of pg-idempotency, shows the others, and settles unknown outcomes.
#[derive(Parser)]
#[command(version, propagate_version = true)]
pub(crate) struct Arguments {
    /// The database: postgres://role@host/database
    // The value may contain a password, so --help does not show it.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, global = true)]
    pub(crate) database_url: Option<String>,

    /// `None` if a person has typed only the name of the program.
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Deletes the records that are past their retention, then ends (for cron)
    Sweep(Sweep),
    /// Sweeps at every interval until SIGTERM or SIGINT
    Run(Run),
    /// Counts the records by mode, operation and state
    Stats {
        #[command(flatten)]
        output: Output,
    },
    /// Checks the set-up; exits with 1 if a promise may be broken, and with 3 if only the sweep lags
    Health {
        /// How long an expired record may wait for its sweep
        #[arg(long, env = "IDEMPOTENCY_MAX_LAG", default_value = "1h", value_parser = duration)]
        max_lag: Duration,
        #[command(flatten)]
        output: Output,
    },
    /// Lists the keys that wait for a person, the oldest claim first; exits with 3 if there is a key to list. Exhausted
    /// keys are listed only with --max-attempts
    Unsettled(Unsettled),
    /// Shows the record of a key, and its steps with their downstream keys, but not the results of the steps
    Show {
        #[command(flatten)]
        key: KeyArguments,
        /// Also show the downstream key of this step, even if the step has stored nothing
        #[arg(long, value_name = "NAME", allow_hyphen_values = true)]
        step: Option<String>,
        #[command(flatten)]
        output: Output,
    },
    /// Decides that an unfinished operation, or its step in doubt, took effect, and stores its response or result
    Resolve(Resolve),
    /// Decides that an unfinished operation, or its step in doubt, took no effect, so that the next call performs it
    Release {
        #[command(flatten)]
        key: KeyArguments,
        /// Decide that this step took no effect; the operation is released when no other step is in doubt
        #[arg(long, value_name = "NAME", allow_hyphen_values = true)]
        step: Option<String>,
        /// The reason, which the record keeps as its last error; callers may see the last error
        #[arg(long, value_parser = NonEmptyStringValueParser::new())]
        reason: String,
        #[command(flatten)]
        answer: Answer,
    },
    /// Permits one more attempt of a lapsed or released operation, even if its attempts are used up
    Grant {
        #[command(flatten)]
        key: KeyArguments,
        /// The reason, which the record keeps as its last error; callers may see the last error
        #[arg(long, value_parser = NonEmptyStringValueParser::new())]
        reason: String,
        #[command(flatten)]
        answer: Answer,
    },
    /// Deletes the record of a key before it expires, so that the next call with the key performs the operation again
    Forget {
        #[command(flatten)]
        key: KeyArguments,
        /// The reason, which is printed with the decision, for the log
        #[arg(long, value_parser = NonEmptyStringValueParser::new())]
        reason: String,
        #[command(flatten)]
        answer: Answer,
    },
    /// Serves a web page that shows the records and settles keys, until SIGTERM or SIGINT
    Console {
        /// The address to listen on; an address that is not loopback requires --token-file or --user-header
        #[arg(long, env = "IDEMPOTENCY_CONSOLE_ADDR", default_value = "127.0.0.1:19190")]
        listen: SocketAddr,
        #[command(flatten)]
        options: ConsoleOptions,
    },
    /// Makes the database refuse every write to these tables outside an idempotent operation
    Protect {
        /// The tables, named as in SQL; if a table is protected already, its missing triggers are created, and its
        /// disabled triggers are enabled
        #[arg(required = true, value_name = "TABLE")]
        tables: Vec<String>,
        /// Only warn of writes outside an idempotent operation, to find these writes before they are refused
        #[arg(long)]
        warn: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Removes the protection of these tables
    Unprotect {
        /// The tables, named as in SQL
        #[arg(required = true, value_name = "TABLE")]
        tables: Vec<String>,
        #[command(flatten)]
        output: Output,
    },
    /// Creates the schema and its table, or brings them up to date
    Migrate {
        /// Print the SQL for a DBA to run, and do not connect to a database
        #[arg(long, conflicts_with = "json")]
        print: bool,
        /// Create the SQL functions for callers in other languages, too
        #[arg(long)]
        any_language: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Prints the completions for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Writes a manual page for each command into a directory that exists
    Manual {
        /// The directory, such as /usr/local/share/man/man1
        directory: PathBuf,
    },
}

// This type and the next one have no doc comments, because clap would use them as the texts of the commands.
#[derive(Args)]
pub(crate) struct Output {
    /// Print JSON, one object on a line; an error is still a line of text on standard error, with the same exit code
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct Answer {
    /// Do not ask for confirmation, because you have looked the key up after `show`; give the value `seen` that `show`
    /// prints. If the record has changed since then, nothing is done
    #[arg(long)]
    pub(crate) seen: Option<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct Sweep {
    #[command(flatten)]
    pub(crate) pace: Pace,
    /// Stop after this time (30s, 5m, 1h), at the end of the batch in progress. Exit code 3 means that more records may
    /// be due. A batch that has not ended 5 seconds after this time is rolled back, and the exit code is 1
    #[arg(long, env = "IDEMPOTENCY_MAX_DURATION", value_parser = duration)]
    pub(crate) max_duration: Option<Duration>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) pace: Pace,
    /// The longest time from one pass to the next; each actual time is between half of this value and the whole value
    #[arg(long, env = "IDEMPOTENCY_INTERVAL", default_value = "60s", value_parser = interval)]
    pub(crate) interval: Duration,
    /// Serve /healthz, and /metrics in the text format of Prometheus, on this address, such as 127.0.0.1:19187
    #[arg(long, env = "IDEMPOTENCY_METRICS_ADDR")]
    pub(crate) metrics_addr: Option<SocketAddr>,
}

#[derive(Args)]
pub(crate) struct ConsoleOptions {
    /// A file with a token of at least 16 characters; the browser asks for the token as the password
    #[arg(long, env = "IDEMPOTENCY_CONSOLE_TOKEN_FILE", value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// The header in which a reverse proxy names the operator; only the proxy may reach the console
    #[arg(long, env = "IDEMPOTENCY_CONSOLE_USER_HEADER", value_name = "NAME")]
    pub(crate) user_header: Option<HeaderName>,
    /// Show keys but do not settle them; a role with the janitor's grants is enough
    #[arg(long, env = "IDEMPOTENCY_CONSOLE_READ_ONLY")]
    pub(crate) read_only: bool,
    /// Append each decision to this file, as one line of JSON with the whole key
    #[arg(long, env = "IDEMPOTENCY_CONSOLE_LOG", value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,
    /// The time between two samples for the charts; a sample costs as much as `stats`
    #[arg(long, env = "IDEMPOTENCY_CONSOLE_SAMPLE", default_value = "30s", value_parser = interval)]
    pub(crate) sample: Duration,
    /// Also list lapsed and released operations whose attempts have reached this number; give the service's limit
    #[arg(long, env = "IDEMPOTENCY_MAX_ATTEMPTS")]
    pub(crate) max_attempts: Option<NonZeroU32>,
    /// Also list lapsed and released operations that no caller has claimed for this time
    #[arg(long, env = "IDEMPOTENCY_ABANDONED_FOR", default_value = "1h", value_parser = duration)]
    pub(crate) abandoned_for: Duration,
    /// How long an expired record may wait for its sweep before it is reported
    #[arg(long, env = "IDEMPOTENCY_MAX_LAG", default_value = "1h", value_parser = duration)]
    pub(crate) max_lag: Duration,
}

#[derive(Args)]
pub(crate) struct Pace {
    /// The number of records that one transaction deletes
    #[arg(long, env = "IDEMPOTENCY_BATCH_SIZE", default_value = "1000")]
    pub(crate) batch_size: NonZeroU32,
    /// The pause after a full batch
    #[arg(long, env = "IDEMPOTENCY_PAUSE", default_value = "50ms", value_parser = pause)]
    pub(crate) pause: Duration,
    /// How long an expired record is kept for duplicates that still wait for it
    #[arg(long, env = "IDEMPOTENCY_GRACE", default_value = "1m", value_parser = grace)]
    pub(crate) grace: Duration,
}

#[derive(Args)]
pub(crate) struct Unsettled {
    /// The greatest number of keys to list
    #[arg(long, default_value = "100")]
    pub(crate) limit: NonZeroU32,
    /// Also list lapsed and released operations whose attempts have reached this number; give the service's limit
    #[arg(long, env = "IDEMPOTENCY_MAX_ATTEMPTS")]
    pub(crate) max_attempts: Option<NonZeroU32>,
    /// Also list lapsed and released operations that no caller has claimed for this time, such as 1h, because they may
    /// have taken effect
    #[arg(long, env = "IDEMPOTENCY_ABANDONED_FOR", value_parser = duration)]
    pub(crate) abandoned_for: Option<Duration>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct Resolve {
    #[command(flatten)]
    pub(crate) key: KeyArguments,
    #[command(flatten)]
    pub(crate) response: ResponseArguments,
    /// Store the JSON as the result of this step in doubt; when no other step is in doubt, the next call continues
    /// after this step
    #[arg(long, value_name = "NAME", allow_hyphen_values = true)]
    pub(crate) step: Option<String>,
    /// The reason, which is printed with the decision, for the log
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    pub(crate) reason: String,
    #[command(flatten)]
    pub(crate) answer: Answer,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
pub(crate) struct ResponseArguments {
    /// The response, or the result of the step, as the JSON that the service would have stored; other users of the
    /// machine can see the JSON with `ps`
    #[arg(long, value_name = "JSON", allow_hyphen_values = true)]
    pub(crate) response: Option<String>,
    /// A file with the JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) response_file: Option<PathBuf>,
}

// This type has no doc comment, because clap would use it as the text of the command.
#[derive(Args)]
pub(crate) struct KeyArguments {
    /// The owner of the operation
    scope: String,
    /// The name of the operation
    operation: String,
    /// The client's value; if a part of the key begins with a hyphen, put all three parts after `--`
    value: String,
}

impl KeyArguments {
    pub(crate) fn key(self) -> Result<Key, InvalidKey> {
        Key::recorded(self.scope, self.operation, self.value)
    }
}

/// Parses a duration such as `500ms`, `90s`, `1h 30m` or `7d`.
fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{text:?} is not a duration ({error}); write 500ms, 30s, 5m, 1h 30m or 7d"))
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        interval if (Duration::from_secs(1)..=DAY).contains(&interval) => Ok(interval),
        _ => Err("it must be between a second and a day".to_owned()),
    }
}

fn pause(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        pause if pause <= DAY => Ok(pause),
        _ => Err("it must be at most a day".to_owned()),
    }
}

fn grace(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        grace if grace <= DAY * 3660 => Ok(grace),
        _ => Err("it must be at most ten years".to_owned()),
    }
}
