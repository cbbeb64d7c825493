//! Owners that are killed and suspended between the request to a gateway and the stored answer, and reconcilers that
//! are killed between a probe and its settlement. The gateway delivers late, and an operator decides at the same time.

use std::time::Duration;

use sqlx::Executor as _;
use tokio::time::sleep;

use crate::callers::Leased;
use crate::callers::in_doubt::{GATEWAY, OPERATOR, operator};
use crate::checker::leases::Promise;
use crate::finding::Finding;
use crate::stage::Stage;
use crate::worker::Crew;
use crate::world::{Least, World};

const WORKERS: usize = 4;

const OWNER: &str = "owner killed between request and answer";
const RECONCILER: &str = "reconciler killed between probe and settlement";
const SUSPENDED: &str = "worker suspended";

const LEAST: Least = &[(OWNER, 5), (RECONCILER, 3), (SUSPENDED, 3), (OPERATOR, 2)];

/// The worker of a request that was not answered yet.
const REQUESTED: &str = "
    select split_part(sent.call, '.', 1), sent.token
    from sent join idempotency.record as record on record.value = sent.key and record.token = sent.token
    where completed_at is null and lease_until > statement_timestamp() order by random() limit 1";
const UNANSWERED: &str =
    "select count(*) from idempotency.record where token = $1::int8 and completed_at is null and $2::text is not null";
const PROBED: &str = "select worker, 0::int8 from probed order by random() limit 1";
const UNSETTLED: &str = "select count(*) from probed where $1::int8 = 0 and worker = $2::text";

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, LEAST).await?;
    world.observer.execute(GATEWAY).await?;
    let leased = Leased { promise: Promise::Reconciled, lease: Duration::from_millis(500), work: 60 };
    let mut random = world.random("killer");
    let mut crew = Crew::start(&world, &world.options, WORKERS, Some(leased))?;
    let operator = tokio::spawn(operator(world.clone()));
    while !world.is_over() {
        sleep(random.millis(20..120)).await;
        crew.must_be_alive()?;
        let (fault, victim, remains) = match random.below(4) {
            0 => {
                let longest = random.millis(100..900);
                crew.suspend(random.below(crew.len()), sleep(longest)).await?;
                world.fault(SUSPENDED);
                continue;
            }
            1 => (OWNER, REQUESTED, UNANSWERED),
            _ => (RECONCILER, PROBED, UNSETTLED),
        };
        let Some((name, token)) = sqlx::query_as::<_, (String, i64)>(victim).fetch_optional(&world.observer).await?
        else {
            continue;
        };
        let Some(index) = crew.position(&name) else { continue };
        crew.kill(index).await?;
        let remains: i64 = sqlx::query_scalar(remains).bind(token).bind(&name).fetch_one(&world.observer).await?;
        if remains > 0 {
            world.fault(fault);
        }
        sqlx::query("delete from probed where worker = $1::text").bind(&name).execute(&world.observer).await?;
    }
    operator.await?;
    crew.finding().await
}
