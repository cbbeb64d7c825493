//! Processes that do not outlive their parent, however it ends: the parent has the other end of their standard input,
//! which the kernel closes even after SIGKILL.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::{process, thread};

use anyhow::{Context as _, ensure};

/// A process that ends by itself when its standard input does, as `script/postgres serve`. Dropping this value ends it,
/// and waits for its end.
pub struct Kept {
    process: Child,
    /// The first line that it has printed.
    pub said: String,
}

impl Kept {
    /// Waits for the first line. The process has a group of its own, so that Ctrl-C ends only its parent, which closes
    /// the pipe.
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        let name = command.get_program().to_owned();
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).spawn();
        let process = spawned.with_context(|| format!("{name:?} does not run"))?;
        let mut kept = Self { process, said: String::new() };
        BufReader::new(kept.process.stdout.take().context("piped")?).read_line(&mut kept.said)?;
        ensure!(kept.said.pop() == Some('\n'), "{name:?} ended at its start, for the reason above");
        Ok(kept)
    }

    /// Writes a line to it.
    pub fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        Ok(writeln!(self.process.stdin.as_mut().context("piped")?, "{line}")?)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// The other side: ends this process with its parent.
pub fn exit_with_parent() {
    // A plain thread: the runtime would wait for a blocked read of its own before it lets the process end.
    thread::spawn(|| {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        process::exit(1);
    });
}
