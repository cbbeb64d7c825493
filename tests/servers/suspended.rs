//! A process that is suspended past its lease: SIGSTOP, the machine's own way to be late. The worker is this binary,
//! run again with a database to work on.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use pg_idempotency::lease::{Acquired, Leasing, Policy, ensure_leased};
use pg_idempotency::{Error, InFlight, Key};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions as _, PgPool};

const LEASE: Duration = Duration::from_millis(600);
const POLICY: Policy = Policy::AtLeastOnce { lease: LEASE };
const DATABASE: &str = "SUSPENDED_WORKER_DATABASE";
/// Long past anything that works.
const PATIENCE: Duration = Duration::from_secs(30);

fn key() -> Key {
    Key::new("tenant", "operation", "a").expect("a valid key")
}

/// The worker's side: nothing where it is not told a database. It says what it does, line by line.
#[tokio::test]
async fn worker() -> anyhow::Result<()> {
    let Ok(database) = std::env::var(DATABASE) else { return Ok(()) };
    let pool = PgPool::connect(&database).await?;
    let result = ensure_leased(&pool, &key(), "body", POLICY, async |_| {
        println!("\nworking");
        // Step after step, each with an await, until somebody else is done.
        let started = Instant::now();
        while started.elapsed() < PATIENCE {
            sqlx::query("insert into step select clock_timestamp() from pg_sleep(0.005)").execute(&pool).await?;
        }
        Ok::<_, Error>("the worker's".to_owned())
    })
    .await;
    println!("\n{}", if matches!(result, Err(Error::LeaseLost)) { "lost" } else { "not lost" });
    Ok(())
}

/// Killed with this value, also while it is stopped.
struct Worker {
    process: Child,
    says: BufReader<ChildStdout>,
}

impl Worker {
    fn start(options: &PgConnectOptions) -> anyhow::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["--exact", "suspended::worker", "--nocapture", "--test-threads=1"])
            .env(DATABASE, options.to_url_lossy().to_string())
            .stdout(Stdio::piped())
            .spawn()?;
        let says = BufReader::new(process.stdout.take().expect("piped"));
        Ok(Self { process, says })
    }

    fn wait_for(&mut self, line: &str) {
        let mut said = String::new();
        while self.says.read_line(&mut said).expect("a pipe") > 0 {
            if said.trim() == line {
                return;
            }
            said.clear();
        }
        panic!("the worker ended without saying {line:?}");
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.process.id().to_string()]).status().expect("kill");
        assert!(sent.success());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_suspended_owner_stores_nothing_and_takes_no_further_step(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    sqlx::query("create table step (at timestamptz not null)").execute(&pool).await?;
    let mut worker = Worker::start(&options)?;
    worker.wait_for("working");
    worker.signal("-STOP");

    let taker = Leasing::new(POLICY)?
        .with_in_flight(InFlight::Wait(PATIENCE))?
        .acquire::<String, _>(&pool, &key(), "body")
        .await?;
    let Acquired::Owner(taker) = taker else { panic!("nothing is stored") };
    assert_eq!(taker.attempt(), 2);
    taker.complete(&"the taker's".to_owned()).await?;
    let before: i64 = sqlx::query_scalar("select count(*) from step").fetch_one(&pool).await?;

    worker.signal("-CONT");
    worker.wait_for("lost");
    let after: i64 = sqlx::query_scalar("select count(*) from step").fetch_one(&pool).await?;
    // A step that had been sent when the process was stopped may arrive.
    assert!(after - before <= 1, "{} steps after it woke", after - before);
    let stored: String = sqlx::query_scalar("select convert_from(response_body, 'utf8') from idempotency.record")
        .fetch_one(&pool)
        .await?;
    assert_eq!(stored, "\"the taker's\"");
    Ok(())
}
