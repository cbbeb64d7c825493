//! The worker processes: this program again, with arguments. They are killed and suspended at random moments. None of
//! them outlives this process.

use std::env;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::sleep;

use crate::dice;
use crate::gateways::Gateways;
use crate::ride::LEASE;

const FAULTS: usize = 36;
/// One fault in so many suspends a worker. The others kill one.
const SUSPENSIONS: usize = 4;
/// Faults keep the pace of the work, so that a slow machine has no more of them for each ride than a fast one.
const REQUESTS_BETWEEN_FAULTS: usize = 6;
const LONGEST_DELAY: Duration = Duration::from_millis(80);
/// Another owner takes over meanwhile.
const SUSPENSION: Duration = Duration::from_secs(LEASE.as_secs() + 1);
const LOOK: Duration = Duration::from_millis(10);

/// The workers that take requests. Clients send to any of them.
pub(crate) type Addresses = Arc<Mutex<Vec<String>>>;

pub(crate) struct Crew {
    arguments: [String; 4],
    workers: Vec<Worker>,
    pub(crate) addresses: Addresses,
    pub(crate) killed: usize,
    pub(crate) suspended: usize,
}

/// A worker ends when its stdin is closed, which is open for as long as its child is in here.
struct Worker {
    process: Child,
    address: String,
    /// Runs until the worker continues.
    suspension: Option<Child>,
}

impl Crew {
    pub(crate) async fn start(workers: usize, arguments: [String; 4]) -> anyhow::Result<Self> {
        let mut crew =
            Self { arguments, workers: Vec::new(), addresses: Addresses::default(), killed: 0, suspended: 0 };
        for _ in 0..workers {
            crew.start_one().await?;
        }
        Ok(crew)
    }

    async fn start_one(&mut self) -> anyhow::Result<()> {
        let mut process = Command::new(env::current_exe()?)
            .args(&self.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a worker")?;
        let stdout = process.stdout.take().context("a worker without stdout")?;
        let address = BufReader::new(stdout).lines().next_line().await?.context("a worker ended at its start")?;
        self.addresses().push(address.clone());
        self.workers.push(Worker { process, address, suspension: None });
        Ok(())
    }

    /// Kills and suspends workers until all faults are used up, or `finished` says that there is no more work.
    pub(crate) async fn disturb(&mut self, gateways: &Gateways, finished: impl Fn() -> bool) -> anyhow::Result<()> {
        for fault in 1..=FAULTS {
            while gateways.requests() < fault * REQUESTS_BETWEEN_FAULTS {
                if finished() {
                    return Ok(());
                }
                self.must_be_alive()?;
                sleep(LOOK).await;
            }
            sleep(dice::duration(Duration::ZERO, LONGEST_DELAY)).await;
            let mut awake = Vec::new();
            for (index, worker) in self.workers.iter_mut().enumerate() {
                if !worker.is_suspended()? {
                    awake.push(index);
                }
            }
            if awake.is_empty() {
                continue;
            }
            let victim = awake[dice::below(awake.len() as u128) as usize];
            if fault % SUSPENSIONS == 0 { self.suspend(victim)? } else { self.kill(victim).await? }
        }
        Ok(())
    }

    /// SIGKILL: the worker gets no chance to say anything to anybody. Another one takes its place.
    async fn kill(&mut self, victim: usize) -> anyhow::Result<()> {
        let mut worker = self.workers.swap_remove(victim);
        worker.process.kill().await.context("cannot kill a worker")?;
        self.addresses().retain(|address| *address != worker.address);
        self.killed += 1;
        self.start_one().await
    }

    /// SIGSTOP, and SIGCONT later. The shell sends both, so that no worker stays suspended if this process dies.
    fn suspend(&mut self, victim: usize) -> anyhow::Result<()> {
        let worker = &mut self.workers[victim];
        let id = worker.process.id().context("a worker has ended")?;
        let script = "kill -STOP $1; sleep $2; kill -CONT $1";
        let arguments =
            ["-c", script, "suspend", &id.to_string(), &SUSPENSION.as_secs().to_string()].map(str::to_owned);
        worker.suspension = Some(Command::new("sh").args(arguments).spawn().context("cannot suspend a worker")?);
        self.suspended += 1;
        Ok(())
    }

    /// What ends a worker here is a kill. Anything else is a mistake, and would look like one kill more.
    pub(crate) fn must_be_alive(&mut self) -> anyhow::Result<()> {
        for worker in &mut self.workers {
            if let Some(status) = worker.process.try_wait()? {
                bail!("a worker ended by itself: {status}");
            }
        }
        Ok(())
    }

    pub(crate) async fn end(self) -> anyhow::Result<()> {
        for mut worker in self.workers {
            if let Some(mut suspension) = worker.suspension {
                suspension.wait().await?;
            }
            worker.process.kill().await.context("cannot kill a worker")?;
        }
        Ok(())
    }

    fn addresses(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Worker {
    fn is_suspended(&mut self) -> anyhow::Result<bool> {
        Ok(match &mut self.suspension {
            Some(suspension) => suspension.try_wait()?.is_none(),
            None => false,
        })
    }
}
