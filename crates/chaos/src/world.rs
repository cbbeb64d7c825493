//! The database of one group of callers, their history, and the faults that have hit them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pg_idempotency::{Key, OnEscape};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Executor as _, PgPool};
use tokio::time::Instant;

use crate::checker::{Aftermath, Effect, Stored, register};
use crate::finding::Finding;
use crate::history::{History, Moment, What, longest_outage, now};
use crate::mutant::Mutant;
use crate::random::Random;
use crate::stage::Stage;

/// The tables that the calls write, besides the crate's own.
const TABLES: &str = include_str!("tables.sql");
const OVERTAKEN: &str = include_str!("overtaken.sql");

/// The pause before a caller asks again.
pub(crate) const PAUSE: Duration = Duration::from_millis(3);
/// The keys with a violation whose histories are kept.
const KEPT_HISTORIES: usize = 20;

/// The faults that a scenario must have injected before it ends, and how many of each.
pub(crate) type Least = &'static [(&'static str, u64)];

/// The minimum number of calls. An operation in steps takes as long as many calls.
const LEAST_CALLS: u64 = 100;
const LEAST_CALLS_IN_STEPS: u64 = 40;

/// The prefixes of the keys of worlds that share a database or an outside. None begins with another one.
pub(crate) const KEYS: &str = "k";
pub(crate) const KEYS_IN_STEPS: &str = "steps-";

/// The route of the handler, which is the operation of a layer that has no function for it.
pub(crate) const ROUTE: &str = "POST /";

/// Which keys are asked for at the same time.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Window {
    /// The number of keys.
    pub(crate) keys: u64,
    pub(crate) next: Next,
}

/// When a new key replaces the oldest one in the window.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Next {
    /// After so many answers. So while the server is away, the callers ask for the same keys until they are answered.
    Answers(u64),
    /// By the clock, where processes share the keys.
    Every { since: Moment, time: Duration },
}

impl Default for Window {
    fn default() -> Self {
        Self { keys: 6, next: Next::Answers(4) }
    }
}

/// How a world differs from the usual one.
#[derive(Default)]
pub(crate) struct Setup {
    pub(crate) least: Least,
    /// The prefix of the keys, if it is not the usual one.
    pub(crate) prefix: Option<&'static str>,
    /// Another database for the effects of leases and of steps outside.
    pub(crate) outside: Option<PgPool>,
    /// The service that makes the calls, if its database has another one. Its tables are in the schema of its name.
    pub(crate) service: Option<String>,
}

pub(crate) struct World {
    /// The way to the database without the obstacles of the callers.
    pub(crate) options: PgConnectOptions,
    /// Connections of the suite itself.
    pub(crate) observer: PgPool,
    pub(crate) history: History,
    pub(crate) mutant: Option<Mutant>,
    pub(crate) seed: u64,
    until: Instant,
    /// How much longer it may take to reach the minimum numbers.
    patience: Duration,
    least: Least,
    least_calls: u64,
    /// What was missing at the end of the patience.
    missing: OnceLock<Vec<String>>,
    faults: Mutex<BTreeMap<&'static str, u64>>,
    answers: AtomicU64,
    window: Window,
    pub(crate) prefix: String,
    outside: Option<PgPool>,
    pub(crate) service: Option<String>,
    /// The operation of all keys.
    pub(crate) operation: String,
}

impl World {
    pub(crate) async fn create(stage: &Stage, least: Least) -> anyhow::Result<Arc<Self>> {
        Self::on(stage.cluster.create_database(stage.name).await?, stage, Setup { least, ..Setup::default() }).await
    }

    /// Prepares a database that exists already.
    pub(crate) async fn on(options: PgConnectOptions, stage: &Stage, setup: Setup) -> anyhow::Result<Arc<Self>> {
        let observer = pool(&options, 4);
        let mut conn = observer.acquire().await?;
        pg_idempotency::migrate_any_language(&observer).await?;
        conn.execute(rig::strict::SQL).await?;
        create_tables(&observer, stage.mutant).await?;
        if let Some(mutant) = stage.mutant {
            mutant.prepare(&mut conn).await?;
        }
        drop(conn);
        let world = Self::of(options, observer, stage.mutant, stage.seed, setup);
        Ok(Arc::new(Self {
            until: Instant::now() + stage.time,
            patience: stage.patience,
            least_calls: LEAST_CALLS,
            ..world
        }))
    }

