//! Worker processes: the same program again, with arguments. None of them outlives this process.

use std::env;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;

use crate::dice;
use crate::schema::Schema;

/// A debug build on a busy machine needs a second.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Longer than a worker may take to finish what it has begun.
const EXIT_LIMIT: Duration = Duration::from_secs(30);

pub struct Worker {
    pub id: u32,
    /// The line that the worker has printed first. It is the worker's URL if it serves requests.
    pub url: String,
    process: Child,
    /// The worker ends when this is closed. It is apart from the process, because waiting for a process closes its
    /// stdin.
    _alive: Option<ChildStdin>,
    /// This shell runs until the worker continues.
    suspension: Option<Child>,
}

impl Worker {
    pub async fn start(schema: &Schema, arguments: &[&str]) -> anyhow::Result<Self> {
        let mut process = Command::new(env::current_exe()?)
            .args(["worker", &schema.run])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a worker")?;
        let stdout = process.stdout.take().context("a worker without stdout")?;
        let mut lines = BufReader::new(stdout).lines();
        let line = timeout(START_LIMIT, lines.next_line()).await.context("a worker did not start")??;
        let url = line.context("a worker ended at its start")?;
        let id = process.id().context("a worker ended at its start")?;
        Ok(Self { id, url, _alive: process.stdin.take(), process, suspension: None })
    }

    /// SIGKILL: the worker gets no chance to say anything.
    pub async fn kill(mut self) -> anyhow::Result<()> {
        self.process.kill().await.context("cannot kill a worker")
    }

    /// SIGTERM: the worker may finish what it has begun.
    pub async fn terminate(&self) -> anyhow::Result<()> {
        let status = Command::new("kill").args(["-TERM", &self.id.to_string()]).status().await?;
        ensure!(status.success(), "cannot terminate a worker");
        Ok(())
    }

    /// Waits for the end of a worker that was terminated.
    pub async fn ended(mut self) -> anyhow::Result<()> {
        let status = timeout(EXIT_LIMIT, self.process.wait()).await.context("a worker did not end after SIGTERM")??;
        ensure!(status.success(), "after SIGTERM a worker ended with {status}");
        Ok(())
    }

    /// SIGSTOP, and SIGCONT later. The shell sends both, so no worker stays suspended if this process dies.
    fn suspend(&mut self, duration: Duration) -> anyhow::Result<()> {
        let script = "kill -STOP $1; sleep $2; kill -CONT $1";
        let (id, seconds) = (self.id.to_string(), duration.as_secs_f64().to_string());
        let shell = Command::new("sh").args(["-c", script, "suspend", &id, &seconds]).spawn();
        self.suspension = Some(shell.context("cannot suspend a worker")?);
        Ok(())
    }

    fn is_suspended(&mut self) -> anyhow::Result<bool> {
        Ok(match &mut self.suspension {
            Some(suspension) => suspension.try_wait()?.is_none(),
            None => false,
        })
    }
}

/// A fixed number of workers: a killed one is replaced.
pub struct Crew<'a> {
    schema: &'a Schema,
    arguments: Vec<&'a str>,
    workers: Vec<Worker>,
    /// Where the workers serve requests at the moment.
    pub urls: Arc<Mutex<Vec<String>>>,
    pub killed: i64,
    pub suspended: i64,
}

impl<'a> Crew<'a> {
    pub async fn start(schema: &'a Schema, workers: usize, arguments: &[&'a str]) -> anyhow::Result<Self> {
        let (arguments, urls) = (arguments.to_vec(), Arc::default());
        let mut crew = Self { schema, arguments, workers: Vec::new(), urls, killed: 0, suspended: 0 };
        for _ in 0..workers {
            crew.start_one().await?;
        }
        Ok(crew)
    }

    async fn start_one(&mut self) -> anyhow::Result<()> {
        let worker = Worker::start(self.schema, &self.arguments).await?;
        self.workers.push(worker);
        self.publish();
        Ok(())
    }

    fn publish(&self) {
        *self.urls.lock().unwrap_or_else(PoisonError::into_inner) =
            self.workers.iter().map(|worker| worker.url.clone()).collect();
    }

    /// Kills the worker with this process id.
    pub async fn kill(&mut self, id: u32) -> anyhow::Result<()> {
        let at = self.workers.iter().position(|worker| worker.id == id);
        let worker = self.workers.swap_remove(at.with_context(|| format!("{id} is not a worker of this crew"))?);
        worker.kill().await?;
        self.publish();
        self.killed += 1;
        self.start_one().await
    }

    pub async fn kill_any(&mut self) -> anyhow::Result<()> {
        match self.any_awake()? {
            Some(at) => self.kill(self.workers[at].id).await,
            None => Ok(()),
        }
    }

    pub fn suspend_any(&mut self, duration: Duration) -> anyhow::Result<()> {
        if let Some(at) = self.any_awake()? {
            self.workers[at].suspend(duration)?;
            self.suspended += 1;
        }
        Ok(())
    }

    fn any_awake(&mut self) -> anyhow::Result<Option<usize>> {
        let mut awake = Vec::new();
        for (at, worker) in self.workers.iter_mut().enumerate() {
            if !worker.is_suspended()? {
                awake.push(at);
            }
        }
        Ok((!awake.is_empty()).then(|| awake[dice::below(awake.len())]))
    }

    /// A worker ends only by a kill. Any other end is a mistake, and would look like one more kill.
    pub fn must_be_alive(&mut self) -> anyhow::Result<()> {
        for worker in &mut self.workers {
            if let Some(status) = worker.process.try_wait()? {
                bail!("worker {} ended by itself: {status}", worker.id);
            }
        }
        Ok(())
    }

    pub async fn end(self) -> anyhow::Result<()> {
        for mut worker in self.workers {
            if let Some(suspension) = &mut worker.suspension {
                suspension.wait().await?;
            }
            worker.kill().await?;
        }
        Ok(())
    }
}
