//! Worker processes: the same program again, with arguments. None of them outlives this process.

use std::env;
use std::pin::pin;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::interval;

use crate::schema::Schema;

const LOOK: Duration = Duration::from_millis(50);

/// It is killed when this is dropped.
pub struct Worker {
    id: u32,
    /// The line that the worker has printed first. It is the worker's URL if it serves requests.
    pub url: String,
    process: Child,
    /// The worker ends when this is closed. It is apart from the process, because waiting for a process closes its
    /// stdin.
    _alive: Option<ChildStdin>,
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
        let url = lines.next_line().await?.context("a worker ended at its start")?;
        let id = process.id().context("a worker ended at its start")?;
        Ok(Self { id, url, _alive: process.stdin.take(), process })
    }

    /// After `KILL` the worker does nothing more. After `TERM` it may finish what it has begun.
    pub async fn signal(&self, signal: &str) -> anyhow::Result<()> {
        let status = Command::new("kill").args(["-s", signal, &self.id.to_string()]).status().await?;
        ensure!(status.success(), "cannot send {signal} to a worker");
        Ok(())
    }

    /// Waits for the end of a worker that was terminated.
    pub async fn ended(&mut self) -> anyhow::Result<()> {
        let status = self.process.wait().await?;
        ensure!(status.success(), "after SIGTERM a worker ended with {status}");
        Ok(())
    }
}

/// A fixed number of workers: a killed one is replaced.
pub struct Crew<'a> {
    schema: &'a Schema,
    arguments: Vec<&'a str>,
    workers: Vec<Worker>,
    /// Where the workers serve requests at the moment.
    pub urls: Arc<Mutex<Vec<String>>>,
    /// How many workers were killed.
    pub killed: usize,
}

impl<'a> Crew<'a> {
    pub async fn start(schema: &'a Schema, workers: usize, arguments: &[&'a str]) -> anyhow::Result<Self> {
        let (arguments, urls) = (arguments.to_vec(), Arc::default());
        let mut crew = Self { schema, arguments, workers: Vec::new(), urls, killed: 0 };
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
    async fn kill(&mut self, id: u32) -> anyhow::Result<()> {
        let at = self.workers.iter().position(|worker| worker.id == id);
        let mut worker = self.workers.swap_remove(at.with_context(|| format!("{id} is not a worker of this crew"))?);
        worker.process.kill().await.context("cannot kill a worker")?;
        self.publish();
        self.killed += 1;
        self.start_one().await
    }

    /// Kills the workers that a gateway names, until the work is done.
    pub async fn work<T>(
        &mut self,
        deaths: &mut UnboundedReceiver<u32>,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let (mut work, mut look) = (pin!(work), interval(LOOK));
        loop {
            tokio::select! {
                Some(worker) = deaths.recv() => self.kill(worker).await?,
                _ = look.tick() => self.must_be_alive()?,
                done = &mut work => return done,
            }
        }
    }

    /// A worker ends only by a kill. Any other end is a mistake, and would look like one more kill.
    fn must_be_alive(&mut self) -> anyhow::Result<()> {
        for worker in &mut self.workers {
            if let Some(status) = worker.process.try_wait()? {
                bail!("worker {} ended by itself: {status}", worker.id);
            }
        }
        Ok(())
    }
}
