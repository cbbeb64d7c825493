//! Abandoned requests of several accounts, of which some take for ever.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::{Request, StatusCode};
use axum::routing::post;
use pg_idempotency::Key;
use pg_idempotency::http::{Decision, IdempotencyLayer, RequestResumer, ResumedRequest};
use pg_idempotency::lease::{Lease, LeaseOptions};
use pg_idempotency::testing::age;
use rig::gate::{Gate, PATIENCE};
use rig::lease::AT_LEAST_ONCE;
use sqlx::PgPool;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::support::{of, request, send, until, until_runs, user};

const MINUTE: Duration = Duration::from_secs(60);
const OPERATION: &str = "POST /payments";

struct Service {
    layer: IdempotencyLayer,
    gate: Gate,
    /// The accounts of the attempts to resume.
    resumed: Arc<Mutex<Vec<String>>>,
}

impl Service {
    fn new(pool: &PgPool) -> anyhow::Result<Self> {
        let options = LeaseOptions::new(AT_LEAST_ONCE).store_request(true);
        let layer =
            IdempotencyLayer::leased(pool.clone(), options.max_attempts(NonZeroU32::MIN.saturating_add(4)), user);
        let layer = layer.store_header(axum::http::HeaderName::from_static("x-user"));
        Ok(Self { layer, gate: Gate::new(), resumed: Arc::default() })
    }

    /// The first attempt fails. A later one of `eve`, `bob` and `mallory` stops at the gate.
    fn routes(&self) -> Router {
        let (gate, resumed) = (self.gate.clone(), self.resumed.clone());
        let pay = async move |lease: Lease| {
            if lease.attempt() == 1 {
                return StatusCode::SERVICE_UNAVAILABLE;
            }
            let scope = lease.key().scope().to_owned();
            resumed.lock().expect("not poisoned").push(scope.clone());
            if scope != "ada" {
                gate.pass().await;
            }
            StatusCode::CREATED
        };
        Router::new().route("/payments", post(pay)).route_layer(self.layer.clone())
    }

    async fn abandoned(&self, pool: &PgPool, user: &str, key: &str) -> anyhow::Result<()> {
        let answer = send(&self.routes(), of(user, request("POST", "/payments", Some(key), "x"))).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        age(pool, &Key::new(user, OPERATION, key)?, MINUTE).await?;
        Ok(())
    }
}

async fn permit(_: &Key, _: &mut Request<Bytes>) -> Result<Decision, String> {
    Ok(Decision::Resume)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_abandoned_request_that_takes_for_ever_delays_its_own_scope_alone(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool)?;
    for user in ["eve", "bob", "mallory", "ada"] {
        for key in ["key-1", "key-2"] {
            service.abandoned(&pool, user, key).await?;
        }
    }
    let (stop, stopped) = oneshot::channel::<()>();
    let resumer = RequestResumer::new(&service.layer, OPERATION)?.interval(Duration::from_millis(100));
    let routes = service.routes();
    let resuming = tokio::spawn(async move { resumer.run(async { drop(stopped.await) }, permit, routes).await });
    until(&pool, "select count(*) = 2 from idempotency.record where scope = 'ada' and completed_at is not null").await;
    for _ in 0..3 {
        service.gate.reached().await;
    }
    let mut resumed = service.resumed.lock().expect("not poisoned").clone();
    resumed.sort_unstable();
    assert_eq!(resumed, ["ada", "ada", "bob", "eve", "mallory"], "of each other scope one at a time");
    // They count as runs, and so does for a moment the one that ends.
    until_runs(&service.layer.runs(), |count| count == 3).await;
    (0..6).for_each(|_| service.gate.open());
    until(&pool, "select count(*) = 8 from idempotency.record where completed_at is not null").await;
    drop(stop);
    timeout(PATIENCE, resuming).await??;
    assert_eq!(service.layer.runs().count(), 0);
    Ok(())
}

/// The only place belongs to a client, whose request stops at the gate.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn without_a_place_an_abandoned_request_stays_as_it_is(pool: PgPool) -> anyhow::Result<()> {
    let mut service = Service::new(&pool)?;
    service.layer = service.layer.max_runs(1);
    service.abandoned(&pool, "ada", "key-1").await?;
    let of_eve = || of("eve", request("POST", "/payments", Some("key-1"), "x"));
    assert_eq!(send(&service.routes(), of_eve()).await.status, StatusCode::SERVICE_UNAVAILABLE);
    let app = service.routes();
    let client = tokio::spawn(async move { send(&app, of_eve()).await });
    service.gate.reached().await;
    let resume = || service.layer.resume_one(OPERATION, permit, service.routes());
    assert_eq!(resume().await?, None);
    let untouched = "select attempt = 1 and request is not null from idempotency.record where scope = 'ada'";
    assert!(sqlx::query_scalar::<_, bool>(untouched).fetch_one(&pool).await?, "not claimed");
    service.gate.open();
    assert_eq!(client.await?.status, StatusCode::CREATED);
    assert!(matches!(resume().await?, Some(ResumedRequest::Answered(..))));
    Ok(())
}
