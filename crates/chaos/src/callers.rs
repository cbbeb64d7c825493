//! Callers in every mode: the one way in which a scenario makes calls.
//!
//! # Layout
//!
//! - Here: the loop of a caller, the questions that settle every key when the fault is over, and the check.
//! - [`mark`], [`lease`], [`in_doubt`] and [`steps`] are one call in these modes. [`crate::subject`] is one in
//!   transaction mode.
//! - [`loads`] is callers in each mode at the same time, for faults that last seconds.

pub(crate) mod in_doubt;
mod lease;
pub(crate) mod loads;
mod mark;
mod steps;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::ensure;
use futures_util::future::try_join_all;
use sqlx::PgPool;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::checker::leases::Promise;
use crate::checker::{self, Aftermath, Effect, leases, lost, marks, register};
use crate::finding::Finding;
use crate::history::{Call, What, now};
use crate::random::Random;
use crate::request::{Door, INDETERMINATE, OVER_HTTP, Request, ending};
use crate::service::Service;
use crate::subject;
use crate::world::{PAUSE, World, pool, pool_that_waits};

use in_doubt::Doubt;
pub(crate) use lease::Leased;

const IN_STEPS: Leased = Leased { promise: Promise::InSteps, lease: Duration::from_millis(400), work: 60 };

/// Makes a request what the scenario needs.
pub(crate) type Choose = fn(&mut Random, &mut Request);

/// The mode in which callers call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Transaction(Choose),
    Mark,
    Lease(Leased),
}

impl Way {
    /// The mode in the words of `model/`, which has no operation with three steps.
    fn mode(self) -> Option<&'static str> {
        match self {
            Self::Transaction(_) => Some("transaction"),
            Self::Mark => Some("mark"),
            Self::Lease(leased) => match leased.promise {
                Promise::AtLeastOnce => Some("at_least_once"),
                Promise::AtMostOnce | Promise::Reconciled => Some("at_most_once"),
                Promise::InSteps => None,
            },
        }
    }
}

/// The times of a caller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// A call that takes longer is dropped, as a service's time-out would drop it.
    pub(crate) limit: Duration,
    /// Before the caller asks again, if it got no answer.
    pub(crate) pause: Duration,
    /// After an answer.
    pub(crate) thinking: Duration,
}

impl Pace {
    pub(crate) const QUICK: Self = Self { limit: Duration::from_secs(8), pause: PAUSE, thinking: Duration::ZERO };
}

/// All callers of one world, with the resumers and the operators of operations in steps.
pub(crate) struct Callers {
    pub(crate) world: Arc<World>,
    way: Way,
    service: Service,
    stopped: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

/// Which answers must be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answers {
    All,
    /// Only those to the questions that settle the keys. The fault may lose earlier ones, which are counted.
    AfterTheFault,
}

/// For callers to go on after a fault, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// When the fault is over, every key must be answered within this time.
const SETTLE_LIMIT: Duration = Duration::from_secs(120);
/// A mutant may never answer. Of these, `no-trace-grants` needs most time to be seen: four attempts without a trace
/// take six seconds on an idle machine.
const MUTANT_SETTLE_LIMIT: Duration = Duration::from_secs(10);
/// One settler alone would take minutes for the keys of a long run.
const SETTLERS: usize = 8;
/// The prefix of their names.
const SETTLER: &str = "settler";

impl Callers {
    /// `name` is the prefix of the callers' names.
    pub(crate) fn start(world: &Arc<World>, way: Way, pool: PgPool, name: &str, count: usize) -> Self {
        Self::paced(world, way, pool, name, count, Pace::QUICK)
    }

    pub(crate) fn paced(world: &Arc<World>, way: Way, pool: PgPool, name: &str, count: usize, pace: Pace) -> Self {
        let mut callers = Self::none(world, way, pool);
        for number in 0..count {
            let caller = callers.caller(format!("{name}{number}"), pace);
            callers.tasks.spawn(caller.ask(callers.stopped.clone()));
        }
        if let Way::Lease(leased @ Leased { promise: Promise::InSteps, .. }) = way {
            let (resumer, operator) = (format!("{name}.resumer"), format!("{name}.operator"));
            let (world, pool, stopped) = (world.clone(), callers.service.pool.clone(), callers.stopped.clone());
            callers.tasks.spawn(steps::resumer(world.clone(), pool.clone(), resumer, leased, stopped.clone()));
            callers.tasks.spawn(steps::operator(world, pool, operator, stopped));
        }
        callers.reconcile(name.trim_end_matches('.'));
        callers
    }

    /// Callers of operations in steps beside the other calls, in the same database and under the same fault. The steps
    /// of a call run side by side at times, so there are more connections than callers.
    pub(crate) fn in_steps_beside(world: &World) -> Self {
        let world = world.beside(&[], None);
        let pool = pool_that_waits(&world.options, 12, Duration::from_millis(250));
        Self::start(&world, Way::Lease(IN_STEPS), pool, "steps", 3)
    }

