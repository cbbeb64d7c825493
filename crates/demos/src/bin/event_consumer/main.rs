//! A consumer of a queue that delivers at least once, whose workers are killed in the middle of their work again and
//! again: each request comes to its end, with one stored result, and what ran twice is counted.
//!
//! ```sh
//! cargo run -p demos --bin event_consumer # on a throw-away PostgreSQL, unless DATABASE_URL names one
//! ```
//!
//! The [`worker`] uses the crate. The [`queue`] is a table, and so is the outside world, in [`effect`]. The [`plan`]
//! lists the faults, the [`crew`] are the worker processes, [`kill`] selects the process to kill, and [`audit`] compares
//! the counts. The program exits 0 only if every count is right.

mod audit;
mod crew;
mod effect;
mod kill;
mod plan;
mod queue;
mod schema;
mod worker;

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{bail, ensure};
use tokio::time::{Instant, interval};
use uuid::Uuid;

use crew::Crew;
use queue::Queue;
use schema::Schema;

/// As many as a small service runs; with fewer, a kill would leave nobody to deliver to.
const WORKERS: usize = 4;

/// Often enough to hit work of a second and a half in its middle, with time to spare.
const LOOK: Duration = Duration::from_millis(100);

/// It takes ten seconds on an idle machine. Past this it does not come to an end.
const LIMIT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let ended = match env::var("DATABASE_URL") {
        Ok(url) if !url.is_empty() => start(url),
        _ => Err(demos::on_a_throw_away_server(&[])),
    };
    match ended {
        Ok(wrong) if wrong.is_empty() => ExitCode::SUCCESS,
        Ok(wrong) => {
            wrong.iter().for_each(|wrong| println!("WRONG: {wrong}"));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("event_consumer: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns what is wrong; an error where it could not come to its end.
#[tokio::main]
async fn start(url: String) -> anyhow::Result<Vec<String>> {
    let mut arguments = env::args().skip(1);
    match (arguments.next().as_deref(), arguments.next()) {
        (None, _) => {
            // The database may hold what earlier runs have left, and another run may use it now.
            let run = Uuid::new_v4().simple().to_string().split_off(24);
            let schema = Schema::new(url, run);
            schema.create().await?;
            let wrong = demo(&schema).await;
            schema.drop().await?;
            wrong
        }
        (Some("worker"), Some(run)) => {
            demos::exit_with_parent();
            worker::work(&Schema::new(url, run)).await?;
            Ok(Vec::new())
        }
        _ => bail!("it takes no arguments"),
    }
}

async fn demo(schema: &Schema) -> anyhow::Result<Vec<String>> {
    let pool = schema.pool(2).await?;
    let queue = Queue { pool: pool.clone() };
    plan::send(&queue, &schema.run).await?;

    let mut crew = Crew::start(WORKERS, &schema.run)?;
    let started = Instant::now();
    let mut look = interval(LOOK);
    for looks in 0.. {
        look.tick().await;
        ensure!(started.elapsed() < LIMIT, "after {LIMIT:?} there are messages neither completed nor set aside");
        crew.must_be_alive()?;
        for victim in kill::victims(&pool).await? {
            crew.kill(victim.worker).await?;
            let hit = if kill::note(&pool, &victim).await? { "in the middle of" } else { "too late for" };
            let (at, worker) = (started.elapsed().as_secs_f64(), victim.worker);
            println!("{at:4.1} s: SIGKILL to worker {worker}, {hit} {}, attempt {}", victim.request_id, victim.attempt);
        }
        let states = queue.states().await?;
        let done = states.iter().all(|(state, _)| matches!(state.as_str(), "completed" | "poison"));
        if done || looks % 10 == 0 {
            let states: Vec<String> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
            println!("{:4.1} s: {}", started.elapsed().as_secs_f64(), states.join(", "));
        }
        if done {
            break;
        }
    }
    crew.end().await?;
    audit::audit(&pool, started.elapsed()).await
}
