//! Operations in steps beside the other calls of a scenario: callers, a resumer and an operator, in the same database and
//! under the same fault. Scenarios with worker processes have them in those.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::lease::{self, Leased};
use crate::lease_checker::Promise;
use crate::stage::{Finding, Stage};
use crate::stepped::create_tables;
use crate::world::{World, pool, pool_that_waits};

pub(crate) const CALLERS: usize = 3;
/// The steps of a call run side by side at times.
const CONNECTIONS: u32 = 12;
/// Short, for the callers to be back soon after a crash of the server.
const WAIT: Duration = Duration::from_millis(250);
pub(crate) const LEASED: Leased = Leased { promise: Promise::InSteps, lease: Duration::from_millis(400), work: 60 };

/// Longer than any scenario.
const UNTIL_STOPPED: Duration = Duration::from_secs(24 * 60 * 60);

pub(crate) struct InSteps {
    pub(crate) world: Arc<World>,
    leased: Leased,
    pool: PgPool,
    crowd: Vec<JoinHandle<()>>,
}

impl InSteps {
    /// In the database of this world, and with the outside in it.
    pub(crate) async fn beside(world: &World) -> anyhow::Result<Self> {
        Self::start(world.beside(&[], None), CALLERS, LEASED).await
    }

    /// In a world of their own.
    pub(crate) async fn start(world: Arc<World>, callers: usize, leased: Leased) -> anyhow::Result<Self> {
        create_tables(&world).await?;
        let pool = pool_that_waits(&world.options, CONNECTIONS, WAIT);
        let crowd = lease::crowd(&world, &pool, "steps", callers, leased);
        Ok(Self { world, leased, pool, crowd })
    }

    /// On servers that lose nothing that was acknowledged. `world` is there, and the outside on the stage's own server.
    pub(crate) async fn on(
        stage: &Stage,
        world: impl AsyncFnOnce(&Stage) -> anyhow::Result<Arc<World>>,
    ) -> anyhow::Result<Self> {
        let outside = pool(&stage.cluster.create_database("outside").await?, CONNECTIONS);
        let world = world(&stage.part(&stage.cluster, UNTIL_STOPPED)).await?;
        Self::start(world.beside(&[], Some(outside)), 1, LEASED).await
    }

    /// Waits for them, or ends them where nobody knows before how long the faults take, and checks.
    pub(crate) async fn finding(self) -> anyhow::Result<Finding> {
        if Instant::now() < self.world.until {
            self.crowd.iter().for_each(JoinHandle::abort);
        }
        for task in join_all(self.crowd).await {
            if task.as_ref().is_err_and(|error| !error.is_cancelled()) {
                task?;
            }
        }
        self.pool.close().await;
        let mut finding = Finding::of_leases(&self.world, self.leased).await?;
        finding.violations.iter_mut().for_each(|said| said.insert_str(0, "in steps, "));
        Ok(finding)
    }
}