    fn reconcile(&mut self, name: &str) {
        if let Way::Lease(leased @ Leased { promise: Promise::Reconciled, .. }) = self.way {
            let (world, pool, stopped) = (self.world.clone(), self.service.pool.clone(), self.stopped.clone());
            self.tasks.spawn(in_doubt::reconcile(world, pool, name.to_owned(), leased, stopped));
        }
    }

    /// For calls that others make: a scenario itself, or worker processes.
    pub(crate) fn none(world: &Arc<World>, way: Way, pool: PgPool) -> Self {
        let service = Service::new(pool, &world.operation);
        Self { world: world.clone(), way, service, stopped: Arc::default(), tasks: JoinSet::new() }
    }

    /// Adds another task, which must end with the world.
    pub(crate) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    fn caller(&self, name: String, pace: Pace) -> Caller {
        Caller { world: self.world.clone(), way: self.way, service: self.service.clone(), name, pace }
    }

    /// Waits for so many more answers.
    pub(crate) async fn go_on(&self, more: u64) -> anyhow::Result<()> {
        let (wanted, started) = (self.world.answers() + more, Instant::now());
        while self.world.answers() < wanted {
            ensure!(started.elapsed() < PATIENCE, "the callers get no answers any more");
            sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Each caller ends after the call that it is making.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        self.stopped.store(true, Ordering::Relaxed);
        self.end().await
    }

    /// Waits until the world is over, and with it the callers.
    pub(crate) async fn end(&mut self) -> anyhow::Result<()> {
        while let Some(ended) = self.tasks.join_next().await {
            ended?;
        }
        Ok(())
    }

    /// Waits for the callers, asks for every key once more, and checks all answers.
    pub(crate) async fn finding(mut self) -> anyhow::Result<Finding> {
        self.end().await?;
        Ok(self.check(Answers::All).await?.0)
    }

    /// Asks for every key once more, and compares the answers with the tables and with the outside. Also returns how
    /// many answers are lost, in words.
    pub(crate) async fn check(&self, answers: Answers) -> anyhow::Result<(Finding, String)> {
        let world = &self.world;
        let before = world.history.calls();
        let decided = self.settle().await?;
        if matches!(self.way, Way::Lease(Leased { promise: Promise::Reconciled, .. })) {
            return Ok((in_doubt::check(world, self.way.mode(), decided).await?, String::new()));
        }
        let after = world.aftermath().await?;
        let must_be_true = |call: &Call| answers == Answers::All || call.name.starts_with(SETTLER);
        let calls: Vec<Call> = world.history.calls().into_iter().filter(must_be_true).collect();
        // A fault that may lose answers also permits another answer later.
        let register = || if answers == Answers::All { register::check(&calls) } else { register::Checked::default() };
        let mut stored = None;
        let finding = match self.way {
            Way::Transaction(_) => world.finding(checker::violations(&calls, &after), register()),
            Way::Mark => world.finding(marks::violations(&calls, &after), register()),
            Way::Lease(leased) if leased.promise == Promise::InSteps => {
                stored = Some(results(&after));
                steps::check(world, &calls, &after).await?
            }
            Way::Lease(leased) => {
                stored = Some(results(&after));
                let promise = match answers {
                    Answers::All => leased.promise,
                    // A claim that the fault has lost leads to a second effect, which is counted.
                    Answers::AfterTheFault => Promise::AtLeastOnce,
                };
                let checked = leases::check(&calls, &after, promise);
                let doubles = format!("{} keys with more than one effect outside", checked.doubles);
                let by_operator = format!("{decided} keys settled by an operator");
                world.finding(checked.violations, register()).note(doubles).note(by_operator)
            }
        };
        let finding = match answers {
            Answers::All => finding.tell(self.way.mode(), &calls, &after),
            Answers::AfterTheFault => finding,
        };
        let lost = lost(&before, stored.as_ref().unwrap_or(&after));
        let given = before.iter().filter(|call| call.response().is_some()).count();
        Ok((finding, format!("{lost} of {given} answers lost")))
    }

    /// When the fault is over: asks for every key until it is answered, and does an operator's duty for what is
    /// indeterminate or in doubt. Returns how many keys needed an operator.
    pub(crate) async fn settle(&self) -> anyhow::Result<usize> {
        let pool = pool(&self.world.options, 2 * SETTLERS as u32);
        let service = Service::new(pool.clone(), &self.world.operation);
        let way = match self.way {
            Way::Transaction(_) if self.world.service.is_some() => Way::Transaction(|random, request| {
                request.fails = false;
                request.enter(random, OVER_HTTP);
            }),
            Way::Transaction(_) => Way::Transaction(|random, request| {
                request.fails = false;
                request.enter(random, &[Door::Run]);
            }),
            Way::Mark => Way::Mark,
            Way::Lease(leased) => Way::Lease(Leased { work: 1, ..leased }),
        };
        let calls = self.world.history.calls();
        let keys: BTreeSet<&str> = calls.iter().map(|call| call.key.as_str()).collect();
        let mut reconcilers = Self::none(&self.world, self.way, pool.clone());
        reconcilers.reconcile(SETTLER);
        let started = Instant::now();
        let limit = if self.world.mutant.is_none() { SETTLE_LIMIT } else { MUTANT_SETTLE_LIMIT };
        let settled = try_join_all((0..SETTLERS).map(async |settler| {
            let name = format!("{SETTLER}{settler}-{}", now());
            let mut random = self.world.random(&name);
            let service = service.clone();
            let caller = Caller { world: self.world.clone(), way, service, name, pace: Pace::QUICK };
            let (mut number, mut decided) = (0, 0);
            for key in keys.iter().skip(settler).step_by(SETTLERS) {
                loop {
                    number += 1;
                    match (caller.attempt(key, number, &mut random).await, way) {
                        (What::Barred(why), Way::Lease(leased))
                            if why == INDETERMINATE
                                && !matches!(leased.promise, Promise::InSteps | Promise::Reconciled) =>
                        {
                            lease::decide(&self.world, &pool, key).await?;
                            decided += 1;
                        }
                        _ if started.elapsed() > limit => break,
                        (What::Barred(why), Way::Lease(leased))
                            if why == INDETERMINATE && leased.promise == Promise::Reconciled =>
                        {
                            match in_doubt::doubt(&pool, key).await? {
                                Doubt::Lasts => {}
                                Doubt::GivenUp => break,
                                Doubt::ByHand => decided += 1,
                            }
                        }
                        (What::Performed(_) | What::Replayed(_) | What::Wrong(_), _) => break,
                        (_, Way::Lease(leased)) if leased.promise == Promise::InSteps => {
                            steps::settle_in_doubt(&self.world, &pool).await?;
                            sleep(PAUSE).await;
                        }
                        (what, _) if what.is_answer() => break,
                        _ => sleep(PAUSE).await,
                    }
                }
            }
            anyhow::Ok(decided)
        }))
        .await?;
        reconcilers.stop().await?;
        pool.close().await;
        Ok(settled.into_iter().sum())
    }
}

struct Caller {
    world: Arc<World>,
    way: Way,
    service: Service,
    name: String,
    pace: Pace,
}

impl Caller {
    async fn ask(self, stopped: Arc<AtomicBool>) {
        let mut random = self.world.random(&self.name);
        let mut number = 0;
        while !stopped.load(Ordering::Relaxed) && !self.world.is_over() {
            number += 1;
            let key = self.world.choose_key(&mut random);
            let what = self.attempt(&key, number, &mut random).await;
            let answered = matches!(what, What::Performed(_) | What::Replayed(_));
            let pause = if answered { self.pace.thinking } else { self.pace.pause };
            if !pause.is_zero() {
                sleep(pause).await;
            }
        }
    }

