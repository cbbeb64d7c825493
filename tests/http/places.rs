//! Places are shared fairly: between requests that wait and requests that run, between keys, and between scopes. A
//! storm of requests with one key costs requests with other keys time, and nothing else.

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::post;
use futures_util::future::join_all;
use pg_idempotency::http::IdempotencyLayer;
use pg_idempotency::lease::Lease;
use pg_idempotency::{Key, OnDuplicate, operator};
use rig::cases::each;
use rig::gate::{Gate, PATIENCE};
use rig::lease::AT_LEAST_ONCE;
use sqlx::PgPool;
use tokio::task::{JoinHandle, JoinSet, yield_now};
use tokio::time::{interval, timeout};
use tower::ServiceExt as _;

use crate::support::{
    Answer, app_without_layer, create_effects, effects, leasing, of, pool_of, post_to, request, send, spawned_post,
    stops_at, transactional, until_runs, user, waiting,
};

/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);

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
async fn a_duplicate_that_waits_for_another_process_has_no_place(direct: PgPool) {
    create_effects(&direct).await;
    let elsewhere = pool_of(2, &direct.connect_options()).await;
    let cases = SIZES.into_iter().flat_map(|size| [(size, false), (size, true)]);
    each(cases, async |((connections, places), is_leased)| {
        let pool = pool_of(connections, &direct.connect_options()).await;
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
        pool.close().await;
        Ok(())
    })
    .await;
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
async fn a_storm_of_one_account_leaves_a_place_to_others(direct: PgPool) {
    create_effects(&direct).await;
    let by_default = [(2, None, None, 1), (10, None, None, 8), (10, Some(2), None, 1), (10, Some(8), None, 7)];
    for (connections, places, set, most) in by_default.into_iter().chain([(10, None, Some(3), 3)]) {
        let pool = pool_of(connections, &direct.connect_options()).await;
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

/// Three requests wait for a place, for one of their scope, or for one of their key, and are not polled any more.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_waiting_request_that_is_not_polled_stops_no_other(pool: PgPool) {
    let pool = pool_of(10, &pool.connect_options()).await;
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

/// Three times the default number of runs for a pool of three.
const STORM: usize = 300;
/// How many requests with other keys come during a storm, and how often. A third of them come before the first request
/// with the storm's key has ended.
const STRANGERS: usize = 300;
const PACE: Duration = Duration::from_millis(10);

fn storm(app: &Router, key: &str) -> Vec<JoinHandle<Answer>> {
    (0..STORM).map(|_| spawned_post(app, "/gate", key, "x")).collect()
}

/// Sends requests, each with a key of its own, until the storm is over. Returns how many there were.
async fn strangers_during(app: &Router, name: &str, storm: &[JoinHandle<Answer>]) -> i64 {
    let mut sent = 0;
    while sent == 0 || storm.iter().any(|one| !one.is_finished()) {
        let stranger = post_to(app, "/effects", &format!("{name}-{sent}"), "x").await;
        assert_eq!(stranger.status, StatusCode::CREATED, "stranger {sent}: {stranger:?}");
        sent += 1;
    }
    sent
}

async fn all_are_replayed(storm: Vec<JoinHandle<Answer>>) {
    for answer in join_all(storm).await {
        let answer = answer.expect("joined");
        assert!(answer.is_replayed(), "{answer:?}");
    }
}

/// A storm of duplicates arrives while the first request is performed. Requests with other keys come at a steady pace,
/// before and after it ends.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn duplicates_that_waited_for_one_request_take_no_places_of_others(direct: PgPool) {
    create_effects(&direct).await;
    let mut done = 0;
    for connections in [3, 1] {
        let pool = pool_of(connections, &direct.connect_options()).await;
        let gate = Gate::new();
        let app = app(&gate, waiting(&pool, PATIENCE));
        let key = format!("storm-{connections}");
        let first = spawned_post(&app, "/gate", &key, "x");
        gate.reached().await;
        let storm = storm(&app, &key);
        let (mut strangers, mut pace) = (Vec::new(), interval(PACE));
        for number in 0..STRANGERS {
            pace.tick().await;
            if number == STRANGERS / 3 {
                gate.open();
            }
            strangers.push(spawned_post(&app, "/effects", &format!("stranger-{connections}-{number}"), "x"));
        }
        let strangers = join_all(strangers).await.into_iter().map(|answer| answer.expect("joined").status);
        let refused = strangers.filter(|status| *status != StatusCode::CREATED).count();
        assert_eq!(refused, 0, "of {STRANGERS} requests with other keys, and {connections} connections");
        assert_eq!(first.await.expect("joined").status, StatusCode::OK);
        all_are_replayed(storm).await;
        done += 1 + i64::try_from(STRANGERS).expect("a small number");
        assert_eq!(effects(&pool).await, done);
        pool.close().await;
    }
}

/// No request waits for another one with its key: all are replays, and the layer rejects duplicates in flight.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn replays_of_one_key_take_no_places_of_others(pool: PgPool) {
    let pool = pool_of(3, &pool.connect_options()).await;
    create_effects(&pool).await;
    let gate = Gate::new();
    let app = app(&gate, transactional(&pool));
    gate.open();
    assert_eq!(post_to(&app, "/gate", "storm", "x").await.status, StatusCode::OK);
    let storm = storm(&app, "storm");
    yield_now().await;
    assert_eq!(effects(&pool).await, 1);
    let strangers = strangers_during(&app, "stranger", &storm).await;
    all_are_replayed(storm).await;
    assert_eq!(effects(&pool).await, 1 + strangers);
}
