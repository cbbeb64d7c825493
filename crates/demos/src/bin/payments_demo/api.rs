//! A process of the API, from its start to its end by SIGTERM or SIGKILL.

use std::env;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;

/// It connects and looks for two tables. A debug build on a busy machine takes a second.
const START_LIMIT: Duration = Duration::from_secs(30);

/// The API gives itself 25 seconds to drain.
const EXIT_LIMIT: Duration = Duration::from_secs(30);

pub(crate) struct Api {
    pub(crate) url: String,
    child: Child,
    /// The API exits when this is closed, which the kernel does should this process be killed. Kept apart from the
    /// child: its `wait` would close it, and cut short the draining that it waits for.
    _alive: Option<ChildStdin>,
}

impl Api {
    /// Starts the binary `payments_api` that cargo has put next to this one.
    pub(crate) async fn start(delay: Duration) -> anyhow::Result<Self> {
        let program = env::current_exe()?.with_file_name("payments_api");
        let mut child = Command::new(&program)
            .env("LISTEN_ADDR", "127.0.0.1:0")
            .env("PAYMENTS_DELAY_MS", delay.as_millis().to_string())
            .env("PAYMENTS_EXIT_WITH_PARENT", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}; script/demo builds it", program.display()))?;
        let stdout = child.stdout.take().context("the API has no stdout")?;
        let mut lines = BufReader::new(stdout).lines();
        let line = timeout(START_LIMIT, lines.next_line()).await.context("the API does not start")??;
        let line = line.context("the API ended before it listened")?;
        let url = line.strip_prefix("listening on ").with_context(|| format!("the API says {line:?}"))?.to_owned();
        Ok(Self { url, _alive: child.stdin.take(), child })
    }

    /// SIGKILL: the process gets no chance to say anything to anybody.
    pub(crate) async fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().await.context("cannot kill the API")
    }

    /// SIGTERM, which lets it finish what it has begun.
    pub(crate) async fn terminate(&self) -> anyhow::Result<()> {
        let pid = self.child.id().context("the API has ended already")?;
        let status = Command::new("kill").args(["-TERM", &pid.to_string()]).status().await?;
        ensure!(status.success(), "kill -TERM {pid} failed");
        Ok(())
    }

    /// Waits for the end of a process that was terminated, which must be an orderly one.
    pub(crate) async fn ended(mut self) -> anyhow::Result<()> {
        let status = timeout(EXIT_LIMIT, self.child.wait()).await.context("the API does not end after SIGTERM")??;
        match status.code() {
            Some(0) => Ok(()),
            _ => bail!("after SIGTERM the API ended with {status}"),
        }
    }
}
