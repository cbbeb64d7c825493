//! A process of the service: it serves `POST /rides`, and resumes the rides of clients that do not come back. The route
//! calls lease mode itself and not through the HTTP layer, because a resumer has to finish a ride without a request.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use demos::gateway::Gateway;
use demos::outside::{Failure, Outside};
use demos::problem::Problem;
use demos::schema::Schema;
use demos::service::{serve, user};
use pg_idempotency::Key;
use pg_idempotency::lease::{Lease, Resumer};

use crate::ride::{NewRide, Rides, leasing};

/// Ten seconds are usual.
const INTERVAL: Duration = Duration::from_millis(200);

/// A request, a resumer and a renewal can each need a connection at the same time.
const CONNECTIONS: u32 = 10;

pub(crate) async fn rides(schema: &Schema, gateway: &str) -> anyhow::Result<Rides> {
    let operation = format!("POST /rides {}", schema.run);
    Ok(Rides { pool: schema.pool(CONNECTIONS).await?, outside: Outside::new(gateway), operation })
}

/// Without a resumer, and with a gateway of its own that lasts as long as the process.
pub(crate) async fn router(schema: &Schema) -> anyhow::Result<Router> {
    let gateway = Gateway::start().await?;
    let rides = rides(schema, &gateway.url).await?;
    Ok(routes(rides).layer(Extension(Arc::new(gateway))))
}

fn routes(rides: Rides) -> Router {
    Router::new().route("/rides", post(create)).with_state(rides)
}

/// Ends only with an error, or with the process.
pub(crate) async fn work(schema: &Schema, arguments: &[String]) -> anyhow::Result<()> {
    let [gateway] = arguments else { anyhow::bail!("a worker gets the gateway's URL") };
    let rides = rides(schema, gateway).await?;
    let resumer = Resumer::new(leasing(), &rides.operation)?.interval(INTERVAL);
    println!("{}", serve(routes(rides.clone())).await?);
    resumer.run(&rides.pool, pending(), async |lease: &Lease, new: NewRide| rides.perform(lease, &new).await).await;
    Ok(())
}

async fn create(State(rides): State<Rides>, headers: HeaderMap, Json(new): Json<NewRide>) -> Result<Response, Problem> {
    let value = headers.get("idempotency-key").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let key = Key::new(user(&headers)?, &rides.operation, value)?;
    // Over HTTP/2 the body of a request that its client has reset may end as if it were whole. hyper drops such a
    // request here, and could not drop the task.
    tokio::task::yield_now().await;
    // In a task of its own: a client that hangs up must not put a text in doubt.
    let booked = tokio::spawn(async move { rides.book(&key, &new).await });
    let panicked = |_| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal-error", "ask again with the same key");
    let outcome = booked.await.map_err(panicked)?.map_err(problem)?;
    let replayed = [("idempotent-replayed", outcome.is_replayed().to_string())];
    Ok((StatusCode::CREATED, replayed, Json(outcome.into_inner())).into_response())
}

fn problem(failure: Failure) -> Problem {
    match failure {
        Failure::Idempotency(error) => error.into(),
        Failure::NotDone(_) | Failure::Unknown(_) => {
            Problem::new(StatusCode::BAD_GATEWAY, "gateway-failed", failure.to_string())
        }
    }
}
