//! One world and its callers.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::ensure;
use futures_util::future::join_all;
use pg_idempotency::{Error, Outcome};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgPool};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::leases::{self, Outside};
use super::marks;
use crate::history::{Call, What, now};
use crate::lease::Leased;
use crate::random::Random;
use crate::settling::MUTANT_SETTLE_LIMIT;
use crate::subject::{EVERY_DOOR, Failure, Request, SAFE_TO_DROP, Subject, ending};
use crate::world::{World, pool_that_waits};

/// A caller's time-out for one attempt.
const LIMIT: Duration = Duration::from_secs(3);
/// The time-out of a direct caller: longer than a node is paused, so that its calls go on when the node wakes.
const DIRECT_LIMIT: Duration = Duration::from_secs(60);
/// How long an attempt waits for a connection.
const ACQUIRE: Duration = Duration::from_secs(1);
/// Between two calls of a caller: three servers, three Patronis and etcd share the machine with the callers.
const THINKING: Duration = Duration::from_millis(10);
/// Before a caller tries again.
const RETRY: Duration = Duration::from_millis(20);
/// When the faults are over, every key must be answered within this time.
const SETTLE_LIMIT: Duration = Duration::from_secs(120);

/// For the load to go on after a fault, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

const SETTLERS: usize = 8;
/// The prefix of their names.
pub(crate) const SETTLER: &str = "settler";

/// In which mode the callers of one world call.
#[derive(Clone)]
pub(crate) enum Way {
    Transaction,
    Mark,
    Lease(Leased, Arc<Outside>),
}

/// One world and its callers.
pub(crate) struct Load {
    pub(crate) world: Arc<World>,
    pub(crate) way: Way,
    pool: PgPool,
    stopped: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    callers: JoinSet<()>,
}

impl Load {
    /// `name` is the prefix of the callers' names.
    pub(crate) fn start(world: &Arc<World>, way: Way, name: &str, callers: u32) -> Self {
        // A dropped call keeps its connection until the server has answered, so there are more of them than callers.
        let pool = pool_that_waits(&world.options, 3 * callers, ACQUIRE);
        let mut load = Self::new(world, way, pool);
        load.spawn(name, callers, LIMIT);
        load
    }

    /// Callers in transaction mode that are connected to this node past the proxy, and insist on a primary.
    pub(crate) fn direct(world: &Arc<World>, node: &PgConnectOptions, name: &str, callers: u32) -> Self {
        let database = world.options.get_database().unwrap_or("postgres");
        let pool = PgPoolOptions::new()
            .max_connections(callers)
            .acquire_timeout(ACQUIRE)
            // What `target_session_attrs=read-write` asks for.
            .after_connect(|conn, _| {
                Box::pin(async move {
                    let standby: bool = sqlx::query_scalar("select pg_is_in_recovery()").fetch_one(&mut *conn).await?;
                    if standby { Err(sqlx::Error::Protocol("a standby".to_owned())) } else { conn.ping().await }
                })
            })
            .connect_lazy_with(node.clone().database(database));
        let mut load = Self::new(world, Way::Transaction, pool);
        load.spawn(name, callers, DIRECT_LIMIT);
        load
    }

    fn new(world: &Arc<World>, way: Way, pool: PgPool) -> Self {
        let (stopped, answers) = (Arc::default(), Arc::default());
        Self { world: world.clone(), way, pool, stopped, answers, callers: JoinSet::new() }
    }

    fn spawn(&mut self, name: &str, callers: u32, limit: Duration) {
        for number in 0..callers {
            let caller = Caller {
                world: self.world.clone(),
                way: self.way.clone(),
                pool: self.pool.clone(),
                name: format!("{name}{number}"),
                limit,
            };
            self.callers.spawn(caller.ask(self.stopped.clone(), self.answers.clone()));
        }
    }

    /// Waits for so many more answers.
    pub(crate) async fn goes_on(&self, more: u64) -> anyhow::Result<()> {
        let wanted = self.answers.load(Ordering::Relaxed) + more;
        let started = Instant::now();
        while self.answers.load(Ordering::Relaxed) < wanted {
            ensure!(started.elapsed() < PATIENCE, "the callers get no answers any more");
            sleep(RETRY).await;
        }
        Ok(())
    }

