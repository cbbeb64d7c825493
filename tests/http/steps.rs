//! Handlers that work in steps, from the lease that the layer gives them.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use pg_idempotency::http::Rejection;
use pg_idempotency::lease::{Lease, Policy};
use pg_idempotency::operator::resolve_step;
use pg_idempotency::testing::{Gate, lapse};
use pg_idempotency::{Error, Key};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};
use tokio::sync::{Notify, oneshot};

use crate::support::{Answer, create_effects, effects, leased, outside, post_to};

const LEASE: Duration = Duration::from_secs(60);
const IN_STEPS: Policy = Policy::InSteps { lease: LEASE };

fn key() -> Key {
    Key::new("ada", "POST /rides", "key-1").expect("a key")
}

/// The world outside, and what is to go wrong in it. It outlives the service's process.
#[derive(Default)]
struct World {
    /// The downstream key of each charge.
    charges: Mutex<Vec<String>>,
    texts: AtomicU32,
    text_fails: AtomicBool,
    /// The point at which the next handler stops.
    stop: Mutex<Option<(Point, Gate)>>,
    /// Drops the work of the handler.
    give_up: Notify,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    InRide,
    AfterRide,
    InCharge,
    AfterCharge,
    InText,
    AfterText,
}
const POINTS: [Point; 6] =
    [Point::InRide, Point::AfterRide, Point::InCharge, Point::AfterCharge, Point::InText, Point::AfterText];

impl World {
    async fn at(&self, point: Point) {
        let gate = self.stop.lock().unwrap_or_else(PoisonError::into_inner).take_if(|(at, _)| *at == point);
        if let Some((_, gate)) = gate {
            gate.pass().await;
        }
    }

    fn stop_at(&self, point: Point) -> Gate {
        let gate = Gate::new();
        *self.stop.lock().unwrap_or_else(PoisonError::into_inner) = Some((point, gate.clone()));
        gate
    }

