//! Places are shared fairly: between requests that wait and requests that run, between keys, and between scopes.

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::post;
use pg_idempotency::http::IdempotencyLayer;
use pg_idempotency::lease::{Lease, Policy};
use pg_idempotency::{Key, OnDuplicate, operator};
use rig::gate::{Gate, PATIENCE};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tower::ServiceExt as _;

use crate::support::{
    Answer, app_without_layer, create_effects, leasing, of, pool_of, request, send, spawned_post, stops_at,
    transactional, until_runs, user, waiting,
};

/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);
const AT_LEAST_ONCE: Policy = Policy::AtLeastOnce { lease: Duration::from_secs(60) };

fn waiting_for_a_lease(pool: &PgPool, stores_requests: bool) -> IdempotencyLayer {
    let options = leasing(AT_LEAST_ONCE).store_request(stores_requests);
    let options = options.on_duplicate(OnDuplicate::Wait(LONG));
    IdempotencyLayer::leased(pool.clone(), options, user)
}

fn app(gate: &Gate, layer: IdempotencyLayer) -> Router {
    stops_at(gate).merge(app_without_layer()).layer(layer.optional_key(true))
}

/// A route behind a lease that stops at the gate, and one that does not.
fn outside(gate: &Gate, layer: IdempotencyLayer) -> Router {
    let gate = gate.clone();
    let gated = async move || gate.pass().await;
    let routes = Router::new().route("/gate", post(gated)).route("/effects", post(async || StatusCode::CREATED));
    routes.layer(layer.optional_key(true))
}

/// Sends a request with a key of its own, or without one, to the gate.
fn at_the_gate(app: &Router, user: &str, key: Option<&str>) -> JoinHandle<Answer> {
    let (app, request) = (app.clone(), of(user, request("POST", "/gate", key, "x")));
    tokio::spawn(async move { send(&app, request).await })
}

async fn is_served(app: &Router, user: &str, key: &str) {
    let answer = send(app, of(user, request("POST", "/effects", Some(key), "x"))).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{user} {key}: {answer:?}");
}

/// The pool of the other process has two connections for each of these.
const SIZES: [(u32, usize); 6] = [(1, 1), (1, 2), (2, 1), (2, 2), (10, 1), (10, 2)];

/// A request of another process is performed, and ten duplicates of it wait here.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_duplicate_that_waits_for_another_process_has_no_place(_: PgPoolOptions, options: PgConnectOptions) {
    let elsewhere = pool_of(2, &options).await;
    create_effects(&elsewhere).await;
    for (connections, places) in SIZES {
        let pool = pool_of(connections, &options).await;
        for is_leased in [false, true] {
            let gate = Gate::new();
            let (there, here) = match is_leased {
                false => (waiting(&elsewhere, LONG), waiting(&pool, LONG)),
                true => (waiting_for_a_lease(&elsewhere, false), waiting_for_a_lease(&pool, false)),
            };
            let runs = here.runs();
            let here = here.max_runs(places);
            let [there, here] =
                [there, here].map(|layer| if is_leased { outside(&gate, layer) } else { app(&gate, layer) });
            let name = format!("{connections}-{places}-{is_leased}");
            let first = spawned_post(&there, "/gate", &name, "x");
            gate.reached().await;
            let mut duplicates = JoinSet::new();
            for _ in 0..10 {
                let (app, key) = (here.clone(), name.clone());
                duplicates.spawn(async move { app.oneshot(request("POST", "/gate", Some(&key), "x")).await });
            }
            until_runs(&runs, |count| count > 0).await;
            for number in 0..3 {
                is_served(&here, "ada", &format!("{name}-{number}")).await;
            }
            assert_eq!(duplicates.len(), 10);
            let survivor = spawned_post(&here, "/gate", &name, "x");
            duplicates.abort_all();
            while duplicates.join_next().await.is_some() {}
            gate.open();
            assert_eq!(first.await.expect("joined").status, StatusCode::OK);
            assert!(survivor.await.expect("joined").is_replayed(), "{name}");
            // The others have ended with their clients.
            timeout(PATIENCE, runs.finished()).await.expect("in time");
        }
        pool.close().await;
    }
}

/// While the duplicate waits, the other process fails, and has not stored its request. The duplicate's claim does.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_duplicate_that_has_waited_stores_its_request(pool: PgPool) -> anyhow::Result<()> {
    let (failing, gate) = (Gate::new(), Gate::new());
    let gated = failing.clone();
    let fails = async move |_: Lease| {
        gated.pass().await;
        StatusCode::SERVICE_UNAVAILABLE
    };
    let there = Router::new().route("/gate", post(fails)).layer(waiting_for_a_lease(&pool, false));
    let here = waiting_for_a_lease(&pool, true);
    let runs = here.runs();
    let here = outside(&gate, here);
    let first = spawned_post(&there, "/gate", "key-1", "x");
    failing.reached().await;
    let duplicate = spawned_post(&here, "/gate", "key-1", "x");
    // It has polled, and pauses.
    until_runs(&runs, |count| count > 0).await;
    until_runs(&runs, |count| count == 0).await;
    failing.open();
    assert_eq!(first.await?.status, StatusCode::SERVICE_UNAVAILABLE);
    gate.reached().await;
    let shown = operator::show(&pool, &Key::new("ada", "POST /gate", "key-1")?).await?.expect("a record");
    assert_eq!((shown.attempt, &*shown.request.expect("a request").target), (2, "/gate"));
    gate.open();
    assert_eq!(duplicate.await?.status, StatusCode::OK);
    Ok(())
}

