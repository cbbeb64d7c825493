//! A migration, and two releases on the table that it leaves. There is one release so far, so the others are made up:
//! an older schema that lacks a column, and a newer one with a column, an index and a mode more, whose callers write
//! what this release cannot read.

use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use pg_idempotency::operator::health;
use pg_idempotency::{Fingerprint, MIGRATOR, migrate};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool, Row as _, SqlSafeStr as _};
use tokio::time::{Instant, sleep};

use crate::beside::InSteps;
use crate::history::What;
use crate::mutant::Mutant;
use crate::random::Random;
use crate::release_checker::{NEWER, NEWER_ONLY, violations_beside_a_newer_release};
use crate::stage::{Finding, Stage};
use crate::subject::{EVERY_DOOR, Request, Subject};
use crate::world::{Least, PAUSE, World, pool};

const CLIENTS: u64 = 6;
const NEWER_CLIENTS: usize = 2;
/// Services of this release that start, one after the other, each of them.
const STARTERS: usize = 3;
/// Of the newer release, at the same moment.
const NEWER_STARTERS: usize = 3;

/// As a release after this one may migrate: it adds, and takes nothing away.
const EXPAND: &str = "
    alter table idempotency.record add column note text;
    alter table idempotency.record
        drop constraint known_mode,
        add constraint known_mode
            check (mode in ('transaction', 'at_least_once', 'in_steps', 'at_most_once', 'mark', 'transaction_2'))
            not valid;
    create index record_note on idempotency.record (note);
";

const LEAST: Least = &[
    ("column added under load", 1),
    ("newer migration under load", 1),
    ("service started", 10),
    ("record of a newer release", 10),
];

pub(crate) async fn play(stage: &Stage) -> anyhow::Result<Finding> {
    let world = World::create(stage, "rolling-upgrade", LEAST).await?;
    world.observer.execute("alter table idempotency.record drop column last_error").await?;
    let steps = InSteps::beside(&world).await?;
    let callers = pool(&world.options, 8);
    let clients = world.crowd(&callers, CLIENTS, |random, request| {
        request.door = random.of(EVERY_DOOR);
        request.reject = random.one_in(4);
    });
    let upgrade = async {
        sleep(stage.time / 4).await;
        world.observer.execute("alter table idempotency.record add column last_error text").await?;
        world.fault("column added under load");
        sleep(stage.time / 4).await;
        try_join_all((0..NEWER_STARTERS).map(|_| expand(&world))).await?;
        world.fault("newer migration under load");
        try_join_all((0..NEWER_CLIENTS).map(|client| newer_client(&world, &callers, client))).await
    };
    let starters = join_all((0..STARTERS).map(|starter| start_services(&world, starter)));
    let (started, upgraded) = tokio::join!(starters, upgrade);
    upgraded?;
    for client in join_all(clients).await {
        client?;
    }
    callers.close().await;
    world.settle().await?;
    let mut violations = violations_beside_a_newer_release(&world.history.calls(), &world.aftermath().await?);
    let refused = started.iter().flat_map(|started| &started.refused);
    violations.extend(refused.take(1).map(|why| format!("a service does not start: {why}")));
    let slowest = started.iter().map(|started| started.slowest).max().unwrap_or_default();
    let barred = world.history.calls().iter().filter(|call| matches!(call.end, What::Barred(_))).count();
    let mut finding = Finding::with(&world, violations)
        .note(format!("{barred} calls refused for what they could not read"))
        .note(format!("the slowest migrate that had nothing to do: {:.3} s", slowest.as_secs_f64()));
    finding.add(steps.finding().await?);
    Ok(finding)
}

#[derive(Default)]
struct Started {
    slowest: Duration,
    refused: Vec<String>,
}

/// Services of this release that start again and again, on whatever schema is there.
async fn start_services(world: &World, starter: usize) -> Started {
    let mut random = world.random(&format!("starter-{starter}"));
    let mut started = Started::default();
    while !world.is_over() {
        let begun = Instant::now();
        match start(world, &mut random).await {
            Ok(()) => world.fault("service started"),
            Err(error) => started.refused.push(format!("{error:#}")),
        }
        started.slowest = started.slowest.max(begun.elapsed());
        sleep(random.millis(1..20)).await;
    }
    started
}

async fn start(world: &World, random: &mut Random) -> anyhow::Result<()> {
    let mut conn = PgConnection::connect_with(&world.options).await?;
    if world.subject == Subject::Mutant(Mutant::NewerSchemaRefused) {
        migrator(MIGRATOR.iter().cloned().collect()).run(&mut conn).await?;
    } else if random.one_in(2) {
        MIGRATOR.run(&mut conn).await?;
    } else {
        let pool = sqlx::PgPool::connect_with(world.options.clone()).await?;
        migrate(&pool).await?;
        pool.close().await;
    }
    conn.close().await?;
    let pool = pool(&world.options, 1);
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

/// A caller of the newer release: it reads all that there is, and writes what this release can read in one case of
/// three.
async fn newer_client(world: &World, pool: &PgPool, client: usize) -> anyhow::Result<()> {
    let name = format!("c{client}");
    let mut random = world.random(&format!("newer-{name}"));
    let mut number = 0;
    while !world.is_over() {
        number += 1;
        let key = world.choose_key(&mut random);
        let (name, mode, version) = match random.below(3) {
            0 => (format!("{NEWER_ONLY}{name}/{number}"), "transaction", 2),
            1 => (format!("{NEWER_ONLY}{name}/{number}"), "transaction_2", 1),
            _ => (format!("{NEWER}{name}/{number}"), "transaction", 1),
        };
        let request = Request::new(&key, &name);
        world.history.add(&name, &key, What::Invoked);
        let what = newer_call(pool, &request, mode, version).await?;
        if name.starts_with(NEWER_ONLY) && matches!(what, What::Performed(_)) {
            world.fault("record of a newer release");
        }
        world.history.add(&name, &key, what);
        sleep(PAUSE).await;
    }
    Ok(())
}

async fn newer_call(pool: &PgPool, request: &Request, mode: &str, version: u8) -> anyhow::Result<What> {
    let mut fingerprint = Fingerprint::of_json(request.key.as_str())?.as_bytes().to_vec();
    fingerprint[0] = version;
    let mut tx = pool.begin().await?;
    let claimed = sqlx::query(
        "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at, note)
        values ($2::text, $1::text, 'chaos', $1::text, $3::bytea, 1, now() + interval '1 day', 'newer')
        on conflict (scope, operation, value) do nothing",
    )
    .bind(&request.key)
    .bind(mode)
    .bind(fingerprint)
    .execute(&mut *tx)
    .await?;
    if claimed.rows_affected() == 0 {
        let found = sqlx::query(
            "select convert_from(response_body, 'utf8')::json #>> '{}' as response from idempotency.record
            where scope = $1::text and operation = 'chaos' and value = $1::text",
        )
        .bind(&request.key)
        .fetch_one(&mut *tx)
        .await?;
        tx.commit().await?;
        return Ok(What::Replayed(found.try_get("response")?));
    }
    let response = request.effect(&mut tx).await?;
    sqlx::query(
        "update idempotency.record set completed_at = now(), response_body = to_json($2::text)::text::bytea
        where scope = $1::text and operation = 'chaos' and value = $1::text and claimed_at = now()",
    )
    .bind(&request.key)
    .bind(&response)
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(What::Performed(response))
}
