//! One scenario's database, and all that is known of what happens in it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Executor as _, PgPool};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::citus::effects::Effects;
use crate::history::{History, Moment, What, now};
use crate::random::Random;
use crate::stage::Stage;
use crate::subject::{Request, Subject};

/// Each key is asked for about so often in all.
const REPEATS: u64 = 4;
/// How many keys are asked for at the same time.
const WINDOW: u64 = 6;
/// A call that takes longer is dropped, as a service's time-out would.
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(8);
/// Until a refused caller asks again.
pub(crate) const PAUSE: Duration = Duration::from_millis(3);

/// The faults that a scenario must have injected before it ends, and how many of each.
pub(crate) type Least = &'static [(&'static str, u64)];

/// The prefix of the keys of operations in steps that are beside other calls, in the same database.
const BESIDE: &str = "steps-";

/// Calls that must have been made.
const LEAST_CALLS: u64 = 100;
/// An operation in steps takes as long as many calls.
const LEAST_CALLS_BESIDE: u64 = 40;

pub(crate) struct World {
    /// Straight to the database, past all that is put in the way of the callers.
    pub(crate) options: PgConnectOptions,
    /// For the suite itself.
    pub(crate) observer: PgPool,
    pub(crate) history: Arc<History>,
    pub(crate) subject: Subject,
    pub(crate) seed: u64,
    pub(crate) until: Instant,
    /// How much longer it may take for what must happen at least.
    patience: Duration,
    least: Least,
    least_calls: u64,
    /// What had not happened when the patience was at its end.
    missing: OnceLock<Vec<String>>,
    pub(crate) faults: Mutex<BTreeMap<&'static str, u64>>,
    asked: AtomicU64,
    turns: Option<Turns>,
    /// Of its keys.
    prefix: &'static str,
    /// What the steps of operations affect, if it is not in the database itself.
    pub(crate) outside: Option<PgPool>,
    /// Whether Citus distributes the tables.
    distributed: bool,
}

/// Where processes share the keys, they turn over by the clock.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Turns {
    pub(crate) since: Moment,
    pub(crate) every: Duration,
    pub(crate) window: u64,
}

impl World {
    /// What a worker process knows of it.
    pub(crate) fn of_worker(options: PgConnectOptions, subject: Subject, seed: u64, turns: Turns) -> Arc<Self> {
        Arc::new(Self {
            observer: pool(&options, 1),
            options,
            history: Arc::new(History::Told),
            subject,
            seed,
            // Until it is killed.
            until: Instant::now() + Duration::from_secs(24 * 60 * 60),
            patience: Duration::ZERO,
            least: &[],
            least_calls: 0,
            missing: OnceLock::new(),
            faults: Mutex::default(),
            asked: AtomicU64::new(0),
            turns: Some(turns),
            prefix: "k",
            outside: None,
            distributed: false,
        })
    }

    pub(crate) async fn create(stage: &Stage, name: &str, least: Least) -> anyhow::Result<Arc<Self>> {
        Self::on(stage.cluster.create_database(name).await?, stage, name, least).await
    }

    /// In a database that is there already.
    pub(crate) async fn on(
        options: PgConnectOptions,
        stage: &Stage,
        name: &str,
        least: Least,
    ) -> anyhow::Result<Arc<Self>> {
        Self::with_tables(options, stage, name, least, None).await
    }

    /// In a database with Citus, which distributes the records. `effects` is where the effects are.
    pub(crate) async fn distributed(
        options: PgConnectOptions,
        stage: &Stage,
        name: &str,
        least: Least,
        effects: Effects,
    ) -> anyhow::Result<Arc<Self>> {
        Self::with_tables(options, stage, name, least, Some(effects)).await
    }

