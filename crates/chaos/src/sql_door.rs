//! Calls through the SQL functions, as a service in another language makes them.

use pg_idempotency::Outcome;
use serde_json::{Value, from_slice};
use sqlx::{PgConnection, PgPool};

use crate::mutant::Mutant;
use crate::request::{Failure, INDETERMINATE, Request};

/// What the function of the effect raises if the request says that it fails.
const ASKED_FOR: &str = "CH001";

type Called = Result<Outcome<String>, Failure>;

pub(crate) async fn call(mutant: Option<Mutant>, pool: &PgPool, request: &Request) -> Called {
    let mut tx = pool.begin().await?;
    let called = match within(mutant, &mut tx, request).await {
        Ok(Outcome::Performed(response)) if mutant == Some(Mutant::CompletesApart) => {
            tx.commit().await?;
            tx = pool.begin().await?;
            let token: i64 = sqlx::query_scalar("select token from idempotency.record where value = $1::text")
                .bind(&request.key)
                .fetch_one(&mut *tx)
                .await?;
            complete(&mut tx, request, token, &response).await.map(|()| Outcome::Performed(response))
        }
        called => called,
    };
    match &called {
        Ok(_) => tx.commit().await?,
        Err(_) => drop(tx.rollback().await),
    }
    if let Ok(Outcome::Performed(_)) = called {
        let other = ensure(&mut *pool.acquire().await?, request, b"another body").await;
        if other.is_ok_and(|(outcome, ..)| outcome != "key_reused") {
            return Err(Failure::Barred("another body got an answer"));
        }
    }
    called
}

async fn within(mutant: Option<Mutant>, conn: &mut PgConnection, request: &Request) -> Called {
    let (outcome, token, body) = ensure(conn, request, &request.bytes()).await?;
    if mutant == Some(Mutant::EffectBeforeAnswer) && outcome != "claimed" {
        request.effect(conn).await?;
    }
    match (outcome.as_str(), token, body) {
        ("claimed", Some(token), None) => {
            let response = request.effect(conn).await?;
            if mutant != Some(Mutant::CompletesApart) {
                complete(conn, request, token, &response).await?;
            }
            Ok(Outcome::Performed(response))
        }
        (outcome, None, body) => not_claimed(outcome, body),
        _ => Err(Failure::Barred("an outcome that nothing here can cause")),
    }
}

/// In one statement, which commits by itself.
pub(crate) async fn run(pool: &PgPool, request: &Request) -> Called {
    let run = sqlx::query_as(
        "select outcome, body
        from idempotency.run(scope => $1::text, operation => 'chaos', value => $1::text,
            fingerprint => idempotency.fingerprint($2::bytea), effect => 'public.affect',
            argument => jsonb_build_object('key', $1::text, 'call', $3::text, 'fails', $4::bool),
            wait => case when $5::bool then interval '0' end)",
    );
    let run = run.bind(&request.key).bind(request.bytes()).bind(&request.call).bind(request.fails);
    let answered: sqlx::Result<(String, Option<Vec<u8>>)> = run.bind(request.reject).fetch_one(pool).await;
    match answered {
        Ok((outcome, Some(body))) if outcome == "performed" => stored(&body).map(Outcome::Performed),
        Ok((outcome, body)) => not_claimed(&outcome, body),
        Err(error) if code(&error).as_deref() == Some(ASKED_FOR) => Err(Failure::AskedFor),
        Err(error) => Err(error.into()),
    }
}

fn code(error: &sqlx::Error) -> Option<std::borrow::Cow<'_, str>> {
    error.as_database_error()?.code()
}

fn not_claimed(outcome: &str, body: Option<Vec<u8>>) -> Called {
    match (outcome, body) {
        ("replayed", Some(body)) => stored(&body).map(Outcome::Replayed),
        ("in_flight", None) => Err(Failure::Refused("in flight")),
        ("indeterminate", None) => Err(Failure::Barred(INDETERMINATE)),
        _ => Err(Failure::Barred("an outcome that nothing here can cause")),
    }
}

/// The library can only compare what it has decoded.
fn stored(body: &[u8]) -> Result<String, Failure> {
    match from_slice(body) {
        Ok(Value::String(response)) if body == text(&response) => Ok(response),
        _ => Err(Failure::Barred("not the bytes that were stored")),
    }
}

async fn ensure(
    conn: &mut PgConnection,
    request: &Request,
    bytes: &[u8],
) -> sqlx::Result<(String, Option<i64>, Option<Vec<u8>>)> {
    sqlx::query_as(
        "select outcome, token, body
        from idempotency.ensure(scope => $1::text, operation => 'chaos', value => $1::text,
            fingerprint => idempotency.fingerprint($2::bytea), wait => case when $3::bool then interval '0' end)",
    )
    .bind(&request.key)
    .bind(bytes)
    .bind(request.reject)
    .fetch_one(conn)
    .await
}

async fn complete(conn: &mut PgConnection, request: &Request, token: i64, response: &str) -> Result<(), Failure> {
    let complete = sqlx::query(
        "select idempotency.complete(
            scope => $1::text, operation => 'chaos', value => $1::text, token => $2::int8, status => 200, body => $3::bytea
        )",
    );
    complete.bind(&request.key).bind(token).bind(text(response)).execute(conn).await?;
    Ok(())
}

fn text(response: &str) -> Vec<u8> {
    Value::from(response).to_string().into_bytes()
}
