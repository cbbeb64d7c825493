//! Lease mode in plain SQL, with one part broken.

use std::time::Duration;

use pg_idempotency::Outcome;
use sqlx::{PgPool, Row as _};
use tokio::time::sleep;

use crate::history::What;
use crate::lease::{Leased, affect};
use crate::lease_checker::Promise;
use crate::mutant::Mutant;
use crate::subject::{Failure, key};
use crate::world::World;

pub(crate) async fn call(
    mutant: Mutant,
    world: &World,
    pool: &PgPool,
    value: &str,
    call: &str,
    leased: Leased,
    work: Duration,
) -> Result<Outcome<String>, Failure> {
    let token = i64::from_le_bytes(*uuid::Uuid::new_v4().as_bytes().first_chunk().expect("sixteen bytes"));
    let mode = if leased.promise == Promise::AtMostOnce { "at_most_once" } else { "at_least_once" };
    let claim = match mutant {
        Mutant::TakesOverAtMostOnce => {
            "insert into idempotency.record as r (mode, scope, operation, value, fingerprint, token, lease_until, expires_at)
            values ($4::text, $1::text, 'chaos', $1::text, '\\x0000', $2::int8, now() + $3::float8 * interval '1 s', now() + interval '1 day')
            on conflict (scope, operation, value) do update set token = excluded.token, lease_until = excluded.lease_until
            where r.completed_at is null and r.lease_until <= statement_timestamp()
            returning token"
        }
        _ => {
            "insert into idempotency.record as r (mode, scope, operation, value, fingerprint, token, lease_until, expires_at)
            values ($4::text, $1::text, 'chaos', $1::text, '\\x0000', $2::int8, now() + $3::float8 * interval '1 s', now() + interval '1 day')
            on conflict (scope, operation, value) do update set token = excluded.token, lease_until = excluded.lease_until
            where r.mode = 'at_least_once' and r.completed_at is null and r.lease_until <= statement_timestamp()
            returning token"
        }
    };
    let claimed = sqlx::query(claim)
        .bind(value)
        .bind(token)
        .bind(leased.lease.as_secs_f64())
        .bind(mode)
        .fetch_optional(pool)
        .await?;
    if claimed.is_none() {
        let found = sqlx::query(
            "select convert_from(response_body, 'utf8')::json #>> '{}' as response from idempotency.record
            where operation = 'chaos' and value = $1::text",
        )
        .bind(value)
        .fetch_one(pool)
        .await?;
        return match found.get("response") {
            Some(response) => Ok(Outcome::Replayed(response)),
            None => Err(Failure::Mutant("in flight")),
        };
    }
    world.history.add(call, value, What::Claimed(token));
    if mutant == Mutant::CompletesFirst {
        complete(mutant, pool, value, call, token).await?;
    }
    sleep(work / 2).await;
    let downstream = pg_idempotency::lease::downstream_key(&key(value), value).expect("a fingerprint");
    affect(pool, value, call, &downstream, token).await?;
    sleep(work / 2).await;
    if mutant != Mutant::CompletesFirst {
        complete(mutant, pool, value, call, token).await?;
    }
    Ok(Outcome::Performed(call.to_owned()))
}

async fn complete(mutant: Mutant, pool: &PgPool, value: &str, call: &str, token: i64) -> Result<(), Failure> {
    let complete = match mutant {
        Mutant::CompletionWithoutToken => {
            "update idempotency.record set completed_at = now(), lease_until = null, response_body = to_json($2::text)::text::bytea
            where operation = 'chaos' and value = $1::text and $3::int8 is not null"
        }
        _ => {
            "update idempotency.record set completed_at = now(), lease_until = null, response_body = to_json($2::text)::text::bytea
            where operation = 'chaos' and value = $1::text and token = $3::int8 and completed_at is null"
        }
    };
    let completed = sqlx::query(complete).bind(value).bind(call).bind(token).execute(pool).await?;
    if completed.rows_affected() == 1 { Ok(()) } else { Err(Failure::Mutant("lease lost")) }
}
