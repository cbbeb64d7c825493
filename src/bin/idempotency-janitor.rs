//! `idempotency-janitor`: the sweep and the migration as a command, for cron and for deployments.
//!
//! A thin `main` over the library. Exit codes: 0 done, 1 ran and failed, 2 wrong usage, 3 stopped at the limit with work
//! left.

use std::error::Error as _;
use std::io::Write as _;
use std::process::ExitCode;
use std::str::FromStr as _;
use std::time::Duration;

use clap::{Parser, Subcommand};
use pg_idempotency::{Error, Janitor, Swept, migrate, schema_sql};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgConnection, PgPool};

/// Keeps the table of pg-idempotency small, and creates it.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Arguments {
    /// Where the database is: postgres://role@host/database
    // The value may hold a password: never in --help.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, global = true)]
    database_url: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Deletes the records that are past their retention, then ends
    Sweep {
        /// Stop after this many records and exit with 3
        #[arg(long, env = "IDEMPOTENCY_SWEEP_LIMIT", default_value_t = u64::MAX, hide_default_value = true)]
        limit: u64,
    },
    /// Creates the schema and its table, or brings them up to date
    Migrate {
        /// Print the SQL, for a DBA to run, and touch no database
        #[arg(long)]
        print: bool,
    },
}

/// A server that has not answered by then will not before cron calls again.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// What the run came to, where it did not fail.
const DONE: u8 = 0;
const LIMITED: u8 = 3;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            eprintln!("idempotency-janitor: {}", failure.in_one_line());
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<u8, Failure> {
    match arguments.command {
        Command::Migrate { print: true } => print(&schema_sql()),
        Command::Migrate { print: false } => {
            let pool = connect(arguments.database_url).await?;
            let mut conn = pool.acquire().await.map_err(Failure::Connection)?;
            migrate(&mut conn).await?;
            print("the schema is current\n")
        }
        Command::Sweep { limit } => {
            let pool = connect(arguments.database_url).await?;
            let swept = Janitor::new(pool).sweep_once(limit).await?;
            print(&report(&swept))?;
            Ok(if swept.limited { LIMITED } else { DONE })
        }
    }
}

fn report(swept: &Swept) -> String {
    format!(
        "{} records deleted in {} batches: {} completed, {} unfinished, {} marks{}\n",
        swept.rows(),
        swept.batches,
        swept.completed,
        swept.unfinished,
        swept.marks,
        if swept.limited { "; stopped at the limit, more may be due" } else { "" },
    )
}

/// A reader that has gone away, as `head` does, is no failure.
fn print(text: &str) -> Result<u8, Failure> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::Output(error)),
        _ => Ok(DONE),
    }
}

async fn connect(url: Option<String>) -> Result<PgPool, Failure> {
    let url = url.ok_or(Failure::NoDatabase)?;
    // What sqlx says of a malformed URL may quote it.
    let options = PgConnectOptions::from_str(&url).map_err(|_| Failure::MalformedUrl)?;
    let options = options.application_name("idempotency-janitor");
    // A pool tries again until its time is up and then only says that it was: one connection by itself says why.
    match tokio::time::timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&options)).await {
        Ok(connected) => connected.map_err(Failure::Connection)?.close().await.map_err(Failure::Connection)?,
        Err(_) => return Err(Failure::Silence),
    }
    Ok(PgPoolOptions::new().max_connections(1).connect_lazy_with(options))
}

/// One line each: what happened, why, and what to do. A URL is never printed, for its password.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("no database given; set DATABASE_URL or --database-url")]
    NoDatabase,
    #[error("the database URL cannot be read; it should look like postgres://role@host/database")]
    MalformedUrl,
    #[error("cannot connect; check the database URL, and that the server is up")]
    Connection(#[source] sqlx::Error),
    #[error("the server gave no answer within {CONNECT_TIMEOUT:?}; check host, port and firewall")]
    Silence,
    #[error(transparent)]
    Idempotency(#[from] Error),
    #[error("cannot write the result")]
    Output(#[source] std::io::Error),
}

impl Failure {
    /// The error and its causes in one line; sqlx repeats the server's text in its own, which is said once.
    fn in_one_line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !line.contains(&text) {
                line = format!("{line}: {text}");
            }
            cause = error.source();
        }
        line.replace('\n', " ")
    }
}
