//! Operations in steps beside the other calls of a scenario: callers, a resumer and an operator, in the same database and
//! under the same fault. Scenarios with worker processes have them in those.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use sqlx::PgPool;
use tokio::task::JoinHandle;

use crate::lease::{self, Leased};
use crate::lease_checker::Promise;
use crate::stage::Finding;
use crate::stepped::create_tables;
use crate::world::{World, pool_that_waits};

pub(crate) const CALLERS: usize = 3;
/// The steps of a call run side by side at times.
const CONNECTIONS: u32 = 12;
/// Short, for the callers to be back soon after a crash of the server.
const WAIT: Duration = Duration::from_millis(250);
const LEASED: Leased = Leased { promise: Promise::InSteps, lease: Duration::from_millis(400), work: 60 };

pub(crate) struct InSteps {
    pub(crate) world: Arc<World>,
    pool: PgPool,
    crowd: Vec<JoinHandle<()>>,
}

impl InSteps {
    /// In the database of this world, and with the outside in it.
    pub(crate) async fn beside(world: &World) -> anyhow::Result<Self> {
        Self::start(world.beside(&[], None), CALLERS).await
    }

    /// In a world of their own.
    pub(crate) async fn start(world: Arc<World>, callers: usize) -> anyhow::Result<Self> {
        create_tables(&world).await?;
        let pool = pool_that_waits(&world.options, CONNECTIONS, WAIT);
        let crowd = lease::crowd(&world, &pool, "steps", callers, LEASED);
        Ok(Self { world, pool, crowd })
    }

    /// Waits for them, and checks.
    pub(crate) async fn finding(self) -> anyhow::Result<Finding> {
        for task in join_all(self.crowd).await {
            task?;
        }
        self.pool.close().await;
        let mut finding = Finding::of_leases(&self.world, LEASED).await?;
        finding.violations.iter_mut().for_each(|said| said.insert_str(0, "in steps, "));
        Ok(finding)
    }
}
