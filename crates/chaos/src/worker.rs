//! Callers in processes of their own, to be killed or stopped at any moment: this binary, run again. What they do they
//! say on stdout, line by line.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use std::{env, io, process, thread};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use sqlx::ConnectOptions as _;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

use crate::cluster::signal;
use crate::history::now;
use crate::lease::{self, Leased};
use crate::lease_checker::Promise;
use crate::subject::{EVERY_DOOR, Subject};
use crate::world::{Turns, World, pool};

/// Where a worker finds its orders.
const ORDERS: &str = "CHAOS_WORKER";
/// Clients in each, so that a kill finds one claiming while another commits.
const CLIENTS: usize = 2;
/// The name of their connections.
pub(crate) const APPLICATION: &str = "chaos-worker";

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Orders {
    url: String,
    subject: String,
    name: String,
    seed: u64,
    turns: Turns,
    leased: Option<Leased>,
}

/// The worker's side: runs where it was told to, and says so.
pub(crate) async fn run() -> anyhow::Result<bool> {
    let Ok(orders) = env::var(ORDERS) else { return Ok(false) };
    end_with_parent();
    let orders: Orders = serde_json::from_str(&orders)?;
    let subject: Subject = orders.subject.parse()?;
    let world = World::of_worker(orders.url.parse()?, subject, orders.seed, orders.turns);
    let in_steps = orders.leased.is_some_and(|leased| leased.promise == Promise::InSteps);
    // The steps of a call run side by side at times.
    let pool = pool(&world.options, u32::try_from(if in_steps { 4 * CLIENTS } else { CLIENTS })?);
    let client = |client| {
        let name = format!("{}.{client}", orders.name);
        tokio::spawn(world.clone().client(pool.clone(), name, |random, request| request.door = random.of(EVERY_DOOR)))
    };
    let tasks = match orders.leased {
        Some(leased) => lease::crowd(&world, &pool, &orders.name, CLIENTS, leased),
        None => (0..CLIENTS).map(client).collect(),
    };
    futures_util::future::try_join_all(tasks).await?;
    Ok(true)
}

/// The parent holds the other end of stdin. The kernel closes it however the parent dies, by SIGKILL too.
fn end_with_parent() {
    // A plain thread: the runtime would wait for a blocked read of its own before it lets the process end.
    thread::spawn(|| {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        process::exit(1);
    });
}

struct Worker {
    process: Child,
    reader: JoinHandle<()>,
}

/// So many workers at any time.
pub(crate) struct Crew {
    world: Arc<World>,
    orders: Orders,
    started: usize,
    workers: Vec<Worker>,
}

impl Crew {
    pub(crate) fn start(world: &Arc<World>, workers: usize, leased: Option<Leased>) -> anyhow::Result<Self> {
        let orders = Orders {
            url: world.options.clone().application_name(APPLICATION).to_url_lossy().to_string(),
            subject: world.subject.name().to_owned(),
            name: String::new(),
            seed: world.seed,
            turns: match leased {
                None => Turns { since: now(), every: Duration::from_millis(5), window: 6 },
                // So long that a claim lapses while others still ask for its key.
                Some(leased) => Turns { since: now(), every: leased.lease / 4, window: 8 },
            },
            leased,
        };
        let mut crew = Self { world: world.clone(), orders, started: 0, workers: Vec::new() };
        for _ in 0..workers {
            crew.start_one()?;
        }
        Ok(crew)
    }

    fn start_one(&mut self) -> anyhow::Result<()> {
        self.started += 1;
        let orders = Orders { name: format!("w{}", self.started), ..self.orders.clone() };
        let mut process = Command::new(env::current_exe()?)
            .env(ORDERS, serde_json::to_string(&orders)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a worker")?;
        let mut lines = BufReader::new(process.stdout.take().context("piped")?).lines();
        let world = self.world.clone();
        let reader = tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                if let Ok(event) = line.parse() {
                    world.history.push(event);
                }
            }
        });
        self.workers.push(Worker { process, reader });
        Ok(())
    }

    pub(crate) fn len(&self) -> u64 {
        self.workers.len() as u64
    }

    /// SIGKILL, and another worker takes its place.
    pub(crate) async fn kill(&mut self, index: u64) -> anyhow::Result<()> {
        let worker = self.workers.swap_remove(usize::try_from(index)?);
        end(worker).await?;
        self.start_one()
    }

    /// SIGSTOP, and SIGCONT after `until`; the others go on meanwhile.
    pub(crate) async fn suspend(&self, index: u64, until: impl Future) -> anyhow::Result<()> {
        let process = self.workers[usize::try_from(index)?].process.id().context("a worker that has ended")?;
        signal("-STOP", process)?;
        until.await;
        signal("-CONT", process)
    }

    /// What ends a worker here is a kill. Anything else is a mistake in the suite.
    pub(crate) fn must_be_alive(&mut self) -> anyhow::Result<()> {
        for worker in &mut self.workers {
            if let Some(status) = worker.process.try_wait()? {
                bail!("a worker ended by itself: {status}");
            }
        }
        Ok(())
    }

    /// Ends all, and waits until the server knows: what they had sent last may take effect until then.
    pub(crate) async fn end(self) -> anyhow::Result<()> {
        for worker in self.workers {
            end(worker).await?;
        }
        loop {
            let left: i64 = sqlx::query_scalar("select count(*) from pg_stat_activity where application_name = $1")
                .bind(APPLICATION)
                .fetch_one(&self.world.observer)
                .await?;
            if left == 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

async fn end(mut worker: Worker) -> anyhow::Result<()> {
    worker.process.kill().await.context("cannot kill a worker")?;
    Ok(worker.reader.await?)
}
