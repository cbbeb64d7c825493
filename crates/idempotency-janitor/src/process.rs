//! The process: its output, its log, its ending, and the signals that end it.

use std::io::{ErrorKind, IsTerminal as _, Write as _, stderr, stdout};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::failure::Failure;

/// The ending of a command that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Done,
    /// Work is left for the next sweep, or for a person.
    WorkLeft,
}

/// Prints a text. A reader that closes the pipe early, as `head` does, is not a failure.
pub(crate) fn print(text: &str) -> Result<Ending, Failure> {
    match stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::Output(error)),
        _ => Ok(Ending::Done),
    }
}

/// SIGTERM and SIGINT. After either signal, the process finishes its work in progress and ends.
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
    // Invalid directives are ignored, because a RUST_LOG for other programs, or a mistyped RUST_LOG, must not stop the
    // sweep.
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        // Otherwise, the subscriber would report an error of standard error on standard error, and panic.
        .log_internal_errors(false)
        .init();
}
