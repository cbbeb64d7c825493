//! A worker of graphile_worker. The queue runs a job again if its worker has died, and each job pays once.

use std::time::Duration;

use graphile_worker::{IntoTaskHandlerResult, TaskHandler, WorkerContext, WorkerOptions};
use pg_idempotency::{Idempotency, Key, Outcome};
use sqlx::postgres::PgPoolOptions;

#[derive(serde::Deserialize, serde::Serialize)]
struct Pay {
    cents: i64,
}

impl Pay {
    async fn perform(&self, ctx: &WorkerContext) -> anyhow::Result<Outcome<()>> {
        // All attempts of a job have the same id.
        let job = *ctx.job().id();
        let key = Key::new("payments", Self::IDENTIFIER, job.to_string())?;
        // The 25 attempts of the queue take about three days.
        let idempotency = Idempotency::new().retention(Duration::from_secs(7 * 24 * 3600));
        let insert = "insert into payment (job, cents) values ($1, $2)";
        let work = async |conn: &mut sqlx::PgConnection| -> anyhow::Result<()> {
            sqlx::query(insert).bind(job).bind(self.cents).execute(conn).await?;
            Ok(())
        };
        idempotency.run(ctx.pg_pool(), &key, self, work).await
    }
}

impl TaskHandler for Pay {
    const IDENTIFIER: &'static str = "pay";

    async fn run(self, ctx: WorkerContext) -> impl IntoTaskHandlerResult {
        self.perform(&ctx).await.map(|_paid_now_or_before| ())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPoolOptions::new().connect(&std::env::var("DATABASE_URL")?).await?;
    pg_idempotency::migrate(&pool).await?;
    let worker = WorkerOptions::default().concurrency(4).define_job::<Pay>().pg_pool(pool).init().await?;
    // `run_once` returns when the queue is empty. `run` would wait for further jobs.
    worker.run_once().await?;
    Ok(())
}
