//! The worker processes: this program again, with an argument. None of them outlives it.

use std::collections::HashMap;
use std::env;
use std::process::Stdio;

use anyhow::{Context as _, bail};
use tokio::process::{Child, Command};

pub(crate) struct Crew {
    run: String,
    /// By process id. A worker ends when its stdin is closed, and a child's is for as long as it is in here.
    workers: HashMap<i64, Child>,
}

impl Crew {
    pub(crate) fn start(workers: usize, run: &str) -> anyhow::Result<Self> {
        let mut crew = Self { run: run.to_owned(), workers: HashMap::new() };
        for _ in 0..workers {
            crew.start_one()?;
        }
        Ok(crew)
    }

    fn start_one(&mut self) -> anyhow::Result<()> {
        let worker = Command::new(env::current_exe()?)
            .args(["worker", &self.run])
            .stdin(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a worker")?;
        let id = worker.id().context("a worker that has ended before anybody waited for it")?;
        self.workers.insert(i64::from(id), worker);
        Ok(())
    }

    /// SIGKILL: the worker gets no chance to say anything to anybody. Another one takes its place.
    pub(crate) async fn kill(&mut self, id: i64) -> anyhow::Result<()> {
        let mut worker = self.workers.remove(&id).with_context(|| format!("{id} is no worker of this crew"))?;
        worker.kill().await.context("cannot kill a worker")?;
        self.start_one()
    }

    /// What ends a worker here is a kill. Anything else is a mistake, and would look like one kill more.
    pub(crate) fn must_be_alive(&mut self) -> anyhow::Result<()> {
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
