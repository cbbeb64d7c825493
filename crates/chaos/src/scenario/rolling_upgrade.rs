//! A newer release migrates while this one makes calls and its services start. There is one release so far, so the
//! newer one is made up: it adds a column, an index and a mode. Only here does a migration run under load. The tests in
//! `tests/behaviour/` show that this release leaves the records of a newer one alone.

use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use pg_idempotency::operator::health;
use pg_idempotency::{MIGRATOR, migrate};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{Connection as _, PgConnection, SqlSafeStr as _};
use tokio::time::sleep;

use crate::callers::{Callers, Way};
use crate::finding::Finding;
use crate::mutant::Mutant;
use crate::random::Random;
use crate::request::EVERY_DOOR;
use crate::stage::Stage;
use crate::world::{Least, World, pool};

const CLIENTS: usize = 6;
/// Services of this release that start, again and again.
const STARTERS: usize = 3;
/// Services of the newer release that migrate at the same moment.
const NEWER_STARTERS: usize = 3;

/// A migration that adds, and takes nothing away.
const EXPAND: &str = "
    alter table idempotency.record add column note text;
    alter table idempotency.record
        drop constraint known_mode,
        add constraint known_mode
            check (mode in ('transaction', 'at_least_once', 'in_steps', 'at_most_once', 'mark', 'transaction_2'))
            not valid;
    create index record_note on idempotency.record (note);
";

const LEAST: Least = &[("newer migration under load", 1), ("service started", 10)];

pub(super) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, LEAST).await?;
    let steps = Callers::in_steps_beside(&world);
    let way = Way::Transaction(|random, request| {
        request.enter(random, EVERY_DOOR);
        request.reject = random.one_in(4);
    });
    let callers = Callers::start(&world, way, pool(&world.options, 8), "c", CLIENTS);
    let upgrade = async {
        sleep(stage.time / 2).await;
        try_join_all((0..NEWER_STARTERS).map(|_| expand(&world))).await?;
        world.fault("newer migration under load");
        anyhow::Ok(())
    };
    let starters = join_all((0..STARTERS).map(|starter| start_services(&world, starter)));
    let (started, upgraded) = tokio::join!(starters, upgrade);
    upgraded?;
    let mut finding = callers.finding().await?;
    let refused = started.into_iter().flatten();
    finding.violations.extend(refused.take(1).map(|why| format!("a service does not start: {why:#}")));
    finding.add(steps.finding().await?);
    Ok(finding)
}

/// Starts services of this release on either schema. Returns the errors.
async fn start_services(world: &World, starter: usize) -> Vec<anyhow::Error> {
    let mut random = world.random(&format!("starter-{starter}"));
    let mut refused = Vec::new();
    while !world.is_over() {
        match start(world, &mut random).await {
            Ok(()) => world.fault("service started"),
            Err(error) => refused.push(error),
        }
        sleep(random.millis(1..20)).await;
    }
    refused
}

async fn start(world: &World, random: &mut Random) -> anyhow::Result<()> {
    let pool = pool(&world.options, 1);
    if world.mutant == Some(Mutant::NewerSchemaRefused) {
        migrator(MIGRATOR.iter().cloned().collect()).run(&pool).await?;
    } else if random.one_in(2) {
        MIGRATOR.run(&pool).await?;
    } else {
        migrate(&pool).await?;
    }
    health(&pool, Duration::from_secs(3600)).await?;
    pool.close().await;
    Ok(())
}

/// A service of the newer release starts.
async fn expand(world: &World) -> anyhow::Result<()> {
    let mut conn = PgConnection::connect_with(&world.options).await?;
    let mut migrations: Vec<_> = MIGRATOR.iter().cloned().collect();
    migrations.push(Migration::new(2, "add note".into(), MigrationType::Simple, EXPAND.into_sql_str(), false));
    migrator(migrations).run(&mut conn).await?;
    Ok(conn.close().await?)
}

fn migrator(migrations: Vec<Migration>) -> Migrator {
    let mut migrator = Migrator::with_migrations(migrations);
    migrator.create_schema("idempotency");
    migrator.dangerous_set_table_name("idempotency._sqlx_migrations");
    migrator
}