    /// One call, with its lines in the history.
    async fn attempt(&self, key: &str, number: u64, random: &mut Random) -> What {
        let mut request = Request::new(key, &format!("{}/{number}", self.name));
        if let Way::Transaction(choose) = self.way {
            request.fails = random.one_in(16);
            choose(random, &mut request);
        }
        self.world.invoked(&request.call, key);
        let what = timeout(self.pace.limit, self.call(&request, random))
            .await
            .unwrap_or_else(|_| What::Unknown("dropped after its time-out".to_owned()));
        self.world.ended(&request.call, key, what.clone());
        what
    }

    async fn call(&self, request: &Request, random: &mut Random) -> What {
        let (world, service, pool) = (&self.world, &self.service, &self.service.pool);
        match self.way {
            Way::Transaction(_) => {
                let Some(result) = subject::call(world.mutant, service, request).await else {
                    world.fault("future dropped");
                    return What::Unknown("dropped".to_owned());
                };
                ending(result)
            }
            Way::Mark => ending(mark::call(pool, request).await),
            Way::Lease(leased) if leased.promise == Promise::InSteps => {
                ending(steps::call(world, pool, &request.key, &request.call, leased, random).await)
            }
            Way::Lease(leased) if leased.promise == Promise::Reconciled => {
                ending(in_doubt::call(world, pool, &request.key, &request.call, leased, random).await)
            }
            Way::Lease(leased) => ending(lease::call(world, pool, &request.key, &request.call, leased, random).await),
        }
    }
}

/// The stored results, as if they were the effects. The database can lose a result, but the outside loses no effect.
fn results(after: &Aftermath) -> Aftermath {
    let result = |record: &checker::Stored| {
        let call = record.response.clone().filter(|_| record.completed)?;
        Some(Effect { key: record.key.clone(), call, downstream_key: None })
    };
    Aftermath { effects: after.records.iter().filter_map(result).collect(), records: Vec::new() }
}
