//! One delivery that its sender gives up waiting for, and makes again while the first is still being processed.
//!
//! Here a mark that is taken for a duplicate too early loses an event: the sender hears 200 and is content, and then
//! the transaction that has marked it rolls back.

use std::time::Duration;

use anyhow::bail;
use sqlx::PgPool;
use tokio::time::sleep;

use crate::plan::Plan;
use crate::sender::Sender;
use crate::tally::Tally;

/// How often to look whether the receiver is in the middle.
const GATE_PACE: Duration = Duration::from_millis(5);

pub(crate) async fn hang_up(sender: &Sender, pool: &PgPool, plan: &Plan) -> anyhow::Result<Tally> {
    let event = plan.hung_up_event();
    let mut gate = pool.begin().await?;
    sqlx::query("lock table account in share mode").execute(&mut *gate).await?;
    // As soon as it waits at the gate, the delivery is dropped, and its connection closed.
    tokio::select! {
        _ = sender.deliver_event(&event) => bail!("an event was answered for that could not be processed"),
        waits = in_the_middle(pool) => waits?,
    }

    // Whether or not the receiver has noticed that: its statement runs on, and its transaction holds the mark.
    let mut tally = Tally::default();
    let mut answer = sender.deliver_event(&event).await?;
    tally.count(&answer);
    gate.rollback().await?;

    while let Some(after) = answer.again_after() {
        sleep(after).await;
        answer = sender.deliver_event(&event).await?;
        tally.count(&answer);
    }
    Ok(tally)
}

/// Returns when the receiver waits for the gate: marked, and not processed.
async fn in_the_middle(pool: &PgPool) -> sqlx::Result<()> {
    let sql = "
        select exists (
            select
            from pg_stat_activity
            where application_name = current_setting('application_name') and wait_event_type = 'Lock'
        )
    ";
    while !sqlx::query_scalar::<_, bool>(sql).fetch_one(pool).await? {
        sleep(GATE_PACE).await;
    }
    Ok(())
}
