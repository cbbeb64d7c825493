//! The worker processes: this program again, with arguments. None of them outlives it.

use std::collections::HashMap;
use std::env;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::process::{Child, Command};
use tokio::time::{Instant, interval};

use crate::gateway::{Death, Gateway};
use crate::job::Jobs;
use crate::worker::Way;

const LOOK: Duration = Duration::from_millis(50);

/// It takes three or four seconds on an idle machine. Past this it does not come to an end.
const LIMIT: Duration = Duration::from_secs(12);

pub(crate) struct Crew {
    arguments: [String; 4],
    /// By process id. A worker ends when its stdin is closed, which is open for as long as its child is in here.
    workers: HashMap<u32, Child>,
}

impl Crew {
    pub(crate) fn start(workers: usize, way: Way, gateway: &str, run: &str) -> anyhow::Result<Self> {
        let arguments = ["worker", way.as_argument(), gateway, run].map(str::to_owned);
        let mut crew = Self { arguments, workers: HashMap::new() };
        for _ in 0..workers {
            crew.start_one()?;
        }
        Ok(crew)
    }

    fn start_one(&mut self) -> anyhow::Result<()> {
        let worker = Command::new(env::current_exe()?)
            .args(&self.arguments)
            .stdin(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a worker")?;
        self.workers.insert(worker.id().context("a new worker has no process id")?, worker);
        Ok(())
    }

    /// Until no job is left that a worker can do, killing whom the gateway names. Returns how many were killed.
    pub(crate) async fn deliver(&mut self, gateway: &mut Gateway, jobs: &Jobs) -> anyhow::Result<usize> {
        let started = Instant::now();
        let mut killed = 0;
        let mut look = interval(LOOK);
        loop {
            tokio::select! {
                Some(Death { worker, job, sent }) = gateway.deaths.recv() => {
                    self.kill(worker).await?;
                    killed += 1;
                    let sent = if sent { "was sent" } else { "was not sent" };
                    println!("  SIGKILL to worker {worker}: its text {job} {sent}, and it was not told");
                }
                _ = look.tick() => {
                    ensure!(started.elapsed() < LIMIT, "after {LIMIT:?} there are jobs that nobody has done");
                    self.must_be_alive()?;
                    if jobs.left().await? == 0 {
                        return Ok(killed);
                    }
                }
            }
        }
    }

    /// SIGKILL: the worker gets no chance to say anything to anybody. Another one takes its place.
    async fn kill(&mut self, id: u32) -> anyhow::Result<()> {
        let mut worker = self.workers.remove(&id).with_context(|| format!("{id} is no worker of this crew"))?;
        worker.kill().await.context("cannot kill a worker")?;
        self.start_one()
    }

    /// What ends a worker here is a kill. Anything else is a mistake, and would look like one kill more.
    fn must_be_alive(&mut self) -> anyhow::Result<()> {
        for (id, worker) in &mut self.workers {
            if let Some(status) = worker.try_wait()? {
                bail!("worker {id} ended by itself: {status}");
            }
        }
        Ok(())
    }

    pub(crate) async fn end(self) -> anyhow::Result<()> {
        for mut worker in self.workers.into_values() {
            worker.kill().await.context("cannot kill a worker")?;
        }
        Ok(())
    }
}
