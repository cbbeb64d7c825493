//! A redis-server of one test, on a Unix socket.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};

pub(crate) struct Redis {
    /// Stops and removes the server when the pipe to it is closed, which even a SIGKILL of this process does.
    keeper: Child,
    pub(crate) socket: PathBuf,
}

impl Redis {
    pub(crate) fn start() -> anyhow::Result<Self> {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../script");
        let found = Command::new(scripts.join("find-program")).arg("redis-server").output()?;
        ensure!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr).trim());
        let program = String::from_utf8(found.stdout)?;
        let mut keeper = Command::new(scripts.join("redis"))
            .args(["serve", program.trim()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let mut socket = String::new();
        BufReader::new(keeper.stdout.take().context("piped")?).read_line(&mut socket)?;
        ensure!(!socket.is_empty(), "redis-server did not start");
        Ok(Self { keeper, socket: socket.trim_end().into() })
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}
