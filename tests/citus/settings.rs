//! A setting that does not fit the table never gives a wrong answer.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Request, StatusCode};
use axum::routing::post;
use pg_idempotency::http::{Denied, IdempotencyLayer, IdempotentTx, NoTransaction, Rejection};
use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::mark::MarkOptions;
use pg_idempotency::{Deployment, Error, Idempotency, Key, Misuse, Verdict, migrate};
use rig::fixture::Fixture;
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};
use tower::ServiceExt as _;

use crate::{citus_alone, key, options};

const PLAIN: Deployment = Deployment::new().distributed(false);
/// PostgreSQL plans a prepared statement five times with its values, and then without them.
const CALLS: usize = 7;

fn plain() -> Idempotency {
    Idempotency::new().deployment(PLAIN)
}

/// An entry of the library that claims, or replays without a claim.
#[derive(Clone, Copy, Debug)]
enum Door {
    Ensure,
    SelectFirst,
    Isolated,
    Lease,
    Resume,
    Mark,
    MarkMany,
    Http,
    HttpSelectFirst,
    HttpLeased,
}

const DOORS: [Door; 10] = [
    Door::Ensure,
    Door::SelectFirst,
    Door::Isolated,
    Door::Lease,
    Door::Resume,
    Door::Mark,
    Door::MarkMany,
    Door::Http,
    Door::HttpSelectFirst,
    Door::HttpLeased,
];

/// The state in which a call finds its key.
#[derive(Clone, Copy, Debug)]
enum Found {
    Nothing,
    Live,
    Expired,
}

impl Door {
    fn is_http(self) -> bool {
        matches!(self, Self::Http | Self::HttpSelectFirst | Self::HttpLeased)
    }

    /// The states that make a difference. The layer makes its keys itself, and a resumer takes what it finds.
    fn found(self) -> &'static [Found] {
        match self {
            Self::Resume => &[Found::Live],
            door if door.is_http() => &[Found::Nothing],
            _ => &[Found::Nothing, Found::Live, Found::Expired],
        }
    }

    /// Leaves a record of this door, which another process may have written.
    async fn leave(self, pool: &PgPool, key: &Key, found: Found) -> anyhow::Result<()> {
        let fixture = match (self, found) {
            (Self::Resume, _) => Fixture::lapsed(key, "body", REPEATS)?.with_stored_request("body"),
            (_, Found::Nothing) => return Ok(()),
            (Self::Mark | Self::MarkMany, _) => Fixture::marked(key),
            (Self::Lease | Self::HttpLeased, _) => Fixture::lapsed(key, "body", REPEATS)?,
            _ => Fixture::completed(key, "body", &1)?,
        };
        let fixture = if matches!(found, Found::Expired) { fixture.expired() } else { fixture };
        Ok(fixture.write(pool).await?)
    }

    /// Calls with the setting for a plain table, and counts what was performed.
    async fn call(self, pool: &PgPool, key: &Key, performed: &AtomicU32) -> Result<(), Error> {
        let perform = async |_: &mut PgConnection| {
            performed.fetch_add(1, Ordering::Relaxed);
            Ok::<_, Error>(1)
        };
        match self {
            Self::Ensure => {
                let mut tx = pool.begin().await?;
                let _ = plain().ensure(&mut tx, key, "body", perform).await?;
                pg_idempotency::commit(tx).await
            }
            Self::SelectFirst => plain().replay_first(true).run(pool, key, "body", perform).await.map(drop),
            Self::Isolated => {
                let perform = async |conn: &mut PgConnection| perform(conn).await.map(Verdict::Keep);
                let mut tx = pool.begin().await?;
                let _ = plain().ensure_isolated(&mut tx, key, "body", perform).await?;
                pg_idempotency::commit(tx).await
            }
            Self::Lease => {
                let leasing = LeaseOptions::new(REPEATS).deployment(PLAIN);
                leasing.run(pool, key, "body", async |_| perform_outside(performed)).await.map(drop)
            }
            Self::Resume => {
                let leasing = LeaseOptions::new(REPEATS).deployment(PLAIN).store_request(true);
                let leasing = leasing.max_attempts(NonZeroU32::MAX);
                let work = async |_: &_, _: String| perform_outside(performed);
                leasing.resume_one(pool, key.operation(), work).await.map(drop)
            }
            Self::Mark | Self::MarkMany => {
                let marking = MarkOptions::new(Duration::from_secs(3600)).deployment(PLAIN);
                let mut tx = pool.begin().await?;
                match self {
                    Self::Mark => drop(marking.mark(&mut tx, key).await?),
                    _ => drop(marking.mark_many(&mut tx, std::slice::from_ref(key)).await?),
                }
                pg_idempotency::commit(tx).await
            }
            _ => unreachable!("over HTTP"),
        }
    }

    /// The same over HTTP.
    async fn request(self, pool: &PgPool, performed: &'static AtomicU32) -> anyhow::Result<(StatusCode, String)> {
        let scope = |_: &Parts| Ok::<_, Denied>("doors".to_owned());
        let handler = post(async |_tx: Result<IdempotentTx, NoTransaction>| {
            performed.fetch_add(1, Ordering::Relaxed);
            "done"
        });
        let transactional = |options| IdempotencyLayer::transactional(pool.clone(), options, scope);
        let router = Router::new().route("/", handler);
        let router = match self {
            Self::Http => router.layer(transactional(plain())),
            Self::HttpSelectFirst => router.layer(transactional(plain().replay_first(true))),
            _ => {
                let options = LeaseOptions::new(REPEATS).deployment(PLAIN);
                router.layer(IdempotencyLayer::leased(pool.clone(), options, scope))
            }
        };
        let request = Request::post("/").header("idempotency-key", uuid::Uuid::new_v4().to_string());
        let response = router.oneshot(request.body(Body::empty())?).await?;
        let rejection = response.extensions().get::<Rejection>().map(|rejection| format!("{rejection:?}"));
        Ok((response.status(), rejection.unwrap_or_default()))
    }
}