    async fn with_tables(
        options: PgConnectOptions,
        stage: &Stage,
        name: &str,
        least: Least,
        effects: Option<Effects>,
    ) -> anyhow::Result<Arc<Self>> {
        let observer = pool(&options, 4);
        let mut conn = observer.acquire().await?;
        pg_idempotency::migrate(&observer).await?;
        conn.execute(include_str!("../../../migrations/strict.sql")).await?;
        conn.execute(
            "create table effect (key text collate \"C\" not null, call text not null, downstream_key text, token bigint);
            create table written (call text not null);
            create table leaked (note text not null)",
        )
        .await?;
        if let Some(effects) = effects {
            effects.distribute(&options).await?;
        }
        if let Subject::Mutant(mutant) = stage.subject {
            mutant.prepare(&mut conn, name).await?;
        }
        drop(conn);
        let world = Arc::new(Self {
            options,
            observer,
            history: Arc::new(History::new()),
            subject: stage.subject,
            seed: stage.seed,
            until: Instant::now() + stage.time,
            patience: stage.patience,
            least,
            least_calls: stage.calls.max(LEAST_CALLS),
            missing: OnceLock::new(),
            faults: Mutex::default(),
            asked: AtomicU64::new(0),
            turns: None,
            prefix: "k",
            outside: None,
            distributed: effects.is_some(),
        });
        stage.show(&world);
        Ok(world)
    }

    /// The same on another server, which is said to hold the same.
    pub(crate) fn moved(&self, options: PgConnectOptions) -> Arc<Self> {
        Arc::new(Self { observer: pool(&options, 4), options, ..self.copy() })
    }

    /// Another world in the same database, with its own keys, calls and faults, and with this outside for its steps.
    pub(crate) fn beside(&self, least: Least, outside: Option<PgPool>) -> Arc<Self> {
        Arc::new(Self {
            history: Arc::new(History::new()),
            least,
            least_calls: LEAST_CALLS_BESIDE,
            faults: Mutex::default(),
            prefix: BESIDE,
            outside,
            ..self.copy()
        })
    }

    fn copy(&self) -> Self {
        Self {
            options: self.options.clone(),
            observer: self.observer.clone(),
            history: self.history.clone(),
            subject: self.subject,
            seed: self.seed,
            until: self.until,
            patience: self.patience,
            least: self.least,
            least_calls: self.least_calls,
            missing: self.missing.clone(),
            faults: Mutex::new(self.faults().into_iter().collect()),
            asked: AtomicU64::new(0),
            turns: self.turns,
            prefix: self.prefix,
            outside: self.outside.clone(),
            distributed: self.distributed,
        }
    }

    pub(crate) fn is_distributed(&self) -> bool {
        self.distributed
    }

    /// Reaches the outside of the steps. It is in the database that `pool` reaches, unless there is another.
    pub(crate) fn outside_or<'a>(&'a self, pool: &'a PgPool) -> &'a PgPool {
        self.outside.as_ref().unwrap_or(pool)
    }

    /// Whether a key is of this world, and not of another one in the same database.
    pub(crate) fn has(&self, key: &str) -> bool {
        key.starts_with(BESIDE) == (self.prefix == BESIDE)
    }

    /// When the time is up and what must happen has happened: on a busy machine that takes longer. It does not take for
    /// ever; what is missing then is a violation.
    pub(crate) fn is_over(&self) -> bool {
        let now = Instant::now();
        if now < self.until {
            return false;
        }
        let missing = self.missing();
        if now < self.until + self.patience {
            return missing.is_empty();
        }
        let _ = self.missing.set(missing);
        true
    }

    /// Waits until it is over, but for this long before.
    pub(crate) async fn nearly_over(&self, before: Duration) {
        sleep(self.until.saturating_duration_since(Instant::now() + before)).await;
        while !self.missing().is_empty() && !self.is_over() {
            sleep(PAUSE).await;
        }
    }