    fn charges(&self) -> Vec<String> {
        self.charges.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn texts(&self) -> u32 {
        self.texts.load(Ordering::SeqCst)
    }
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Idempotency(#[from] Error),
    #[error("the gateway did not answer")]
    NoAnswer,
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (StatusCode::BAD_GATEWAY, self.to_string()).into_response()
    }
}

async fn insert(conn: &mut PgConnection, note: &str) -> Result<i64, Error> {
    Ok(sqlx::query_scalar("insert into effect (note) values ($1) returning id").bind(note).fetch_one(conn).await?)
}

async fn book(world: &World, lease: &Lease) -> Result<(StatusCode, String), Failure> {
    lease
        .step("ride", async |conn| -> Result<i64, Failure> {
            let ride = insert(conn, "ride").await?;
            world.at(Point::InRide).await;
            Ok(ride)
        })
        .await?;
    world.at(Point::AfterRide).await;
    let charge = lease
        .step_at_least_once("charge", async |step| -> Result<String, Failure> {
            world.charges.lock().unwrap_or_else(PoisonError::into_inner).push(step.downstream_key());
            world.at(Point::InCharge).await;
            Ok(step.downstream_key())
        })
        .await?;
    world.at(Point::AfterCharge).await;
    let text = lease
        .step_at_most_once("text", async |_| {
            let text = 1 + world.texts.fetch_add(1, Ordering::SeqCst);
            world.at(Point::InText).await;
            if world.text_fails.swap(false, Ordering::SeqCst) { Err(Failure::NoAnswer) } else { Ok(text) }
        })
        .await?;
    world.at(Point::AfterText).await;
    Ok((StatusCode::CREATED, format!("charge {charge}, text {text}")))
}

/// A handler that drops its work when it is told to.
async fn ride(State(world): State<Arc<World>>, lease: Lease) -> Response {
    tokio::select! {
        booked = book(&world, &lease) => booked.into_response(),
        () = world.give_up.notified() => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

fn layered(pool: &PgPool, routes: Router) -> Router {
    routes.layer(leased(pool, IN_STEPS))
}

fn app(pool: &PgPool, world: &Arc<World>) -> Router {
    layered(pool, Router::new().route("/rides", post(ride)).with_state(world.clone()))
}

async fn ask(app: &Router) -> Answer {
    post_to(app, "/rides", "key-1", "x").await
}

/// The step in doubt is the text.
async fn assert_indeterminate(pool: &PgPool, app: &Router) -> i64 {
    let answer = ask(app).await;
    assert_eq!((answer.status, &*answer.problem()), (StatusCode::CONFLICT, "indeterminate"));
    let Some(Rejection::Indeterminate { token, steps, .. }) = answer.rejection else { panic!("{answer:?}") };
    assert_eq!(steps, ["text"]);
    let found = pg_idempotency::operator::unsettled(pool, 10, None).await;
    let [found] = &found.expect("a list")[..] else { panic!("one record") };
    assert_eq!((found.token, found.steps_in_doubt()), (token, steps));
    token
}

/// After an attempt that ended at this point: the client comes back, and gets the final response. Each step is performed
/// once, except the charge if the attempt ended in its middle.
async fn assert_finished(pool: &PgPool, world: &Arc<World>, point: Point) -> anyhow::Result<()> {
    let app = app(pool, world);
    if point == Point::InText {
        for _ in 0..2 {
            assert_indeterminate(pool, &app).await;
        }
        let token = assert_indeterminate(pool, &app).await;
        resolve_step(pool, &key(), token, "text", &1).await?;
    }
    let answer = ask(&app).await;
    assert_eq!((answer.status, answer.is_replayed()), (StatusCode::CREATED, false), "{point:?}: {answer:?}");
    let charges = world.charges();
    assert_eq!(charges.len(), if point == Point::InCharge { 2 } else { 1 }, "{point:?}");
    assert!(charges.iter().all(|charge| *charge == charges[0]), "one downstream key");
    assert_eq!(answer.body, format!("charge {}, text 1", charges[0]));
    assert_eq!((effects(pool).await, world.texts()), (1, 1), "{point:?}");
    let repeat = ask(&app).await;
    assert_eq!((repeat.status, repeat.is_replayed(), repeat.body), (StatusCode::CREATED, true, answer.body));
    assert_eq!((effects(pool).await, world.charges().len(), world.texts()), (1, charges.len(), 1));
    outside(pool, "truncate effect, idempotency.record").await;
    Ok(())
}

/// A runtime that is shut down is a process that dies: all of its tasks end at their next await, and its connections
/// break.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_process_dies_in_the_middle_and_the_client_comes_back(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for point in POINTS {
        let world = Arc::new(World::default());
        let gate = world.stop_at(point);
        let process = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (options, in_process) = ((*pool.connect_options()).clone(), world.clone());
        process.spawn(async move {
            let pool = PgPoolOptions::new().max_connections(3).connect_with(options).await.expect("a pool");
            ask(&app(&pool, &in_process)).await
        });
        gate.reached().await;
        process.shutdown_background();
        let busy = ask(&app(&pool, &world)).await;
        assert_eq!(busy.problem(), "in-flight", "{point:?}: its lease is live");
        lapse(&pool, &key()).await?;
        assert_finished(&pool, &world, point).await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_handler_drops_its_work_in_the_middle_and_the_client_comes_back(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for point in POINTS {
        let world = Arc::new(World::default());
        let gate = world.stop_at(point);
        let app = app(&pool, &world);
        let first = tokio::spawn(async move { ask(&app).await });
        gate.reached().await;
        world.give_up.notify_one();
        assert_eq!(first.await?.status, StatusCode::SERVICE_UNAVAILABLE, "{point:?}");
        assert_finished(&pool, &world, point).await?;
    }
    Ok(())
}

/// The next attempt may be at work when such a task wakes.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_task_that_outlives_the_response_performs_no_step(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for status in [StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE] {
        let gate = Gate::new();
        let (sender, late) = oneshot::channel();
        let (gated, sender) = (gate.clone(), Arc::new(Mutex::new(Some(sender))));
        let handler = async move |lease: Lease| {
            let task = async move {
                gated.pass().await;
                let performed = AtomicU32::new(0);
                let perform = || -> Result<u32, Error> { Ok(performed.fetch_add(1, Ordering::SeqCst)) };
                let results = [
                    lease.step("ride", async |conn| insert(conn, "late").await.map(|_| 0)).await,
                    lease.step_at_least_once("charge", async |_| perform()).await,
                    lease.step_at_most_once("text", async |_| perform()).await,
                ];
                (results, lease.is_lost(), performed.into_inner())
            };
            let sender = sender.lock().unwrap_or_else(PoisonError::into_inner).take().expect("once");
            tokio::spawn(async move { drop(sender.send(task.await)) });
            status
        };
        let app = layered(&pool, Router::new().route("/rides", post(handler)));
        assert_eq!(ask(&app).await.status, status);
        gate.open();
        let (results, is_lost, performed) = late.await?;
        assert!(results.iter().all(|result| matches!(result, Err(Error::LeaseLost))), "{status}: {results:?}");
        assert_eq!((is_lost, performed, effects(&pool).await), (true, 0, 0), "{status}");
        sqlx::raw_sql("truncate idempotency.record").execute(&pool).await?;
    }
    Ok(())
}

/// It may have taken effect, although the handler has answered.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_task_in_the_middle_of_a_text_leaves_it_in_doubt(pool: PgPool) -> anyhow::Result<()> {
    let gate = Gate::new();
    let (sender, ended) = oneshot::channel();
    let (gated, sender) = (gate.clone(), Arc::new(Mutex::new(Some(sender))));
    let handler = async move |lease: Lease| {
        let sender = sender.lock().unwrap_or_else(PoisonError::into_inner).take().expect("once");
        let in_text = gated.clone();
        tokio::spawn(async move {
            let text = lease.step_at_most_once("text", async |_| {
                in_text.pass().await;
                Ok::<_, Error>(1)
            });
            drop(sender.send(text.await));
        });
        gated.reached().await;
        StatusCode::SERVICE_UNAVAILABLE
    };
    let app = layered(&pool, Router::new().route("/rides", post(handler)));
    assert_eq!(ask(&app).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(matches!(ended.await?, Err(Error::LeaseLost)), "it was stopped");
    assert_indeterminate(&pool, &app).await;
    let lapsed: bool =
        sqlx::query_scalar("select lease_until > '-infinity' from idempotency.record").fetch_one(&pool).await?;
    assert!(lapsed, "remembered for the whole retention");
    Ok(())
}
