//! A program's start and end.

use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;
use std::{env, io};

use anyhow::Context as _;
use axum::Router;
use rig::child::exit_with_parent;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::books::Books;
use crate::schema::Schema;

/// Far longer than any demo takes, so that one which waits for something that does not come ends too.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs a demo on the server of `DATABASE_URL`, in a schema of its own with these tables, which it drops at the end.
/// Without `DATABASE_URL`, the program starts again with a temporary server.
///
/// The result is a failure if a count is wrong, if the demo fails, or if it needs longer than five minutes.
pub fn run(
    program: &'static str,
    tables: &'static str,
    demo: impl AsyncFnOnce(&Schema, &mut Books) -> anyhow::Result<()>,
) -> ExitCode {
    let Some(url) = database_url() else {
        return failed(program, &on_a_temporary_server());
    };
    let mut books = Books::default();
    let ended = block_on(async {
        let schema = Schema::create(url, program, tables).await?;
        let played = async {
            demo(&schema, &mut books).await?;
            schema.check_protected(&mut books).await
        };
        let ended = timeout(LIMIT, played).await;
        let dropped = schema.drop().await;
        ended.with_context(|| format!("the demo did not end within {LIMIT:?}"))??;
        dropped
    });
    // The counts so far may explain the error.
    let verdict = books.verdict();
    match ended {
        Ok(()) => verdict,
        Err(error) => failed(program, &error),
    }
}

/// If this process is a worker of a [`Crew`](crate::crew::Crew), runs `work` on the run's schema, with the worker's
/// arguments. The process ends with its parent.
pub fn run_worker(
    program: &'static str,
    work: impl AsyncFnOnce(&Schema, &[String]) -> anyhow::Result<()>,
) -> Option<ExitCode> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let ["worker", run] = [arguments.first()?.as_str(), arguments.get(1)?.as_str()] else { return None };
    exit_with_parent();
    let ended = block_on(async {
        let url = database_url().context("a worker needs DATABASE_URL")?;
        work(&Schema::of_run(url, program, run), &arguments[2..]).await
    });
    Some(ended.map_or_else(|error| failed(program, &error), |()| ExitCode::SUCCESS))
}

/// If this program was started as `PROGRAM serve PORT`, serves its API on this port, on tables that stay, until the
/// process ends: `script/check-services` checks it from outside.
pub fn run_service(
    program: &'static str,
    tables: &'static str,
    router: impl AsyncFnOnce(&Schema) -> anyhow::Result<Router>,
) -> Option<ExitCode> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let ["serve", port] = [arguments.first()?.as_str(), arguments.get(1)?.as_str()] else { return None };
    let ended = block_on(async {
        let url = database_url().context("a service needs DATABASE_URL")?;
        let schema = Schema::served(url, program, tables).await?;
        let router = router(&schema).await?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port.parse()?)).await?;
        Ok(axum::serve(listener, router).await?)
    });
    Some(ended.map_or_else(|error| failed(program, &error), |()| ExitCode::SUCCESS))
}

fn database_url() -> Option<String> {
    env::var("DATABASE_URL").ok().filter(|url| !url.is_empty())
}

fn block_on(ended: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    Runtime::new()?.block_on(ended)
}

fn failed(program: &str, error: &anyhow::Error) -> ExitCode {
    eprintln!("{program}: {error:#}");
    ExitCode::FAILURE
}

/// Starts this program again, in the same process, with a server's `DATABASE_URL`. Returns only if that fails.
fn on_a_temporary_server() -> anyhow::Error {
    let with_postgres = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../script/with-postgres"));
    let exec = || -> io::Result<io::Error> {
        let mut command = Command::new(with_postgres);
        // No demo kills its server, and the data are not needed afterwards.
        command.env("PG_FSYNC", env::var_os("PG_FSYNC").unwrap_or_else(|| "off".into()));
        Ok(command.arg(env::current_exe()?).args(env::args_os().skip(1)).exec())
    };
    let error = exec().unwrap_or_else(|error| error);
    anyhow::Error::new(error).context(format!("DATABASE_URL is not set, and {} did not run", with_postgres.display()))
}