    /// The world as a worker process sees it, which runs until it is killed.
    pub(crate) fn of_worker(
        options: PgConnectOptions,
        mutant: Option<Mutant>,
        seed: u64,
        window: Window,
        prefix: String,
        service: Option<String>,
    ) -> Arc<Self> {
        let options = in_schema_of(service.as_deref(), options);
        let setup = Setup { service, ..Setup::default() };
        let world = Self::of(options.clone(), pool(&options, 1), mutant, seed, setup);
        Arc::new(Self { history: History::printed(), window, prefix, ..world })
    }

    /// Another world in the same database, with its own calls and faults. Its keys are those of operations in steps.
    pub(crate) fn beside(&self, least: Least, outside: Option<PgPool>) -> Arc<Self> {
        let setup = Setup { least, prefix: Some(KEYS_IN_STEPS), outside, service: None };
        let world = Self::of(self.options.clone(), self.observer.clone(), self.mutant, self.seed, setup);
        Arc::new(Self { until: self.until, patience: self.patience, least_calls: LEAST_CALLS_IN_STEPS, ..world })
    }

    /// The world of a service that shares this database with other services.
    pub(crate) async fn of_service(&self, name: &str, least: Least) -> anyhow::Result<Arc<Self>> {
        let options = in_schema_of(Some(name), self.options.clone());
        let observer = pool(&options, 4);
        observer.execute(AssertSqlSafe(format!("create schema {name}"))).await?;
        create_tables(&observer, self.mutant).await?;
        let setup = Setup { least, service: Some(name.to_owned()), ..Setup::default() };
        let world = Self::of(options, observer, self.mutant, self.seed, setup);
        Ok(Arc::new(Self { until: self.until, patience: self.patience, least_calls: LEAST_CALLS_IN_STEPS, ..world }))
    }

    fn of(options: PgConnectOptions, observer: PgPool, mutant: Option<Mutant>, seed: u64, setup: Setup) -> Self {
        Self {
            options,
            observer,
            history: History::default(),
            mutant,
            seed,
            until: Instant::now() + Duration::from_secs(24 * 60 * 60),
            patience: Duration::ZERO,
            least: setup.least,
            least_calls: 0,
            missing: OnceLock::new(),
            faults: Mutex::default(),
            answers: AtomicU64::new(0),
            window: Window::default(),
            prefix: setup.prefix.unwrap_or(KEYS).to_owned(),
            outside: setup.outside,
            operation: match &setup.service {
                None => "chaos".to_owned(),
                Some(_) if mutant == Some(Mutant::OneOperation) => ROUTE.to_owned(),
                Some(name) => format!("{name} {ROUTE}"),
            },
            service: setup.service,
        }
    }

    pub(crate) fn key(&self, value: &str) -> Key {
        Key::new(value, &*self.operation, value).expect("a valid key")
    }

    /// Reaches the outside: the database that `pool` reaches, unless there is another one.
    pub(crate) fn outside_or<'a>(&'a self, pool: &'a PgPool) -> &'a PgPool {
        self.outside.as_ref().unwrap_or(pool)
    }

    /// Whether the time is over and the minimum numbers are reached. At the end of the patience the world is over too,
    /// and what is missing then is a violation.
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

    /// A violation if the minimum numbers were not reached. Without patience nothing is required.
    fn shortfall(&self) -> Option<String> {
        let missing = self.missing.get().filter(|missing| !missing.is_empty() && !self.patience.is_zero())?;
        Some(format!("too little happened within {:?} more than its time: {}", self.patience, missing.join(", ")))
    }

    pub(crate) fn random(&self, chooser: &str) -> Random {
        Random::new(self.seed, chooser)
    }