    /// Each caller ends with the attempt that it is in.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        self.stopped.store(true, Ordering::Relaxed);
        while let Some(ended) = self.callers.join_next().await {
            ended?;
        }
        Ok(())
    }

    /// When the faults are over: asks for every key once more, until it is answered. Returns how many keys needed an
    /// operator.
    pub(crate) async fn settle(&self) -> anyhow::Result<u64> {
        let calls = self.world.history.calls();
        let keys: HashSet<&str> = calls.iter().map(|call| call.key.as_str()).collect();
        let keys: Vec<&str> = keys.into_iter().collect();
        let started = Instant::now();
        let limit = if self.world.subject == Subject::Crate { SETTLE_LIMIT } else { MUTANT_SETTLE_LIMIT };
        let settled = join_all((0..SETTLERS).map(async |settler| {
            let caller = Caller {
                world: self.world.clone(),
                way: self.way.clone(),
                pool: self.pool.clone(),
                name: format!("{SETTLER}{settler}-{}", now()),
                limit: LIMIT,
            };
            let mut random = self.world.random(&caller.name);
            let (mut number, mut decided) = (0, 0);
            for key in keys.iter().skip(settler).step_by(SETTLERS) {
                loop {
                    number += 1;
                    match caller.attempt(key, number, &mut random).await {
                        What::Performed(_) | What::Replayed(_) | What::Wrong(_) | What::Barred(_) => break,
                        What::Refused(why) if why == leases::INDETERMINATE => {
                            leases::decide(&self.pool, &self.way, key).await?;
                            decided += 1;
                        }
                        _ if started.elapsed() > limit => break,
                        _ => sleep(RETRY).await,
                    }
                }
            }
            anyhow::Ok(decided)
        }))
        .await;
        settled.into_iter().sum()
    }
}

struct Caller {
    world: Arc<World>,
    way: Way,
    pool: PgPool,
    name: String,
    limit: Duration,
}

impl Caller {
    async fn ask(self, stopped: Arc<AtomicBool>, answers: Arc<AtomicU64>) {
        let mut random = self.world.random(&self.name);
        let mut number = 0;
        let stopped = || stopped.load(Ordering::Relaxed);
        while !stopped() {
            let key = self.world.choose_key(&mut random);
            while !stopped() {
                number += 1;
                match self.attempt(&key, number, &mut random).await {
                    What::Performed(_) | What::Replayed(_) => {
                        answers.fetch_add(1, Ordering::Relaxed);
                        break;
                    }
                    // An operator has to decide, and does when the faults are over.
                    What::Refused(why) if why == leases::INDETERMINATE => break,
                    What::Barred(_) | What::Wrong(_) => break,
                    _ => sleep(RETRY).await,
                }
            }
            sleep(THINKING).await;
        }
    }

    /// One call, with its lines in the history.
    async fn attempt(&self, key: &str, number: u64, random: &mut Random) -> What {
        let (history, call) = (&self.world.history, format!("{}/{number}", self.name));
        history.add(&call, key, What::Invoked);
        let what = timeout(self.limit, self.call(key, &call, random))
            .await
            .unwrap_or_else(|_| What::Unknown("dropped after its time-out".to_owned()));
        history.add(&call, key, what.clone());
        what
    }

    async fn call(&self, key: &str, call: &str, random: &mut Random) -> What {
        let request = self.world.request(key, call);
        match &self.way {
            Way::Transaction => {
                // A direct call is not dropped before its node has answered.
                let doors = if self.limit == LIMIT { SAFE_TO_DROP } else { EVERY_DOOR };
                let request = Request { fails: random.one_in(16), door: random.of(doors), ..request };
                self.world.subject.call(&self.pool, &request).await
            }
            Way::Mark => of_leases(marks::call(&self.pool, &request).await),
            Way::Lease(leased, outside) => {
                let work = random.millis(0..leased.work.max(1));
                of_leases(leases::call(&self.world, &self.pool, &request, *leased, outside, work).await)
            }
        }
    }
}

/// In lease mode a key may become indeterminate, which is no violation.
fn of_leases(result: Result<Outcome<String>, Failure>) -> What {
    match result {
        Err(Failure::Of(Error::Indeterminate { .. })) => What::Refused(leases::INDETERMINATE.to_owned()),
        result => ending(result),
    }
}

/// All calls of these loads, in the order of invocation.
pub(crate) fn calls_of(loads: &[&Load]) -> Vec<Call> {
    let mut calls: Vec<Call> = loads.iter().flat_map(|load| load.world.history.calls()).collect();
    calls.sort_by_key(|call| call.invoked);
    calls
}
