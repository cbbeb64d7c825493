//! `idempotency-janitor`: deletes expired records of pg-idempotency, shows the others, and settles unknown outcomes.
//!
//! This program is a thin `main` over the library. Its exit codes are:
//!
//! - 0: done
//! - 1: the command ran and failed
//! - 2: wrong usage
//! - 3: `sweep` stopped with work left, `unsettled` listed a key, or `health` found only that the sweep lags

mod arguments;
mod connection;
mod console;
mod failure;
mod health;
mod keys;
mod manual;
mod probes;
mod process;
mod protect;
mod server;
mod settle;
mod stats;
mod sweep;
mod time;

use std::io::{Write as _, stderr};
use std::process::ExitCode;

use clap::Parser as _;
use pg_idempotency::{any_language_sql, migrate, migrate_any_language, schema_sql};
use serde_json::json;

use arguments::{Arguments, Command};
use connection::{Database, LONG_ANSWER, ask};
use failure::Failure;
use process::{Ending, json_line, print};
use settle::{Decision, release, resolve, settle};

/// What a person should do first.
const FIRST: &str = "\
idempotency-janitor looks after the keys of pg-idempotency. First name the database:

  export DATABASE_URL=postgres://role@host/database

Then run one of these commands:

  idempotency-janitor migrate      create the schema, or bring it up to date
  idempotency-janitor health       is anything wrong with the set-up?
  idempotency-janitor unsettled    which keys wait for a person?
  idempotency-janitor stats        what does the table contain?
  idempotency-janitor sweep        delete the expired records, from cron; or let `run` do this in the background

All commands: idempotency-janitor --help
";

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let Arguments { database_url, command } = Arguments::parse();
    let Some(command) = command else {
        let _ = stderr().write_all(FIRST.as_bytes());
        return ExitCode::from(2);
    };
    match run(database_url, command).await {
        Ok(Ending::Done) => ExitCode::SUCCESS,
        Ok(Ending::WorkLeft) => ExitCode::from(3),
        Err(failure) => {
            // The exit code must report the failure, even if standard error cannot be written.
            let _ = writeln!(stderr(), "idempotency-janitor: {}", failure.in_one_line());
            ExitCode::from(failure.exit_code())
        }
    }
}

async fn run(database_url: Option<String>, command: Command) -> Result<Ending, Failure> {
    let database = Database::new(database_url);
    match command {
        Command::Completions { shell } => manual::completions(shell),
        Command::Manual { directory } => manual::pages(&directory),
        Command::Migrate { print: true, any_language: false, .. } => print(&schema_sql()),
        Command::Migrate { print: true, any_language: true, .. } => {
            print(&format!("{}\n{}", schema_sql(), any_language_sql()))
        }
        Command::Migrate { print: false, any_language, output } => {
            let pool = database.pool().await?;
            let migrated = if any_language {
                ask(LONG_ANSWER, migrate_any_language(&pool)).await
            } else {
                ask(LONG_ANSWER, migrate(&pool)).await
            };
            migrated.map_err(failure::of_migrating)?;
            let migrated = json!({"schema": "current", "any_language": any_language});
            print(&if output.json { json_line(&migrated) } else { "the schema is current\n".to_owned() })
        }
        Command::Sweep(options) => sweep::sweep(&database, options).await,
        Command::Run(options) => sweep::run(&database, options).await,
        Command::Stats { output } => stats::stats(&database, output.json).await,
        Command::Health { max_lag, output } => health::health(&database, max_lag, output.json).await,
        Command::Protect { tables, warn, output } => protect::protect(&database, &tables, warn, output.json).await,
        Command::Unprotect { tables, output } => protect::unprotect(&database, &tables, output.json).await,
        Command::Unsettled(options) => keys::unsettled(&database, options).await,
        Command::Show { key, step, output } => keys::show(&database, key, step, output.json).await,
        Command::Console { listen, options } => console::run(listen, &options, &database).await,
        Command::Resolve(options) => resolve(&database, options).await,
        Command::Release { key, step, reason, answer } => release(&database, key, step, &reason, &answer).await,
        Command::Grant { key, reason, answer } => {
            settle(&database, key.key()?, Decision::Grant, &reason, &answer).await
        }
        Command::Forget { key, reason, answer } => {
            settle(&database, key.key()?, Decision::Forget, &reason, &answer).await
        }
    }
}
