//! A payment service to check, with or without a mistake. The first argument is the port. The second argument is
//! `right`, `late` or `stuck`.
//!
//! ```sh
//! idempotency-check --database postgres:///shop --effects 'select count(*), coalesce(sum(amount), 0) from payments' \
//!     --json '{"amount":100}' http://127.0.0.1:8080/payments -- target/debug/examples/shop 8080 right
//! ```

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::{Router, routing::post};
use sqlx::{PgConnection, PgPool};

/// How the service remembers a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Stores the key in the transaction of the payment.
    Right,
    /// Stores the key after the payment was committed. If the connection is lost after the COMMIT of the payment and
    /// before the COMMIT of the key, a retry makes the payment again.
    Late,
    /// Stores the key as *processing* before the payment, in a transaction of its own. After a crash, the key is never
    /// released.
    Stuck,
}

type Failure = (StatusCode, String);

fn failed(error: sqlx::Error) -> Failure {
    // Many services do not survive an error of their connection.
    if std::env::var_os("SHOP_IS_FRAGILE").is_some() {
        std::process::exit(1);
    }
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

/// Creates the tables.
pub(crate) async fn create(pool: &PgPool) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(
        "create table if not exists payments (id bigserial primary key, amount bigint not null);
         create table if not exists keys (key text primary key, request text not null, answer text)",
    )
    .execute(pool)
    .await?;
    Ok(())
}

/// The service.
pub(crate) fn shop(pool: PgPool, memory: Memory) -> Router {
    Router::new().route("/payments", post(pay)).with_state((pool, memory))
}

async fn pay(
    State((pool, memory)): State<(PgPool, Memory)>,
    headers: HeaderMap,
    body: String,
) -> Result<Response, Failure> {
    let Some(key) = headers.get("idempotency-key").and_then(|key| key.to_str().ok()) else {
        return Err((StatusCode::BAD_REQUEST, "a key is required".to_owned()));
    };
    let mut tx = pool.begin().await.map_err(failed)?;
    if memory != Memory::Late && !claim(&mut tx, key, &body).await.map_err(failed)? {
        return remembered(&mut tx, key, &body).await;
    }
    if memory == Memory::Late && known(&mut tx, key).await.map_err(failed)? {
        return remembered(&mut tx, key, &body).await;
    }
    if memory == Memory::Stuck {
        tx.commit().await.map_err(failed)?;
        tx = pool.begin().await.map_err(failed)?;
    }
    let amount = body.chars().filter(char::is_ascii_digit).collect::<String>().parse::<i64>().unwrap_or_default();
    let payment = sqlx::query_scalar::<_, i64>("insert into payments (amount) values ($1) returning id");
    let id = payment.bind(amount).fetch_one(&mut *tx).await.map_err(failed)?;
    let answer = format!("{{\"id\":{id}}}");
    if memory == Memory::Late {
        tx.commit().await.map_err(failed)?;
        tx = pool.begin().await.map_err(failed)?;
        claim(&mut tx, key, &body).await.map_err(failed)?;
    }
    let remember = sqlx::query("update keys set answer = $2 where key = $1").bind(key).bind(&answer);
    remember.execute(&mut *tx).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok((StatusCode::CREATED, answer).into_response())
}

async fn claim(on: &mut PgConnection, key: &str, body: &str) -> Result<bool, sqlx::Error> {
    let claim = sqlx::query("insert into keys (key, request) values ($1, $2) on conflict do nothing");
    Ok(claim.bind(key).bind(body).execute(on).await?.rows_affected() == 1)
}

async fn known(on: &mut PgConnection, key: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select exists (select from keys where key = $1)").bind(key).fetch_one(on).await
}

async fn remembered(on: &mut PgConnection, key: &str, body: &str) -> Result<Response, Failure> {
    let row = sqlx::query_as::<_, (String, Option<String>)>("select request, answer from keys where key = $1");
    let (request, answer) = row.bind(key).fetch_one(on).await.map_err(failed)?;
    match answer {
        _ if request != body => Err((StatusCode::UNPROCESSABLE_ENTITY, "another request has this key".to_owned())),
        Some(answer) => Ok((StatusCode::CREATED, answer).into_response()),
        None => Err((StatusCode::CONFLICT, "the request is being processed".to_owned())),
    }
}

/// Serves on this port.
pub(crate) async fn serve(port: u16, memory: Memory) -> anyhow::Result<()> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    create(&pool).await?;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    Ok(axum::serve(listener, shop(pool, memory)).await?)
}

/// The [`Memory`] that the second argument names.
pub(crate) fn memory(name: &str) -> Memory {
    match name {
        "late" => Memory::Late,
        "stuck" => Memory::Stuck,
        _ => Memory::Right,
    }
}

#[allow(dead_code, reason = "the tests have a main function of their own")]
#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(port), Some(name)) = (arguments.next(), arguments.next()) else { anyhow::bail!("a port, and a memory") };
    serve(port.parse()?, memory(&name)).await
}
