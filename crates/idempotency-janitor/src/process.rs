//! The process: its output, its log, its ending, and the signals that end it.

use std::io::{self, ErrorKind, IsTerminal as _, Write, stderr, stdout};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use serde_json::Value;
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

/// Writes JSON in one line. Escapes the control characters that JSON itself does not escape, the separators of lines,
/// and the marks that change the direction of writing, because the line may be read on a terminal. A program that
/// parses the line gets the same value.
pub(crate) fn json_line(value: &Value) -> String {
    let mut line = String::new();
    for character in value.to_string().chars() {
        match character {
            '\u{7f}'..='\u{9f}'
            | '\u{61c}'
            | '\u{200e}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}' => line += &format!("\\u{:04x}", u32::from(character)),
            other => line.push(other),
        }
    }
    line + "\n"
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

/// A line on stderr that shows a command at work, and the time since its start. The line appears only on a terminal, so
/// that no log contains the line, and disappears at the end.
pub(crate) fn progress(what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {prefix}{msg}, {elapsed}").expect("a template");
    // Every terminal can show these characters.
    let style = style.tick_chars(r"|/-\ ");
    let bar = ProgressBar::new_spinner().with_style(style).with_prefix(what).with_finish(ProgressFinish::AndClear);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// Stderr for lines of the log. Each write hides the progress line, because the two lines would otherwise be mixed.
struct Beside(ProgressBar);

impl Write for Beside {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        stderr().flush()
    }
}

/// Writes the log to stderr, filtered by RUST_LOG.
pub(crate) fn log(beside: &ProgressBar) {
    // Invalid directives are ignored, because a RUST_LOG for other programs, or a mistyped RUST_LOG, must not stop the
    // sweep.
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let colour = stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let beside = beside.clone();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || Beside(beside.clone()))
        .with_ansi(colour)
        // By default, if a write to standard error fails, the subscriber reports this on standard error, and panics.
        .log_internal_errors(false)
        .init();
}
