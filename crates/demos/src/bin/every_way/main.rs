//! Serves `POST /payments` through one way of the HTTP layer, for a program that checks it from outside
//! (`script/check-services`). It has no story of its own.
//!
//! ```sh
//! every_way WAY PORT # with DATABASE_URL
//! ```

use std::env;
use std::time::Duration;

use anyhow::{Context as _, bail};
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use demos::service::user;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx, LeasedBody, method_not_allowed};
use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::{Idempotency, OnDuplicate};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};

const TABLE: &str = "
    create table if not exists payments (
        id bigint generated always as identity,
        amount bigint not null,
        currency text not null,
        -- The key of a gateway that recognises repeats.
        charge text unique
    )
";

/// After a crash, a retry waits for the end of the lease. A service would have 40 seconds.
const LEASE: Duration = Duration::from_secs(2);

/// A payment takes milliseconds, so a duplicate had better wait than ask again.
const WAIT: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
struct NewPayment {
    amount: i64,
    currency: String,
}

#[derive(Serialize)]
struct Payment {
    id: i64,
    amount: i64,
    currency: String,
}

type Answer = Result<(StatusCode, Json<Payment>), StatusCode>;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [way, port] = arguments.as_slice() else { bail!("usage: every_way WAY PORT") };
    let url = env::var("DATABASE_URL").context("DATABASE_URL is not set")?;
    let pool = PgPoolOptions::new().max_connections(20).acquire_timeout(Duration::from_secs(3)).connect(&url).await?;
    pg_idempotency::migrate(&pool).await?;
    sqlx::raw_sql(rig::strict::SQL).execute(&pool).await?;
    sqlx::raw_sql(TABLE).execute(&pool).await?;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port.parse()?)).await?;
    Ok(axum::serve(listener, router(way, pool)?).await?)
}

fn router(way: &str, pool: PgPool) -> anyhow::Result<Router> {
    let transactional = |replay_first| -> anyhow::Result<_> {
        let calls = Idempotency::new().on_duplicate(OnDuplicate::Wait(WAIT)).replay_first(replay_first);
        let layer = IdempotencyLayer::transactional(pool.clone(), calls, |parts| Ok(user(&parts.headers)?));
        Ok(Router::new().route("/payments", post(in_the_transaction)).route_layer(layer))
    };
    let leased = |policy| -> anyhow::Result<_> {
        let layer =
            IdempotencyLayer::leased(pool.clone(), LeaseOptions::new(policy), |parts| Ok(user(&parts.headers)?));
        Ok(layer)
    };
    let lease = LEASE;
    match way {
        "transactional" => transactional(false),
        "replay-first" => transactional(true),
        "at-least-once" => {
            let layer = leased(Policy::AtLeastOnce { lease })?;
            Ok(Router::new().route("/payments", post(at_least_once)).route_layer(layer).with_state(pool))
        }
        "at-most-once" => {
            let layer = leased(Policy::AtMostOnce { lease })?;
            let payments = Router::new().route("/payments", post(at_most_once));
            Ok(payments.method_not_allowed_fallback(method_not_allowed).route_layer(layer).with_state(pool))
        }
        "in-steps" => {
            let layer = leased(Policy::InSteps { lease })?;
            Ok(Router::new().route("/payments", post(in_steps)).route_layer(layer))
        }
        _ => bail!("there is no way {way}"),
    }
}

async fn in_the_transaction(mut tx: IdempotentTx, Json(new): Json<NewPayment>) -> Answer {
    answered(insert(&mut tx, new, None).await)
}

/// The payment stands for a charge by a gateway that recognises repeats by their key.
async fn at_least_once(
    State(pool): State<PgPool>,
    LeasedBody(lease, Json(new)): LeasedBody<Json<NewPayment>>,
) -> Answer {
    answered(outside(&pool, new, Some(lease.downstream_key())).await)
}

/// The payment stands for an effect that nobody can ask for, such as a text.
async fn at_most_once(State(pool): State<PgPool>, LeasedBody(_, Json(new)): LeasedBody<Json<NewPayment>>) -> Answer {
    answered(outside(&pool, new, None).await)
}

async fn in_steps(LeasedBody(lease, Json(new)): LeasedBody<Json<NewPayment>>) -> Answer {
    let paid = lease.step("payment", async |conn| -> Result<_, pg_idempotency::Error> {
        Ok(insert(conn, NewPayment { amount: new.amount, currency: new.currency.clone() }, None).await?.id)
    });
    let id = paid.await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    Ok((StatusCode::CREATED, Json(Payment { id, amount: new.amount, currency: new.currency })))
}

async fn outside(pool: &PgPool, new: NewPayment, charge: Option<String>) -> sqlx::Result<Payment> {
    insert(&mut *pool.acquire().await?, new, charge).await
}

async fn insert(conn: &mut PgConnection, new: NewPayment, charge: Option<String>) -> sqlx::Result<Payment> {
    let NewPayment { amount, currency } = new;
    let id = sqlx::query_scalar(
        "
        insert into payments (amount, currency, charge)
        values ($1, $2, $3)
        on conflict (charge) do update
        set charge = excluded.charge
        returning id
        ",
    );
    let id = id.bind(amount).bind(&currency).bind(charge).fetch_one(conn).await?;
    Ok(Payment { id, amount, currency })
}

fn answered(paid: sqlx::Result<Payment>) -> Answer {
    let payment = paid.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    Ok((StatusCode::CREATED, Json(payment)))
}