    fn missing(&self) -> Vec<String> {
        let faults: BTreeMap<_, _> = self.faults().into_iter().collect();
        let calls = u64::try_from(self.history.len() / 2).unwrap_or(u64::MAX);
        let wanted =
            self.least.iter().map(|(kind, least)| (*kind, faults.get(kind).copied().unwrap_or_default(), *least));
        wanted
            .chain([("calls", calls, self.least_calls)])
            .filter(|(_, had, least)| had < least)
            .map(|(kind, had, least)| format!("{kind}: {had} of at least {least}"))
            .collect()
    }

    /// What must have happened and has not. Where nobody had the patience, nothing is asked for.
    pub(crate) fn shortfall(&self) -> Option<String> {
        let missing = self.missing.get().filter(|missing| !missing.is_empty() && !self.patience.is_zero())?;
        Some(format!("too little happened within {:?} more than its time: {}", self.patience, missing.join(", ")))
    }

    pub(crate) fn random(&self, chooser: &str) -> Random {
        Random::new(self.seed, chooser)
    }

    pub(crate) fn fault(&self, kind: &'static str) {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner).entry(kind).or_default() += 1;
    }

    pub(crate) fn faults(&self) -> Vec<(&'static str, u64)> {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.iter().map(|(kind, count)| (*kind, *count)).collect()
    }

    /// One of the keys of the moment, which others ask for too.
    pub(crate) fn choose_key(&self, random: &mut Random) -> String {
        let (newest, window) = match self.turns {
            Some(Turns { since, every, window }) => {
                (now().saturating_sub(since) / u64::try_from(every.as_nanos()).unwrap_or(u64::MAX), window)
            }
            None => (self.asked.fetch_add(1, Ordering::Relaxed) / REPEATS, WINDOW),
        };
        format!("{}{}", self.prefix, newest.saturating_sub(random.below(window)))
    }

    pub(crate) fn request(&self, key: &str, call: &str) -> Request {
        Request { distributed: self.distributed, ..Request::new(key, call) }
    }

    /// A call with its lines in the history.
    pub(crate) async fn call(&self, pool: &PgPool, request: &Request) -> What {
        self.history.add(&request.call, &request.key, What::Invoked);
        let what = timeout(CALL_LIMIT, self.subject.call(pool, request))
            .await
            .unwrap_or_else(|_| What::Unknown("dropped after its time-out".to_owned()));
        self.history.add(&request.call, &request.key, what.clone());
        what
    }

    /// A client that asks until the time is up. `choose` makes the request what the scenario wants.
    pub(crate) async fn client(
        self: Arc<Self>,
        pool: PgPool,
        name: String,
        choose: impl Fn(&mut Random, &mut Request) + Send,
    ) {
        let mut random = self.random(&name);
        let mut number = 0;
        while !self.is_over() {
            number += 1;
            let mut request = self.request(&self.choose_key(&mut random), &format!("{name}/{number}"));
            request.fails = random.one_in(16);
            choose(&mut random, &mut request);
            if !matches!(self.call(&pool, &request).await, What::Performed(_) | What::Replayed(_)) {
                sleep(PAUSE).await;
            }
        }
    }

    /// So many clients, each in a task.
    pub(crate) fn crowd(
        self: &Arc<Self>,
        pool: &PgPool,
        clients: u64,
        choose: impl Fn(&mut Random, &mut Request) + Clone + Send + 'static,
    ) -> Vec<JoinHandle<()>> {
        let client = |client| tokio::spawn(self.clone().client(pool.clone(), format!("c{client}"), choose.clone()));
        (0..clients).map(client).collect()
    }
}

pub(crate) fn pool(options: &PgConnectOptions, size: u32) -> PgPool {
    pool_that_waits(options, size, Duration::from_secs(10))
}

/// While the server is away, sqlx's pool asks again in longer and longer pauses, up to a fifth of `wait`.
pub(crate) fn pool_that_waits(options: &PgConnectOptions, size: u32, wait: Duration) -> PgPool {
    PgPoolOptions::new().max_connections(size).acquire_timeout(wait).connect_lazy_with(options.clone())
}