const REPEATS: Policy = Policy::AtLeastOnce { lease: Duration::from_secs(40) };

fn perform_outside(performed: &AtomicU32) -> Result<i32, Error> {
    performed.fetch_add(1, Ordering::Relaxed);
    Ok(1)
}

/// Each door is open in the plain database, and closed in the distributed one, whichever the process has used before.
#[tokio::test]
async fn of_two_databases_in_one_process_the_distributed_one_refuses_at_every_door() -> anyhow::Result<()> {
    let Some(citus) = citus_alone().await else { return Ok(()) };
    let name = format!("plain_{}", std::process::id());
    let mut admin = citus.pool.acquire().await?;
    admin.execute("set citus.enable_create_database_propagation = off").await?;
    // Without the nodes that template1 may have.
    admin.execute(AssertSqlSafe(format!("create database {name} template template0"))).await?;
    let open = PgPoolOptions::new().max_connections(2).connect_with(options().expect("a URL").database(&name)).await?;
    let closed = PgPoolOptions::new().max_connections(2).connect_with(options().expect("a URL")).await?;
    let tried = every_door(&open, &closed).await;
    open.close().await;
    closed.close().await;
    admin.execute(AssertSqlSafe(format!("drop database {name} with (force)"))).await?;
    admin.execute("reset citus.enable_create_database_propagation").await?;
    tried
}

async fn every_door(open: &PgPool, closed: &PgPool) -> anyhow::Result<()> {
    static PERFORMED: AtomicU32 = AtomicU32::new(0);
    // Citus is there, and has nothing to do with the table.
    open.execute("create extension citus").await?;
    migrate(open).await?;
    for door in DOORS {
        for found in door.found() {
            for _ in 0..CALLS {
                if door.is_http() {
                    let (status, rejection) = door.request(open, &PERFORMED).await?;
                    assert_eq!(status, StatusCode::OK, "{door:?}: {rejection}");
                    assert_eq!(PERFORMED.swap(0, Ordering::Relaxed), 1, "{door:?}");
                    let (status, rejection) = door.request(closed, &PERFORMED).await?;
                    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{door:?}");
                    assert!(rejection.contains("WrongDeployment"), "{door:?}: {rejection}");
                } else {
                    let key = key(&uuid::Uuid::new_v4().to_string());
                    door.leave(open, &key, *found).await?;
                    door.call(open, &key, &PERFORMED).await?;
                    PERFORMED.store(0, Ordering::Relaxed);
                    door.leave(closed, &key, *found).await?;
                    let refused = door.call(closed, &key, &PERFORMED).await;
                    assert!(
                        matches!(refused, Err(Error::Misuse(Misuse::WrongDeployment { .. }))),
                        "{door:?}, {found:?}: {refused:?}"
                    );
                }
                assert_eq!(PERFORMED.swap(0, Ordering::Relaxed), 0, "{door:?}, {found:?}");
            }
        }
    }
    Ok(())
}

/// What `migrate` does, in this transaction.
async fn create_plain(conn: &mut PgConnection) -> sqlx::Result<()> {
    let kept: Vec<_> = pg_idempotency::schema_sql()
        .lines()
        .filter(|line| !["begin;", "commit;"].contains(line))
        .map(str::to_owned)
        .collect();
    conn.execute(sqlx::AssertSqlSafe(kept.join("\n"))).await.map(drop)
}

/// Another session distributes the table of a service that has kept its statements prepared.
#[tokio::test]
async fn a_table_that_is_distributed_meanwhile_refuses_the_kept_statements() -> anyhow::Result<()> {
    let Some(citus) = citus_alone().await else { return Ok(()) };
    let mut conn = citus.pool.acquire().await?;
    // In one transaction that is rolled back, so the other tests keep their table.
    let mut tx = conn.begin().await?;
    tx.execute("drop schema idempotency cascade").await?;
    create_plain(&mut tx).await?;
    let call =
        async |conn: &mut PgConnection| plain().ensure(conn, &key("kept"), "body", async |_| Ok::<_, Error>(1)).await;
    for _ in 0..CALLS {
        assert!(!call(&mut tx).await?.is_replayed());
    }
    tx.execute("delete from idempotency.record").await?;
    sqlx::raw_sql("select create_distributed_table('idempotency.record', 'scope', colocate_with => 'none')")
        .execute(&mut *tx)
        .await?;
    let refused = call(&mut tx).await;
    assert!(matches!(refused, Err(Error::Misuse(Misuse::WrongDeployment { .. }))), "{refused:?}");
    tx.rollback().await?;
    Ok(())
}
