//! Workers of `src/guide/engines/worker.rs` die after the effects of their jobs and before the queue hears of them.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use graphile_worker::{JobSpec, WorkerUtils};
use sqlx::{ConnectOptions as _, PgPool};

const JOBS: i64 = 100;
/// The worker's concurrency.
const SIDE_BY_SIDE: i64 = 4;
const KILLS: i64 = 5;
/// A test that hangs fails after this time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Killed with SIGKILL when the test ends, too.
struct Worker(Child);

impl Worker {
    fn start(pool: &PgPool) -> anyhow::Result<Self> {
        let url = pool.connect_options().to_url_lossy();
        let child = Command::new(env!("CARGO_BIN_EXE_job-queue")).env("DATABASE_URL", url.as_str()).spawn();
        Ok(Self(child.context("the worker does not start")?))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn until(pool: &PgPool, question: &'static str, number: i64) -> anyhow::Result<()> {
    let started = Instant::now();
    while sqlx::query_scalar::<_, i64>(question).fetch_one(pool).await? != number {
        assert!(started.elapsed() < PATIENCE, "never {number}: {question}");
    }
    Ok(())
}

#[sqlx::test]
async fn each_job_pays_once_though_five_workers_are_killed(pool: PgPool) -> anyhow::Result<()> {
    pg_idempotency::migrate(&pool).await?;
    sqlx::query("create table payment (job bigint not null, cents bigint not null)").execute(&pool).await?;
    pg_idempotency::protect(&pool, "payment", pg_idempotency::OnEscape::Refuse).await?;
    let queue = WorkerUtils::new(pool.clone(), "graphile_worker");
    queue.migrate().await?;
    for cents in 1..=JOBS {
        queue.add_raw_job("pay", serde_json::json!({ "cents": cents }), JobSpec::default()).await?;
    }
    let left = "select count(*) from graphile_worker._private_jobs";
    for kill in 1..=KILLS {
        let mut no_payments = pool.begin().await?;
        sqlx::query("lock table payment in share mode").execute(&mut *no_payments).await?;
        let worker = Worker::start(&pool)?;
        // The jobs of the worker before are done again, and replayed. The next ones wait for the table.
        let waiting = "select count(*) from pg_locks where relation = 'payment'::regclass::oid and not granted";
        until(&pool, waiting, SIDE_BY_SIDE).await?;
        until(&pool, left, JOBS - SIDE_BY_SIDE * (kill - 1)).await?;
        let mut no_completion = pool.begin().await?;
        sqlx::query("lock table graphile_worker._private_jobs in exclusive mode").execute(&mut *no_completion).await?;
        no_payments.commit().await?;
        // The jobs have paid, and the worker deletes them from the queue.
        let completing = "select least(count(*), 4) from pg_locks
            where relation = 'graphile_worker._private_jobs'::regclass::oid and not granted";
        until(&pool, completing, SIDE_BY_SIDE).await?;
        drop(worker);
        // A backend does not notice that its client is dead, and would delete the job.
        let end = "select count(pg_terminate_backend(pid)) from pg_stat_activity
            where datname = current_database() and wait_event_type = 'Lock'";
        until(&pool, end, 0).await?;
        no_completion.rollback().await?;
        let owners = "select locked_by from graphile_worker._private_jobs where locked_by is not null";
        let owners: Vec<String> = sqlx::query_scalar(owners).fetch_all(&pool).await?;
        let paid: i64 = sqlx::query_scalar("select count(*) from payment").fetch_one(&pool).await?;
        assert_eq!((paid, owners.len()), (SIDE_BY_SIDE * kill, 4), "the queue does not know that these jobs have paid");
        queue.force_unlock_workers(&owners.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    }
    let ended = Worker::start(&pool)?.0.wait()?;
    assert!(ended.success(), "{ended}");
    until(&pool, left, 0).await?;
    let paid = "select count(*), count(distinct job), sum(cents)::bigint from payment";
    let paid: (i64, i64, i64) = sqlx::query_as(paid).fetch_one(&pool).await?;
    assert_eq!(paid, (JOBS, JOBS, (1..=JOBS).sum()));
    Ok(())
}
