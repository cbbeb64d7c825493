//! Callers in processes of their own, which a scenario can kill or suspend at any moment. A process is this binary, and
//! prints the history of its calls line by line.

use std::env;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rig::child::exit_with_parent;
use serde::{Deserialize, Serialize};
use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::callers::{Callers, Leased, Way};
use crate::checker::leases::Promise;
use crate::cluster::signal;
use crate::finding::Finding;
use crate::history::now;
use crate::mutant::Mutant;
use crate::request::{EVERY_DOOR, OVER_HTTP};
use crate::world::{Next, Window, World, pool};

/// The variable with the orders of a worker.
const ORDERS: &str = "CHAOS_WORKER";
/// The callers in each worker, so that a kill finds one claiming while another commits.
const CALLERS: usize = 2;
/// The name of the connections of a world's workers.
fn application(world: &World) -> String {
    ["chaos-worker", world.service.as_deref().unwrap_or_default()].join("-")
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Orders {
    url: String,
    mutant: Option<Mutant>,
    name: String,
    seed: u64,
    window: Window,
    prefix: String,
    service: Option<String>,
    leased: Option<Leased>,
}

impl Orders {
    /// In lease mode, or in transaction mode. One of several services has its requests over HTTP.
    fn way(&self) -> Way {
        match (self.leased, &self.service) {
            (Some(leased), _) => Way::Lease(leased),
            (None, Some(_)) => Way::Transaction(|random, request| request.enter(random, OVER_HTTP)),
            (None, None) => Way::Transaction(|random, request| request.enter(random, EVERY_DOOR)),
        }
    }
}

/// Makes calls if this process is a worker. `false` means that it is not one.
pub(crate) async fn run() -> anyhow::Result<bool> {
    let Ok(orders) = env::var(ORDERS) else { return Ok(false) };
    exit_with_parent();
    let orders: Orders = serde_json::from_str(&orders)?;
    let (url, window, way) = (orders.url.parse()?, orders.window, orders.way());
    let world = World::of_worker(url, orders.mutant, orders.seed, window, orders.prefix, orders.service);
    // The steps of a call run side by side at times.
    let pool = pool(&world.options, u32::try_from(4 * CALLERS)?);
    Callers::start(&world, way, pool, &format!("{}.", orders.name), CALLERS).end().await?;
    Ok(true)
}

struct Worker {
    name: String,
    process: Child,
    reader: JoinHandle<()>,
}

/// A fixed number of workers.
pub(crate) struct Crew {
    world: Arc<World>,
    orders: Orders,
    started: usize,
    workers: Vec<Worker>,
}

impl Crew {
    /// Each worker reaches the database by `options`.
    pub(crate) fn start(
        world: &Arc<World>,
        options: &PgConnectOptions,
        workers: usize,
        leased: Option<Leased>,
    ) -> anyhow::Result<Self> {
        let every = |time| Next::Every { since: now(), time };
        let orders = Orders {
            url: options.clone().application_name(&application(world)).to_url_lossy().to_string(),
            mutant: world.mutant,
            name: String::new(),
            seed: world.seed,
            window: match leased {
                None => Window { keys: 6, next: every(Duration::from_millis(5)) },
                // A key is still asked for when a reconciler has released it.
                Some(leased) if leased.promise == Promise::Reconciled => {
                    Window { keys: 32, next: every(leased.lease / 4) }
                }
                // Long, so that a claim lapses while other callers still ask for its key.
                Some(leased) => Window { keys: 8, next: every(leased.lease / 4) },
            },
            prefix: world.prefix.clone(),
            service: world.service.clone(),
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
        let service = self.orders.service.as_deref().unwrap_or_default();
        let orders = Orders { name: format!("{service}w{}", self.started), ..self.orders.clone() };
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
                if let Ok(event) = serde_json::from_str(&line) {
                    world.history.push(event);
                }
            }
        });
        self.workers.push(Worker { name: orders.name, process, reader });
        Ok(())
    }

    pub(crate) fn len(&self) -> u64 {
        self.workers.len() as u64
    }

    /// The index of the worker with this name, unless it was killed.
    pub(crate) fn position(&self, name: &str) -> Option<u64> {
        self.workers.iter().position(|worker| worker.name == name).map(|index| index as u64)
    }

    /// SIGKILL to a worker, and another one takes its place.
    pub(crate) async fn kill(&mut self, index: u64) -> anyhow::Result<()> {
        self.must_be_alive()?;
        end(self.workers.swap_remove(usize::try_from(index)?)).await?;
        self.start_one()
    }

    /// SIGSTOP to a worker, and SIGCONT after `until`. The others go on meanwhile.
    pub(crate) async fn suspend(&self, index: u64, until: impl Future) -> anyhow::Result<()> {
        let process = self.workers[usize::try_from(index)?].process.id().context("a worker that has ended")?;
        signal("-STOP", process)?;
        until.await;
        signal("-CONT", process)
    }

    /// Only a kill ends a worker. Any other end is a mistake in the suite.
    pub(crate) fn must_be_alive(&mut self) -> anyhow::Result<()> {
        for worker in &mut self.workers {
            if let Some(status) = worker.process.try_wait()? {
                bail!("a worker ended by itself: {status}");
            }
        }
        Ok(())
    }

    /// Ends all workers, and checks the answers of their calls.
    pub(crate) async fn finding(mut self) -> anyhow::Result<Finding> {
        self.must_be_alive()?;
        for worker in std::mem::take(&mut self.workers) {
            end(worker).await?;
        }
        // The last messages of the workers may take effect until the server notices that they are gone.
        while self.connections().await? > 0 {
            sleep(Duration::from_millis(10)).await;
        }
        Callers::none(&self.world, self.orders.way(), self.world.observer.clone()).finding().await
    }

    async fn connections(&self) -> sqlx::Result<i64> {
        let sql = "select count(*) from pg_stat_activity where application_name = $1";
        sqlx::query_scalar(sql).bind(application(&self.world)).fetch_one(&self.world.observer).await
    }
}

async fn end(mut worker: Worker) -> anyhow::Result<()> {
    worker.process.kill().await.context("cannot kill a worker")?;
    Ok(worker.reader.await?)
}