    pub(crate) fn fault(&self, kind: &'static str) {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner).entry(kind).or_default() += 1;
    }

    fn faults(&self) -> Vec<(&'static str, u64)> {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.iter().map(|(kind, count)| (*kind, *count)).collect()
    }

    /// One of the keys in the window, for which other callers ask too.
    pub(crate) fn choose_key(&self, random: &mut Random) -> String {
        let newest = match self.window.next {
            Next::Answers(each) => self.answers() / each,
            Next::Every { since, time } => {
                now().saturating_sub(since) / u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
            }
        };
        format!("{}{}", self.prefix, newest.saturating_sub(random.below(self.window.keys)))
    }

    pub(crate) fn invoked(&self, call: &str, key: &str) {
        self.history.add(call, key, What::Invoked);
    }

    pub(crate) fn ended(&self, call: &str, key: &str, what: What) {
        if what.is_answer() {
            self.answers.fetch_add(1, Ordering::Relaxed);
        }
        self.history.add(call, key, what);
    }

    pub(crate) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }

    /// The effects and the records of this world's keys.
    pub(crate) async fn aftermath(&self) -> anyhow::Result<Aftermath> {
        let mut effects: Vec<Effect> = sqlx::query_as("select key, call, downstream_key from effect")
            .fetch_all(self.outside_or(&self.observer))
            .await?;
        let mut records: Vec<Stored> = sqlx::query_as(
            "select value as key, token, completed_at is not null as completed,
                convert_from(response_body, 'utf8')::json #>> '{}'::text[] as response
            from idempotency.record where operation = $1::text",
        )
        .bind(&self.operation)
        .fetch_all(&self.observer)
        .await?;
        effects.retain(|effect| effect.key.starts_with(&self.prefix));
        records.retain(|record| record.key.starts_with(&self.prefix));
        Ok(Aftermath { effects, records })
    }

    pub(crate) fn finding(&self, mut violations: Vec<String>, register: register::Checked) -> Finding {
        violations.extend(register.violations);
        let calls = self.history.calls();
        let keys: BTreeSet<&str> =
            violations.iter().filter_map(|found| found.split_once(": ")).map(|(key, _)| key).collect();
        let histories = keys.into_iter().take(KEPT_HISTORIES).flat_map(|key| self.history.of(key)).collect();
        Finding {
            operations: calls.len(),
            faults: self.faults(),
            histories,
            violations: self.shortfall().into_iter().chain(violations).collect(),
            longest_outage: longest_outage(&calls),
            registers: register.histories,
            registers_left_out: register.left_out,
            ..Finding::default()
        }
    }
}

/// Connections to the tables of this service.
fn in_schema_of(service: Option<&str>, options: PgConnectOptions) -> PgConnectOptions {
    match service {
        Some(name) => options.options([("search_path", name)]),
        None => options,
    }
}

async fn create_tables(observer: &PgPool, mutant: Option<Mutant>) -> anyhow::Result<()> {
    let mut conn = observer.acquire().await?;
    conn.execute(TABLES).await?;
    conn.execute(OVERTAKEN).await?;
    // A mutant's own protocol leaves no mark, and has to reach its violation.
    if mutant.is_none() {
        for table in ["effect", "part"] {
            pg_idempotency::protect(observer, table, OnEscape::Refuse).await?;
        }
    }
    Ok(())
}

/// The tables of an outside in a database of its own, which the fault does not hit.
pub(crate) async fn outside(options: &PgConnectOptions) -> anyhow::Result<PgPool> {
    let outside = pool(options, 24);
    outside.execute(TABLES).await?;
    Ok(outside)
}

pub(crate) fn pool(options: &PgConnectOptions, size: u32) -> PgPool {
    pool_that_waits(options, size, Duration::from_secs(10))
}

/// While the server is away, sqlx's pool asks again in longer and longer pauses, up to a fifth of `wait`.
pub(crate) fn pool_that_waits(options: &PgConnectOptions, size: u32, wait: Duration) -> PgPool {
    PgPoolOptions::new().max_connections(size).acquire_timeout(wait).connect_lazy_with(options.clone())
}
