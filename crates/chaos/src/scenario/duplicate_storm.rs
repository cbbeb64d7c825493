//! Many callers of one key share a pool that is far too small for them, and another user leaves open transactions in it.
//! Only here does a call meet a connection with a transaction of another caller, under load.

use sqlx::Executor as _;
use tokio::time::sleep;

use crate::callers::{Callers, Way};
use crate::finding::Finding;
use crate::request::SAFE_TO_DROP;
use crate::stage::Stage;
use crate::world::{Least, Next, Setup, Window, World, pool};

const CLIENTS: usize = 24;
const CONNECTIONS: u32 = 6;
/// One key for all callers, until each has its answer about once.
const WINDOW: Window = Window { keys: 1, next: Next::Answers(CLIENTS as u64) };

const LEAST: Least = &[("transaction leaked", 5)];

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let setup = Setup { least: LEAST, window: WINDOW, ..Setup::default() };
    let world = World::on(stage.cluster.create_database(stage.name).await?, stage, setup).await?;
    let pool = pool(&world.options, CONNECTIONS);
    let way = Way::Transaction(|random, request| {
        request.enter(random, SAFE_TO_DROP);
        request.reject = random.one_in(4);
    });
    let mut callers = Callers::start(&world, way, pool.clone(), "c", CLIENTS);
    let leaking = world.clone();
    callers.spawn(async move {
        let mut random = leaking.random("leaker");
        while !leaking.is_over() {
            sleep(random.millis(20..100)).await;
            if let Ok(mut conn) = pool.acquire().await
                && conn.execute(sqlx::raw_sql("begin; insert into leaked values ('leaked')")).await.is_ok()
            {
                leaking.fault("transaction leaked");
            }
        }
    });
    let mut finding = callers.finding().await?;
    let leaked: i64 = sqlx::query_scalar("select count(*) from leaked").fetch_one(&world.observer).await?;
    if leaked > 0 {
        finding.violations.push(format!("{leaked} transactions of another caller were committed"));
    }
    Ok(finding)
}
