//! One scenario's database, and all that is known of what happens in it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Executor as _, PgPool};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

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

pub(crate) struct World {
    /// Straight to the database, past all that is put in the way of the callers.
    pub(crate) options: PgConnectOptions,
    /// For the suite itself.
    pub(crate) observer: PgPool,
    pub(crate) history: Arc<History>,
    pub(crate) subject: Subject,
    pub(crate) seed: u64,
    pub(crate) until: Instant,
    pub(crate) faults: Mutex<BTreeMap<&'static str, u64>>,
    asked: AtomicU64,
    turns: Option<Turns>,
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
            faults: Mutex::default(),
            asked: AtomicU64::new(0),
            turns: Some(turns),
        })
    }

    pub(crate) async fn create(stage: &Stage, name: &str) -> anyhow::Result<Arc<Self>> {
        Self::on(stage.cluster.create_database(name).await?, stage, name).await
    }

    /// In a database that is there already.
    pub(crate) async fn on(options: PgConnectOptions, stage: &Stage, name: &str) -> anyhow::Result<Arc<Self>> {
        let observer = pool(&options, 4);
        let mut conn = observer.acquire().await?;
        pg_idempotency::migrate(&mut conn).await?;
        conn.execute(include_str!("../../migrations/strict.sql")).await?;
        conn.execute(
            "create table effect (key text not null, call text not null, downstream_key text, token bigint);
            create table written (call text not null);
            create table leaked (note text not null)",
        )
        .await?;
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
            faults: Mutex::default(),
            asked: AtomicU64::new(0),
            turns: None,
        });
        stage.show(&world);
        Ok(world)
    }

    /// The same on another server, which is said to hold the same.
    pub(crate) fn moved(&self, options: PgConnectOptions) -> Arc<Self> {
        Arc::new(Self {
            observer: pool(&options, 4),
            options,
            history: self.history.clone(),
            subject: self.subject,
            seed: self.seed,
            until: self.until,
            faults: Mutex::new(self.faults().into_iter().collect()),
            asked: AtomicU64::new(0),
            turns: self.turns,
        })
    }

    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= self.until
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
        format!("k{}", newest.saturating_sub(random.below(window)))
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
            let mut request = Request::new(&self.choose_key(&mut random), &format!("{name}/{number}"));
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
