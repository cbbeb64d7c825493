//! Every interleaving of a few calls, on the real server, with the real crate: `script/interleave` runs it.

mod explore;
mod scenarios;
mod statement;
mod wire;
mod world;

use std::time::Instant;

use clap::Parser;
use sqlx::postgres::PgConnectOptions;

#[derive(Debug, Parser)]
struct Arguments {
    /// The server: a database is created for each thread.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    database_url: PgConnectOptions,
    /// Only the scenarios whose name contains this.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let database = world::create_database(&arguments.database_url, "interleave_0").await?;
    let mut world = world::World::open(&database, statement::Edits::default()).await?;
    for scenario in scenarios::all() {
        if !arguments.only.is_empty() && !arguments.only.iter().any(|only| scenario.name.contains(only)) {
            continue;
        }
        let started = Instant::now();
        let found = explore::Search::new(&mut world, &scenario).run(|_| false).await?;
        println!("{}: {} schedules, {} merged, {:.2} s", scenario.name, found.schedules, found.merged, started.elapsed().as_secs_f64());
        for end in &found.ends {
            println!("    {end}");
        }
        for (violation, trace) in &found.violations {
            println!("  ! {violation}\n    {trace}");
        }
    }
    world.close().await
}