/// The requests of one account stop in their handlers, with or without keys, until another account is served.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_storm_of_one_account_leaves_a_place_to_others(_: PgPoolOptions, options: PgConnectOptions) {
    create_effects(&pool_of(1, &options).await).await;
    let by_default = [(2, None, None, 1), (10, None, None, 8), (10, Some(2), None, 1), (10, Some(8), None, 7)];
    for (connections, places, set, most) in by_default.into_iter().chain([(10, None, Some(3), 3)]) {
        let pool = pool_of(connections, &options).await;
        for (number, is_leased) in (0..10).map(|number| (number, number % 2 == 1)) {
            let gate = Gate::new();
            let mut layer = if is_leased { waiting_for_a_lease(&pool, false) } else { transactional(&pool) };
            // Taken before the bound is set.
            let runs = layer.runs();
            // Under a lease a handler has no connection, so its places alone count.
            if let Some(places) = places.or(is_leased.then_some(connections as usize)) {
                layer = layer.max_runs(places);
            }
            if let Some(most) = set {
                layer = layer.max_runs_of_one_scope(most);
            }
            let app = if is_leased { outside(&gate, layer) } else { app(&gate, layer) };
            let name = format!("{connections}-{places:?}-{set:?}-{number}");
            let has_keys = number % 3 > 0;
            let storm: Vec<_> = (0..20)
                .map(|of_storm| at_the_gate(&app, "storm", has_keys.then_some(&*format!("{name}-{of_storm}"))))
                .collect();
            for _ in 0..most {
                gate.reached().await;
            }
            for stranger in 0..5 {
                is_served(&app, "ada", &format!("{name}-stranger-{stranger}")).await;
            }
            assert_eq!(runs.count(), most, "{name}");
            (0..20).for_each(|_| gate.open());
            for answer in storm {
                assert_eq!(answer.await.expect("joined").status, StatusCode::OK, "{name}");
            }
        }
        pool.close().await;
    }
}

/// Polls the request once, as a service further out does that then waits for something else.
fn polled_once(app: &Router, request: Request<Body>) -> Pin<Box<dyn Future<Output = ()>>> {
    let app = app.clone();
    let mut call: Pin<Box<dyn Future<Output = ()>>> = Box::pin(async move { drop(app.oneshot(request).await) });
    // More than once, because the layer may yield after it has read the body.
    for _ in 0..5 {
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    call
}

/// Three requests wait for a place, for one of their scope, or for one of their key, and are polled no more.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_waiting_request_that_is_not_polled_stops_no_other(_: PgPoolOptions, options: PgConnectOptions) {
    let pool = pool_of(10, &options).await;
    create_effects(&pool).await;
    for (number, places) in [1, 2, 1, 2].into_iter().enumerate() {
        let gate = Gate::new();
        let layer = transactional(&pool).max_runs(places);
        let runs = layer.runs();
        let app = app(&gate, layer);
        let users = if number < 2 { ["eve"; 3] } else { ["eve", "bob", "mallory"] };
        let holders: Vec<_> =
            (0..places).map(|of| at_the_gate(&app, ["eve", "dan"][of], Some(&format!("holder-{number}")))).collect();
        for _ in 0..places {
            gate.reached().await;
        }
        let unpolled: Vec<_> = (0..6)
            .map(|of| {
                let key = format!("unpolled-{number}-{}", of / 2);
                polled_once(&app, of_user_at("/effects", users[of % 3], &key))
            })
            .collect();
        (0..places).for_each(|_| gate.open());
        for holder in holders {
            assert_eq!(holder.await.expect("joined").status, StatusCode::OK);
        }
        for user in ["eve", "ada"] {
            is_served(&app, user, &format!("victim-{number}")).await;
        }
        let same_key = send(&app, of_user_at("/effects", users[0], &format!("unpolled-{number}-0"))).await;
        assert_eq!(same_key.status, StatusCode::CREATED, "{same_key:?}");
        timeout(PATIENCE, runs.finished()).await.expect("in time");
        drop(unpolled);
    }
}

fn of_user_at(uri: &str, user: &str, key: &str) -> Request<Body> {
    of(user, request("POST", uri, Some(key), "x"))
}
