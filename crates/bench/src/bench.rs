//! The servers of a run, and how much is measured.

use std::path::PathBuf;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool};

use crate::alternatives::by_hand::ByHand;
use crate::arguments::Arguments;
use crate::proxy::Proxy;
use crate::redis;
use crate::setting::Setting;

pub(crate) struct Bench {
    pub(crate) scale: Scale,
    pub(crate) by_hand: ByHand,
    /// `None` where there is none on this machine.
    pub(crate) pgbench: Option<PathBuf>,
    pub(crate) redis: Option<redis::Server>,
    near: [Setting; 2],
    far: Option<Setting>,
    farther: Option<Setting>,
}

#[derive(Clone, Copy)]
pub(crate) struct Scale {
    /// An odd number, for a median; one more warms connections and statements.
    pub(crate) rounds: usize,
    pub(crate) slice: Duration,
    /// Calls whose WAL and bytes are counted: enough for a table of some hundred pages.
    pub(crate) counted: usize,
    pub(crate) stored: u64,
    pub(crate) sizes: &'static [u64],
    pub(crate) expired: u64,
}

/// About twenty minutes in all.
const WHOLE: Scale = Scale {
    rounds: 7,
    slice: Duration::from_millis(500),
    counted: 10_000,
    stored: 500_000,
    sizes: &[0, 10_000, 1_000_000, 10_000_000],
    expired: 2_000_000,
};

/// Whether all of it works, in three quarters of a minute.
const QUICK: Scale = Scale {
    rounds: 1,
    slice: Duration::from_millis(50),
    counted: 300,
    stored: 5_000,
    sizes: &[0, 10_000],
    expired: 50_000,
};

impl Bench {
    pub(crate) async fn start(arguments: &Arguments) -> anyhow::Result<Self> {
        let server: PgConnectOptions = std::env::var("DATABASE_URL")?.parse()?;
        let redis = redis::Server::start()?;
        let address = redis.as_ref().map(redis::Server::address);
        let near = [true, false].map(|synchronous| Setting::local(&server, address.as_ref(), synchronous));
        let distant = |rtt| near[0].clone().far(rtt);
        let far = arguments.rtt.map(distant).transpose()?;
        let farther = arguments.rtt.map(|rtt| distant(rtt * 5)).transpose()?;
        prepare(&near[1].lazy_pool(None)).await?;
        let by_hand = ByHand::capture(&near[1]).await?;
        let pgbench = std::env::var_os("PGBENCH").filter(|program| !program.is_empty()).map(PathBuf::from);
        let scale = if arguments.quick { QUICK } else { WHOLE };
        Ok(Self { scale, by_hand, pgbench, redis, near, far, farther })
    }

    /// On the Unix socket: commits that wait for the disk, and commits that do not.
    pub(crate) fn near(&self) -> &[Setting] {
        &self.near
    }

    /// Those, and the one over a slow network.
    pub(crate) fn settings(&self) -> impl Iterator<Item = &Setting> {
        self.near.iter().chain(&self.far)
    }

    /// A round trip of five times `--rtt`, which takes too long for most cases.
    pub(crate) fn farther(&self) -> Option<&Setting> {
        self.farther.as_ref()
    }

    /// For what does not depend on the setting.
    pub(crate) fn plain(&self) -> &Setting {
        &self.near[1]
    }

    pub(crate) fn counted(&self) -> anyhow::Result<(Setting, Proxy)> {
        self.plain().clone().heard()
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

    /// No case inherits another's rows.
    pub(crate) async fn clear(&self) -> anyhow::Result<()> {
        let mut conn = self.plain().connect(None).await?;
        conn.execute("truncate idempotency.record, usual_key, effect").await?;
        conn.execute("checkpoint").await?;
        Ok(())
    }
}

async fn prepare(pool: &PgPool) -> anyhow::Result<()> {
    pg_idempotency::migrate(pool).await?;
    pool.execute("create table effect (id bigint generated always as identity, note text not null)").await?;
    pool.execute(crate::alternatives::usual::TABLE).await?;
    pool.close().await;
    Ok(())
}
