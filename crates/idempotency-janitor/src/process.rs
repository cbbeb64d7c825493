//! The process: how it ends, its output and log, and the signals that end it.

use std::io::{ErrorKind, IsTerminal as _, Write as _, stderr, stdout};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::failure::Failure;

/// How a run that did not fail ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Done,
    /// Work is left: for the next sweep, or for a person.
    WorkLeft,
}

/// A reader that has gone away, as `head` does, is no failure.
pub(crate) fn print(text: &str) -> Result<Ending, Failure> {
    match stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::Output(error)),
        _ => Ok(Ending::Done),
    }
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

/// Writes the log to stderr, filtered by RUST_LOG.
pub(crate) fn log() {
    // Invalid directives are ignored: a RUST_LOG for other programs, or a mistyped one, must not stop the sweep.
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        // It would report an error of standard error on standard error, and panic.
        .log_internal_errors(false)
        .init();
}
