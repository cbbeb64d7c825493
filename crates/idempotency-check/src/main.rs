//! `idempotency-check`: a thin `main` over the library.

use std::process::ExitCode;

use clap::Parser as _;
use idempotency_check::cli::{Arguments, run};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return ExitCode::from(2);
    };
    // The service has a process group of its own, which the terminal does not signal. Dropping the run kills the
    // service.
    let code = tokio::select! {
        code = run(arguments) => code,
        _ = interrupt.recv() => 130,
        _ = terminate.recv() => 143,
    };
    ExitCode::from(code)
}
