//! The servers of a run, and how much is measured.

use std::time::Duration;

use rig::proxy::Proxy;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool};

use crate::alternatives::by_hand::ByHand;
use crate::arguments::Arguments;
use crate::redis;
use crate::setting::Setting;

pub(crate) struct Bench {
    pub(crate) scale: Scale,
    pub(crate) by_hand: ByHand,
    /// `None` if this machine has no Redis.
    pub(crate) redis: Option<redis::Server>,
    settings: Vec<Setting>,
}

#[derive(Clone, Copy)]
pub(crate) struct Scale {
    /// Whether a rate counts calls per second of processor time, and not per second.
    pub(crate) by_processor: bool,
    /// An odd number, for a median; one more warms connections and statements.
    pub(crate) rounds: usize,
    pub(crate) slice: Duration,
    /// Calls whose WAL and bytes are counted: enough for a table of some hundred pages.
    pub(crate) counted: usize,
    /// The records in the tables of the case about growth.
    pub(crate) sizes: &'static [u64],
    pub(crate) expired: u64,
    pub(crate) soak_minutes: usize,
}

/// A whole run takes about twenty minutes.
const WHOLE: Scale = Scale {
    by_processor: false,
    // Many short rounds: a disturbance of a second spoils a few rounds of all alternatives, and not the median.
    rounds: 15,
    slice: Duration::from_millis(250),
    counted: 3_000,
    sizes: &[10_000, 1_000_000, 10_000_000],
    expired: 1_000_000,
    soak_minutes: 0,
};

/// A quick run takes at most a minute and a half, and only shows that all cases work.
const QUICK: Scale = Scale {
    by_processor: false,
    rounds: 1,
    slice: Duration::from_millis(50),
    counted: 100,
    sizes: &[1_000, 10_000, 20_000],
    expired: 50_000,
    soak_minutes: 0,
};

/// A slice is long in comparison with a tick of the processor's clock, which is a hundredth of a second.
const GUARD: Scale = Scale { by_processor: true, rounds: 5, slice: Duration::from_millis(400), ..QUICK };

impl Bench {
    pub(crate) async fn start(arguments: &Arguments) -> anyhow::Result<Self> {
        let server: PgConnectOptions = std::env::var("DATABASE_URL")?.parse()?;
        let redis = redis::Server::start()?;
        let address = redis.as_ref().map(redis::Server::address);
        let mut settings: Vec<_> =
            [true, false].map(|synchronous| Setting::local(&server, address.as_ref(), synchronous)).into();
        if let Some(rtt) = arguments.rtt {
            settings.push(settings[0].clone().far(rtt)?);
        }
        prepare(&settings[1].lazy_pool(None)).await?;
        let by_hand = ByHand::capture(&settings[1]).await?;
        let scale = match arguments {
            Arguments { guard: true, .. } | Arguments { keep: true, .. } => GUARD,
            Arguments { quick: true, .. } => QUICK,
            _ => WHOLE,
        };
        let scale = Scale { soak_minutes: arguments.soak.unwrap_or_default(), ..scale };
        Ok(Self { scale, by_hand, redis, settings })
    }

    /// On the Unix socket with and without commits that wait for the disk, and over a slow network.
    pub(crate) fn settings(&self) -> &[Setting] {
        &self.settings
    }

    /// On the Unix socket, with commits that wait for the disk.
    pub(crate) fn socket(&self) -> &Setting {
        &self.settings[0]
    }

    /// On the socket, with commits that do not wait: for preparations, and for costs that do not depend on the setting.
    pub(crate) fn plain(&self) -> &Setting {
        &self.settings[1]
    }

    /// As [`Bench::plain`], through a proxy that counts round trips.
    pub(crate) async fn counted(&self) -> anyhow::Result<(Setting, Proxy)> {
        self.plain().clone().counted().await
    }

    pub(crate) async fn create_database(&self, name: &str) -> anyhow::Result<PgConnection> {
        self.plain().connect(None).await?.execute(AssertSqlSafe(format!("create database {name}"))).await?;
        prepare(&self.plain().lazy_pool(Some(name))).await?;
        Ok(self.plain().connect(Some(name)).await?)
    }

    pub(crate) async fn drop_database(&self, name: &str) -> anyhow::Result<()> {
        self.plain().connect(None).await?.execute(AssertSqlSafe(format!("drop database {name} with (force)"))).await?;
        Ok(())
    }

    /// Empties all tables, so that no case inherits the rows of another one.
    pub(crate) async fn clear(&self) -> anyhow::Result<()> {
        let mut conn = self.plain().connect(None).await?;
        conn.execute("truncate idempotency.record, usual_key, handler_key, effect").await?;
        conn.execute("checkpoint").await?;
        Ok(())
    }
}

async fn prepare(pool: &PgPool) -> anyhow::Result<()> {
    pg_idempotency::migrate(pool).await?;
    pool.execute("create table effect (id bigint generated always as identity, note text not null)").await?;
    pool.execute(crate::alternatives::usual::TABLE).await?;
    pool.execute(crate::alternatives::handler::TABLE).await?;
    pool.close().await;
    Ok(())
}
